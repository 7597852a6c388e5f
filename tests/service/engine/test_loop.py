"""The engine's loop over a real socket, with a runner that counts upwards: prompt [5, 6] gives 7, 8, 9, ..."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from npuserve.npu.step import SamplingParams
from npuserve.service.engine import loop as engine_module
from npuserve.service.engine.loop import Engine
from npuserve.service.ipc import framing
from npuserve.service.ipc import messages as m
from npuserve.service.ipc.engine_socket import EngineSocket
from npuserve.service.ipc.explanations import ExplainReply, ExplainRequest
from npuserve.service.scheduling.block_manager import AUDIT_BLOCKS, BlockManager, IntegrityError
from npuserve.service.scheduling.scheduler import Scheduler
from tests.support.counting_runner import FakeRunner
from tests.support.processes import until

MODEL = m.ModelInfo("Fake", 1000, 256, "float32", "none", "float32", "cpu", 4, 3, 512, 0, True)


class Peer:
    """A front end's end of the socket."""

    def __init__(self, address: str):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(address)
        self.received = framing.Splitter()
        self.messages: list[bytes] = []
        self.outputs: dict[int, list[m.Output]] = {}
        self.send(m.Hello())
        ready = self.receive()
        assert isinstance(ready, m.Ready)
        self.ready = ready

    def send(self, message: m.ToEngine) -> None:
        self.socket.sendall(m.encode(message))

    def receive(self) -> m.ToFrontend:
        while not self.messages:
            data = self.socket.recv(1 << 16)
            assert data, "the engine has closed the connection"
            self.messages = self.received.feed(data)
        return m.decode_to_frontend(self.messages.pop(0))

    def submit(self, key: int, prompt: list[int], max_tokens: int = 5, **fields: object) -> None:
        name = str(fields.pop("request_id", f"r{key}"))
        self.send(m.Submit(key, m.Request(name, prompt, max_tokens, time.monotonic(), **fields)))  # type: ignore[arg-type]

    def until_end(self, *keys: int) -> dict[int, m.Output]:
        """Receive until each key has its last output. Return the last outputs."""
        ends: dict[int, m.Output] = {}
        while not set(keys) <= set(ends):
            message = self.receive()
            if isinstance(message, m.Outputs):
                assert message.epoch == 7
                for output in message.outputs:
                    assert output.key not in ends, "an output after the last"
                    self.outputs.setdefault(output.key, []).append(output)
                    if output.finish or output.error:
                        ends[output.key] = output
        return ends

    def reply(self, call: int) -> int:
        while True:
            message = self.receive()
            if isinstance(message, m.Reply) and message.call == call:
                return message.value
            self.keep(message)

    def until_tokens(self, key: int, count: int) -> None:
        while len(self.tokens(key)) < count:
            self.keep(self.receive())

    def keep(self, message: m.ToFrontend) -> None:
        if isinstance(message, m.Outputs):
            for output in message.outputs:
                self.outputs.setdefault(output.key, []).append(output)

    def tokens(self, key: int) -> list[int]:
        return [token for output in self.outputs.get(key, []) for token in output.token_ids]


class Running:
    def __init__(self, tmp_path: Path, delay: float, budget: int, blocks: int, runner: FakeRunner | None = None):
        self.address = f"{tmp_path}/engine"
        self.runner = runner or FakeRunner(delay=delay, block_size=4)
        self.blocks = BlockManager(blocks, 4, True)
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=4, max_num_batched_tokens=budget, max_queue=3, aging_seconds=10, min_forced=2)
        self.engine = self.make()
        self.thread = threading.Thread(target=self.engine.run, daemon=True)
        self.thread.start()

    def make(self) -> Engine:
        return Engine(self.scheduler, self.runner, EngineSocket(self.address), MODEL, epoch=7)

    def stop(self) -> None:
        self.engine.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.scheduler.check_integrity()
        self.engine.registry.check_integrity()
        assert self.blocks.counts.used == 0, "blocks leaked"


@contextmanager
def running(
    tmp_path: Path, delay: float = 0.0, budget: int = 64, blocks: int = 64, runner: FakeRunner | None = None
) -> Iterator[Running]:
    engine = Running(tmp_path, delay, budget, blocks, runner)
    yield engine
    engine.stop()


def test_engine_sends_tokens_then_one_finish(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer = Peer(engine.address)
        assert peer.ready.model == MODEL
        peer.submit(1, [5, 6])
        finish = peer.until_end(1)[1].finish
        assert peer.tokens(1) == [7, 8, 9, 10, 11]
        assert finish
        assert (finish.reason, finish.prompt_tokens, finish.generated_tokens) == ("length", 2, 5)


def test_engine_ends_at_eos_and_stop_tokens(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer = Peer(engine.address)
        peer.submit(1, [5], 20, eos_token_ids=frozenset([9]))
        peer.submit(2, [5], 20, stop_token_ids=frozenset([8]), eos_token_ids=frozenset([9]))
        ends = peer.until_end(1, 2)
        assert {key: end.finish.reason for key, end in ends.items() if end.finish} == {1: "eos", 2: "stop_token"}
        assert (peer.tokens(1), peer.tokens(2)) == ([6, 7, 8, 9], [6, 7, 8])


def test_finish_timing_of_chunks_adds_up(tmp_path: Path) -> None:
    with running(tmp_path, budget=8, delay=0.002) as engine:
        peer = Peer(engine.address)
        began = time.monotonic()
        peer.submit(1, list(range(20)), 3)
        finish = peer.until_end(1)[1].finish
        assert finish
        timing = finish.timing
        assert peer.tokens(1) == [20, 21, 22]
        assert len(timing.prefill_chunks) == 3
        total = timing.queue + sum(timing.prefill_chunks) + timing.decode
        assert 0 < total <= time.monotonic() - began
        assert timing.device + timing.host == pytest.approx(sum(timing.prefill_chunks) + timing.decode)


def test_cancel_sends_nothing_more(tmp_path: Path) -> None:
    with running(tmp_path, delay=0.005) as engine:
        peer = Peer(engine.address)
        peer.submit(1, [1, 2, 3], 200)
        peer.until_tokens(1, 1)
        peer.send(m.Cancel(1))
        peer.submit(2, [5], 3)
        peer.until_end(2)
        made = len(peer.outputs[1])
        peer.submit(3, [5], 3)
        peer.until_end(3)
        assert len(peer.outputs[1]) == made
        assert not any(output.finish for output in peer.outputs[1])


def test_cancel_with_keep_finishes_as_stop_string(tmp_path: Path) -> None:
    with running(tmp_path, delay=0.003) as engine:
        peer = Peer(engine.address)
        peer.submit(1, [1], 200)
        peer.until_tokens(1, 3)
        peer.send(m.Cancel(1, keep=2))
        finish = peer.until_end(1)[1].finish
        assert finish
        assert (finish.reason, finish.generated_tokens) == ("stop_string", 2)


def test_abort_by_request_id_from_another_front_end(tmp_path: Path) -> None:
    with running(tmp_path, delay=0.003) as engine:
        asker, admin = Peer(engine.address), Peer(engine.address)
        asker.submit(1, [1], 200, request_id="mine")
        asker.until_tokens(1, 1)
        admin.send(m.Abort(1, "mine"))
        assert admin.reply(1) == 1
        finish = asker.until_end(1)[1].finish
        assert finish
        assert finish.reason == "aborted"
        assert finish.generated_tokens == len(asker.tokens(1))
        admin.send(m.Abort(2, "mine"))
        assert admin.reply(2) == 0


def test_abort_of_a_service_ends_its_own_requests_alone(tmp_path: Path) -> None:
    """Each service has request ids of its own. None is all services, "" is InferenceService."""
    with running(tmp_path, delay=0.003) as engine:
        peer = Peer(engine.address)
        for key, service in ((1, ""), (2, "vllm")):
            peer.submit(key, [1], 200, request_id="same", service=service, client="me")
            peer.until_tokens(key, 1)
        for call, (client, service, found) in enumerate((
            ("other", "vllm", 0), ("me", "none", 0), ("me", None, 2), ("me", "vllm", 1), ("me", "vllm", 0), ("", "", 1),
        )):
            peer.send(m.Abort(call, "same", client, service))
            assert peer.reply(call) == found
        peer.until_end(1)
        assert [peer.outputs[key][-1].finish.reason for key in (1, 2)] == ["aborted"] * 2  # type: ignore[union-attr]


def test_duplicates_and_a_full_queue_are_refused(tmp_path: Path) -> None:
    with running(tmp_path, delay=0.01) as engine:
        peer = Peer(engine.address)
        for key in range(12):
            peer.submit(key, [1], 30)
        peer.submit(50, [1], 3, request_id="r0")
        ends = peer.until_end(*range(12), 50)
        assert ends[50].error
        assert ends[50].error[0] == "DuplicateRequest"
        refused = [end for key, end in ends.items() if end.error and key != 50]
        assert refused
        assert all(end.error and end.error[0] == "QueueFull" and end.error[2] > 0 for end in refused)
        assert all(len(peer.tokens(key)) == 30 for key in range(12) if ends[key].finish)
        peer.submit(60, [1], 2, request_id="r0")
        assert peer.until_end(60)[60].finish


def test_lost_front_end_frees_its_requests(tmp_path: Path) -> None:
    with running(tmp_path, delay=0.003) as engine:
        lost, other = Peer(engine.address), Peer(engine.address)
        lost.submit(1, [1], 240)
        time.sleep(0.05)
        lost.socket.close()
        other.submit(1, [3], 5, request_id="other")
        other.until_end(1)
        deadline = time.monotonic() + 60
        while engine.scheduler.num_running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.scheduler.num_running == 0


def test_preempted_requests_are_answered_completely(tmp_path: Path) -> None:
    """12 blocks of 4 tokens for four requests of up to 30: some are preempted, and the answers do not change."""
    with running(tmp_path, blocks=12, budget=16) as engine:
        peer = Peer(engine.address)
        for key in range(4):
            peer.submit(key, [100 * key + i for i in range(10)], 20)
        ends = peer.until_end(0, 1, 2, 3)
        for key in range(4):
            assert peer.tokens(key) == [100 * key + 10 + i for i in range(20)]
            assert ends[key].finish
        assert engine.scheduler.preemptions > 0


def test_prefix_hits_and_flush(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer = Peer(engine.address)
        prompt = list(range(40))
        cached = []
        for key, salt in ((1, ""), (2, ""), (3, "other")):
            peer.submit(key, prompt, 3, cache_salt=salt)
            finish = peer.until_end(key)[key].finish
            assert finish
            cached.append(finish.cached_tokens)
            assert peer.tokens(key) == [40, 41, 42]
        assert cached == [0, 36, 0]
        peer.send(m.FlushPrefixCache(1))
        assert peer.reply(1) > 0
        peer.submit(4, prompt, 3)
        finish = peer.until_end(4)[4].finish
        assert finish
        assert finish.cached_tokens == 0


def test_idle_engine_sends_heartbeats(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer = Peer(engine.address)
        beat = peer.receive()
        assert isinstance(beat, m.Outputs)
        assert beat.outputs == []
        assert beat.load.free_kv_ratio == 1.0


def test_stop_ends_the_wait_of_an_idle_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "HEARTBEAT_SECONDS", 600.0)
    with running(tmp_path) as engine:  # its end waits for the thread
        peer = Peer(engine.address)
        peer.submit(1, [5], 1)
        peer.until_end(1)


def test_error_of_on_idle_ends_an_idle_engine(tmp_path: Path) -> None:
    """As when a rank of another host is lost."""
    def fail() -> None:
        raise RuntimeError("a rank is lost")

    engine = Engine(Scheduler(BlockManager(8, 4, True), max_num_seqs=4, max_num_batched_tokens=64, max_queue=3,
                              aging_seconds=10, min_forced=2),
                    FakeRunner(), EngineSocket(f"{tmp_path}/engine"), MODEL, epoch=7, on_idle=fail)
    with pytest.raises(RuntimeError, match="a rank is lost"):
        engine.run()


def test_idle_engine_sends_a_heartbeat_to_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the regular heartbeats, nothing else is sent to a front end that has no request."""
    monkeypatch.setattr(engine_module, "HEARTBEAT_SECONDS", 3600.0)
    with running(tmp_path, delay=0.005) as engine:
        peers = Peer(engine.address), Peer(engine.address)
        peers[0].submit(1, [1], 200)
        peers[0].until_tokens(1, 1)
        peers[1].send(m.FlushPrefixCache(1))
        peers[1].reply(1)  # all earlier messages to it are read
        peers[0].send(m.Cancel(1))
        for peer in peers:
            while not (isinstance(message := peer.receive(), m.Outputs) and not message.load.running):
                assert peer is peers[0]
        engine.engine.stop()
        peers[0].send(m.FlushPrefixCache(2))  # an idle engine waits for a message, or for the next heartbeat


def test_audit_runs_at_most_once_in_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "AUDIT_SECONDS", 3600.0)
    parts: list[int] = []  # number of parts of each audit
    audit = Scheduler.audit

    def counting(scheduler: Scheduler) -> Iterator[None]:
        parts.append(0)
        for _ in audit(scheduler):
            parts[-1] += 1
            yield

    monkeypatch.setattr(Scheduler, "audit", counting)
    with running(tmp_path, blocks=3 * AUDIT_BLOCKS) as engine:
        peer = Peer(engine.address)
        for key in range(20):
            before = len(parts)
            peer.submit(key, [5], 3)
            peer.until_end(key)
            until(lambda before=before: len(parts) > before)
        assert sum(count > 1 for count in parts) == 1  # the others only compared the counts
        engine.engine._next_audit = 0.0
        until(lambda: sum(count > 1 for count in parts) == 2)


def test_audit_ends_when_a_message_arrives(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer = Peer(engine.address)
        begun = threading.Event()

        def endless() -> Iterator[None]:
            yield  # the counts
            while True:
                begun.set()
                yield

        audit, engine.scheduler.audit = engine.scheduler.audit, endless  # type: ignore[method-assign]
        engine.engine._next_audit = 0.0
        assert begun.wait(60)
        peer.submit(1, [5, 6])
        assert peer.until_end(1)[1].finish
        engine.scheduler.audit = audit  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", ["count", "digest"])
def test_audit_of_an_idle_engine_finds_a_fault(tmp_path: Path, fault: str) -> None:
    blocks = BlockManager(8, 4)
    scheduler = Scheduler(blocks, max_num_seqs=4, max_num_batched_tokens=64, max_queue=3, aging_seconds=10)
    if fault == "count":
        blocks._free.pop()
    else:
        blocks._digest[3] = b"unknown"
    engine = Engine(scheduler, FakeRunner(), EngineSocket(f"{tmp_path}/engine"), MODEL, epoch=7)
    with pytest.raises(IntegrityError):
        engine.run()


def test_logprobs_are_sent_on_request(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer = Peer(engine.address)
        peer.submit(1, [5], 2, sampling=SamplingParams(logprobs=1))
        peer.submit(2, [5], 2)
        peer.until_end(1, 2)
        assert [r.token_id for o in peer.outputs[1] for r in o.logprobs or []] == [6, 7]
        assert not any(o.logprobs for o in peer.outputs[2])


def test_explain_says_what_a_request_waited_for(tmp_path: Path) -> None:
    """Four requests take all places for 30 steps; the fifth waits, and then runs alone."""
    with running(tmp_path, delay=0.01) as engine:
        peer = Peer(engine.address)
        for key in range(1, 5):
            peer.submit(key, [5], 30, client="c")
        peer.until_tokens(4, 1)
        peer.submit(5, [5], 3, client="c")
        peer.until_end(1, 2, 3, 4, 5)
        peer.send(ExplainRequest(9, "r5"))
        while not isinstance(reply := peer.receive(), ExplainReply):
            peer.keep(reply)
        (late,) = reply.explanations
        peer.send(ExplainRequest(10, "unknown"))
        while not isinstance(reply := peer.receive(), ExplainReply):
            peer.keep(reply)
        assert reply == ExplainReply(7, 10, [])
    assert late.delays[0].cause == "queue"
    assert late.delays[0].seconds > late.seconds / 2
    assert late.generated_tokens == 3
    assert not late.is_live
