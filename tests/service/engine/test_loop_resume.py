"""Streams that continue: with another reader, after the loss of a front end, and after a restart of the engine. The
runner counts upwards: prompt [5, 6] gives 7, 8, 9, ..."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from npuserve.npu.step import SamplingParams, TokenLogprobs
from npuserve.service.engine import loop as module
from npuserve.service.engine.loop import Engine
from npuserve.service.errors import QueueFull, ServeError
from npuserve.service.ipc import messages as m
from npuserve.service.ipc.engine_socket import EngineSocket
from npuserve.service.streams.records import Records
from tests.service.engine.test_loop import MODEL, Peer, Running, until


class Resuming(Running):
    """An engine with records, which waits for `frontends` front ends."""

    def __init__(self, tmp_path: Path, delay: float, seconds: float, frontends: int):
        self._extra = Records(seconds), frontends
        super().__init__(tmp_path, delay, 64, 64)

    def make(self) -> Engine:
        records, frontends = self._extra
        return Engine(
            self.scheduler, self.runner, EngineSocket(self.address), MODEL, 7, records=records, frontends=frontends)


@contextmanager
def running(tmp_path: Path, delay: float = 0.002, seconds: float = 60.0, frontends: int = 0) -> Iterator[Resuming]:
    engine = Resuming(tmp_path, delay, seconds, frontends)
    yield engine
    engine.stop()


class Reader(Peer):
    def resume(self, key: int, token: str, offset: int = 0, owner: str = "me") -> None:
        self.send(m.Resume(key, token, offset, owner, None))

    def record(self, key: int) -> m.Record:
        """Receive the answer to `resume`."""
        while True:
            message = self.receive()
            if isinstance(message, m.Resumed) and message.key == key:
                return message.record
            self.keep(message)

    def begin(self, key: int, prompt: list[int], max_tokens: int, **fields: object) -> None:
        self.submit(key, prompt, max_tokens, resume_token=f"token {key}", owner="me", **fields)

    def started(self) -> list[m.Started]:
        while True:
            message = self.receive()
            if isinstance(message, m.Outputs) and message.started:
                return message.started
            self.keep(message)


def test_started_is_sent_before_the_first_token(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer = Reader(engine.address)
        peer.submit(1, list(range(20)), 40)
        assert peer.started() == [m.Started(1, 0)]
        assert peer.outputs == {}
        peer.until_tokens(1, 3)
        peer.submit(2, list(range(20)), 3)
        assert peer.started() == [m.Started(2, 16)]
        peer.send(m.Cancel(1))
        peer.until_end(2)


def test_resume_takes_over_a_live_stream(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        first, second = Reader(engine.address), Reader(engine.address)
        first.begin(1, [5, 6], 60)
        first.until_tokens(1, 4)
        second.resume(9, "token 1", 3)
        record = second.record(9)
        assert second.started() == [m.Started(9, 0)]
        so_far = len(record.token_ids)
        assert record.token_ids == [7 + i for i in range(so_far)]
        assert so_far >= 4
        finish = second.until_end(9)[9].finish
        assert finish
        assert finish.generated_tokens == 60
        assert record.token_ids + second.tokens(9) == [7 + i for i in range(60)]
        error = first.until_end(1)[1].error
        assert error
        assert error[0] == "TakenOver"
        assert first.tokens(1) == record.token_ids


def test_resume_continues_a_stream_that_was_left(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer = Reader(engine.address)
        peer.begin(1, [5, 6], 50, sampling=SamplingParams(logprobs=0))
        peer.until_tokens(1, 5)
        peer.send(m.Cancel(1))
        peer.submit(2, [1], 1)
        peer.until_end(2)
        assert engine.scheduler.num_running == 0
        peer.resume(3, "token 1", 5)
        record = peer.record(3)
        finish = peer.until_end(3)[3].finish
        assert finish
        assert record.token_ids + peer.tokens(3) == [7 + i for i in range(50)]
        reports = record.logprobs + [r for output in peer.outputs[3] for r in output.logprobs or []]
        assert [report.token_id for report in reports] == [7 + i for i in range(50)]
        assert finish.generated_tokens == 50
        phases = finish.timing.queue + sum(finish.timing.prefill_chunks) + finish.timing.decode
        assert phases == pytest.approx(finish.timing.last_step_end - record.request.arrival)
        assert len(finish.timing.prefill_chunks) == 2
        assert finish.timing.device + finish.timing.host == pytest.approx(
            sum(finish.timing.prefill_chunks) + finish.timing.decode)


def test_resume_continues_streams_of_a_lost_front_end(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        lost, other = Reader(engine.address), Reader(engine.address)
        lost.begin(1, [5, 6], 80)
        lost.until_tokens(1, 5)
        lost.socket.close()
        deadline = time.monotonic() + 60
        while engine.scheduler.num_running:  # within one iteration of the loop, before the next heartbeat
            assert time.monotonic() < deadline
            time.sleep(0.002)
        other.resume(1, "token 1", 5)
        record = other.record(1)
        other.until_end(1)
        assert record.token_ids + other.tokens(1) == [7 + i for i in range(80)]


def test_resume_repeats_a_finished_stream(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer = Reader(engine.address)
        peer.begin(1, [5, 6], 5)
        finish = peer.until_end(1)[1].finish
        for key in (2, 3):
            peer.resume(key, "token 1", key)
            record = peer.record(key)
            assert (record.token_ids, record.finish) == ([7, 8, 9, 10, 11], finish)
        peer.begin(4, [5], 200)
        peer.until_tokens(4, 5)
        peer.send(m.Cancel(4, keep=3))
        peer.until_end(4)
        peer.resume(5, "token 4", 3)
        record = peer.record(5)
        assert record.token_ids == [6, 7, 8]
        assert record.finish
        assert (record.finish.reason, record.finish.generated_tokens) == ("stop_string", 3)


def test_resume_refuses_unknown_streams(tmp_path: Path) -> None:
    with running(tmp_path, seconds=0.3) as engine:
        peer = Reader(engine.address)
        peer.begin(1, [5, 6], 5)
        peer.submit(2, [5, 6], 5)
        peer.until_end(1, 2)
        counted: list[ServeError] = []
        engine.engine._metrics.rejected = counted.append  # type: ignore[method-assign]
        peer.resume(10, "token 1", 6)
        peer.resume(11, "token 1", 0, owner="somebody else")
        peer.resume(12, "", 0)
        peer.resume(13, "token 2", 0)
        ends = peer.until_end(10, 11, 12, 13)
        assert {key: end.error[0] for key, end in ends.items() if end.error} == {
            10: "InvalidField", 11: "StreamNotFound", 12: "StreamNotFound", 13: "StreamNotFound"}
        assert ends[10].error
        assert ends[10].error[1] == "token_offset: must be in [0, 5], got 6"
        assert counted == []  # the queue has refused none
        time.sleep(0.35)
        peer.resume(14, "token 1", 0)
        error = peer.until_end(14)[14].error
        assert error
        assert error[0] == "StreamNotFound"


def test_resume_in_a_full_queue_is_refused_or_displaces_a_request_of_a_client_with_more(tmp_path: Path) -> None:
    with running(tmp_path, delay=0.005) as engine:
        peer = Reader(engine.address)
        for key, client in ((1, "small"), (2, "busy")):
            peer.begin(key, [5, 6], 50, client=client)
            peer.until_tokens(key, 3)
            peer.send(m.Cancel(key))
        for key in range(10, 17):  # 4 run and 3 wait
            peer.submit(key, [1], 200, client="busy")
        until(lambda: (engine.scheduler.num_running, engine.scheduler.num_waiting) == (4, 3))
        counted: list[ServeError] = []
        engine.engine._metrics.rejected = counted.append  # type: ignore[method-assign]
        saves: list[bool] = []
        engine.engine._crashes.save = lambda: saves.append(True)  # type: ignore[method-assign]
        peer.resume(3, "token 2")
        peer.resume(4, "token 1")
        assert peer.record(4).token_ids[:3] == [7, 8, 9]
        assert saves == [True]
        peer.until_end(16)
        errors = [output.error[1] for key in (3, 16) for output in peer.outputs[key] if output.error]
        assert [error.partition(":")[0] for error in errors] == ["queue full", "displaced"]
        assert [type(error) for error in counted] == [QueueFull] * 2
        for key in range(10, 16):
            peer.send(m.Cancel(key))
        assert peer.until_end(4)[4].finish


def restored(key: int, tokens: int, **fields: object) -> tuple[int, m.Record]:
    request = m.Request(f"r{key}", [5, 6], 30, time.monotonic(), resume_token=f"token {key}", owner="me")
    record = m.Record(msgspec.structs.replace(request, **fields))
    record.add(m.Output(key, [7 + i for i in range(tokens)]))
    return key, record


def left(key: int, tokens: int) -> m.EndedRecord:
    """Return the record of a stream whose reader has left."""
    records = Records(60.0)
    records.end(restored(key, tokens)[1], time.monotonic())
    return records.ended(time.monotonic())[0]


def test_restore_continues_streams_of_an_earlier_engine(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer, saves, accepted = Reader(engine.address), list[bool](), list[int]()
        engine.engine._crashes.save = lambda: saves.append(True)  # type: ignore[method-assign]
        peer.send(m.Restore([restored(key, key) for key in (0, 1, 2)], [left(4, 3)]))
        while not peer.tokens(2):
            peer.keep(message := peer.receive())
            accepted += message.accepted if isinstance(message, m.Outputs) else []
        assert accepted == [0, 1, 2]
        assert saves == [True]
        ends = peer.until_end(0, 1, 2)
        for key in (0, 1, 2):
            assert peer.tokens(key) == [7 + i for i in range(key, 30)]
            finish = ends[key].finish
            assert finish
            assert (finish.reason, finish.generated_tokens) == ("length", 30)
        peer.resume(5, "token 4", 2)
        assert peer.record(5).token_ids == [7, 8, 9]
        peer.until_end(5)
        assert peer.tokens(5) == [7 + i for i in range(3, 30)]
        peer.resume(6, "token 1", 0)
        assert peer.record(6).token_ids == [7 + i for i in range(30)]


@pytest.mark.slow
def test_restore_accepts_more_than_the_queue_holds(tmp_path: Path) -> None:
    """Requests that an earlier engine accepted are not refused, even if the queue is full; 4 run and 3 wait here."""
    with running(tmp_path, delay=0.005) as engine:
        peer, other = Reader(engine.address), Reader(engine.address)
        for key in range(7):
            other.submit(key, [1], 60, request_id=f"other {key}")
        other.until_tokens(0, 1)
        peer.send(m.Restore([restored(key, 1) for key in range(6)], []))
        peer.until_end(*range(6))
        assert all(peer.tokens(key) == [8 + i for i in range(29)] for key in range(6))
        other.until_end(*range(7))


def test_restore_repeats_no_prompt_logprobs(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer = Reader(engine.address)
        report = TokenLogprobs(6, -1.0, 1, [], [])
        key, record = restored(1, 2, sampling=SamplingParams(prompt_logprobs=0))
        record.add(m.Output(1, prompt_logprobs=[report]))
        peer.send(m.Restore([(key, record)], []))
        peer.until_end(1)
        assert not any(output.prompt_logprobs for output in peer.outputs[1])


def test_restore_by_two_front_ends_ends_the_first_reader(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        first, second = Reader(engine.address), Reader(engine.address)
        first.send(m.Restore([restored(1, 3)], []))
        first.until_tokens(1, 1)
        second.send(m.Restore([restored(1, 5)], []))
        second.until_end(1)
        assert second.tokens(1) == [7 + i for i in range(5, 30)]
        error = first.until_end(1)[1].error
        assert error
        assert error[0] == "TakenOver"


def test_restore_that_is_refused_ends_both_readers(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        first, second = Reader(engine.address), Reader(engine.address)
        first.send(m.Restore([restored(1, 3)], []))
        first.until_tokens(1, 1)
        second.send(m.Restore([restored(1, 30)], []))
        for reader, name in ((second, "InvalidField"), (first, "TakenOver")):
            error = reader.until_end(1)[1].error
            assert error
            assert error[0] == name


def test_restore_waits_for_all_front_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTORE_SECONDS", 30.0)
    with running(tmp_path, frontends=2) as engine:
        first, second = Reader(engine.address), Reader(engine.address)
        first.send(m.Restore([], [left(9, 1)], is_last=False))
        first.send(m.Restore([restored(1, 3)], []))
        first.submit(2, [9], 3)
        first.resume(3, "token 7", 0)  # the second front end has its record
        time.sleep(0.1)
        assert engine.scheduler.num_running == 0
        assert engine.runner._known == {}
        second.send(m.Restore([], [left(7, 4)]))
        assert first.record(3).token_ids == [7, 8, 9, 10]
        first.until_end(1, 2, 3)


def test_abort_during_a_restore_waits_for_the_requests_of_all_front_ends(tmp_path: Path) -> None:
    with running(tmp_path, frontends=2) as engine:
        first, second = Reader(engine.address), Reader(engine.address)
        first.send(m.Restore([], []))
        first.send(m.Abort(1, "r7"))
        second.send(m.Restore([restored(7, 4)], []))
        assert first.reply(1) == 1
        finish = second.until_end(7)[7].finish
        assert finish
        assert finish.reason == "aborted"


def test_restore_wait_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTORE_SECONDS", 0.1)
    with running(tmp_path, frontends=2) as engine:
        peer = Reader(engine.address)
        peer.send(m.Restore([restored(1, 3)], []))
        peer.until_end(1)
        assert peer.tokens(1) == [7 + i for i in range(3, 30)]


def test_restored_requests_are_not_displaced(tmp_path: Path) -> None:
    """A new request displaces no request that has generated tokens, even if its client has fewer requests."""
    with running(tmp_path, delay=0.005) as engine:
        peer = Reader(engine.address)
        peer.send(m.Restore([restored(key, 1) for key in range(7)], []))
        peer.until_tokens(0, 1)
        peer.submit(10, [1], 3, client="other")
        refused = peer.until_end(10)[10].error
        assert refused
        assert refused[0] == "QueueFull"
        peer.until_end(*range(7))
        assert all(peer.tokens(key) == [8 + i for i in range(29)] for key in range(7))
