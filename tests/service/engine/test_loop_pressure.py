"""Cancels, deadlines, pauses and refusals in the engine's loop, also during a long step."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from npuserve.npu.step import Step, StepResult
from npuserve.service.engine import loop as engine_module
from npuserve.service.engine.loop import Engine
from npuserve.service.ipc import messages as m
from npuserve.service.ipc.engine_socket import EngineSocket
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from tests.service.engine.test_loop import MODEL, Peer, running
from tests.support.counting_runner import FakeRunner
from tests.support.processes import until


class Gated(FakeRunner):
    """Runner whose step number `stuck` ends when `gate` is set. All other steps end at once."""

    def __init__(self, stuck: int):
        super().__init__(block_size=4)
        self.gate = threading.Event()
        self.launched = 0
        self._stuck = stuck
        self._held: StepResult | None = None

    def launch(self, step: Step) -> tuple[StepResult, float]:
        self.launched += 1
        handle = super().launch(step)
        if self.launched == self._stuck:
            self._held = handle[0]
        return handle

    def ready(self, handle: tuple[StepResult, float]) -> bool:
        return handle[0] is not self._held or self.gate.is_set()

    def collect(self, handle: tuple[StepResult, float]) -> StepResult:
        if handle[0] is self._held:
            assert self.gate.wait(60)
        return super().collect(handle)


class Gate:
    """An engine in its third step, whose expected duration is long."""

    def __init__(self, tmp_path: Path, **options: int):
        self.runner = Gated(3)
        self.blocks = BlockManager(64, 4, True)
        self.scheduler = Scheduler(
            self.blocks, max_num_batched_tokens=64, aging_seconds=10,
            **{"max_num_seqs": 2, "max_queue": 1, **options})
        for _ in range(500):  # the only samples that it has
            self.scheduler._estimator.record_step(0, 1, 9.0)
        self.scheduler._estimator.record_step = lambda *sample: None  # type: ignore[method-assign]
        self.address = f"{tmp_path}/engine"
        self.engine = Engine(self.scheduler, self.runner, EngineSocket(self.address), MODEL, epoch=7)
        self.thread = threading.Thread(target=self.engine.run, daemon=True)
        self.thread.start()
        self.peer = Peer(self.address)

    def __enter__(self) -> Gate:
        self.peer.submit(1, [1, 2, 3], 100)
        self.peer.until_tokens(1, 2)
        until(lambda: self.runner.launched == 4)
        return self

    def __exit__(self, *error: object) -> None:
        self.runner.gate.set()
        self.engine.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.scheduler.check_integrity()


def test_cancel_during_a_step_frees_before_its_end(tmp_path: Path) -> None:
    with Gate(tmp_path) as stuck:
        assert stuck.blocks.counts.used
        stuck.peer.send(m.Cancel(1))
        until(lambda: not stuck.blocks.counts.used)
        assert stuck.runner.launched == 4


def test_refusals_and_displacements_do_not_wait_for_a_step(tmp_path: Path) -> None:
    with Gate(tmp_path) as stuck:
        for key in (2, 3):
            stuck.peer.submit(key, [5], 5, client="a")
        stuck.peer.submit(4, [5], 5, client="a")
        assert stuck.peer.until_end(4)[4].error[0] == "QueueFull"  # type: ignore[index]
        stuck.peer.submit(5, [5], 5, client="b")
        error = stuck.peer.until_end(3)[3].error
        assert error
        assert (error[0], error[1].partition(":")[0]) == ("QueueFull", "displaced")
        assert stuck.runner.launched == 4
        stuck.runner.gate.set()
        assert all(end.finish for end in stuck.peer.until_end(2, 5).values())


def test_deadlines_do_not_wait_for_a_step(tmp_path: Path) -> None:
    with Gate(tmp_path, max_queue=4) as stuck:
        stuck.scheduler._estimator._light = 0.01
        stuck.peer.submit(2, [5], 5, deadline=time.monotonic() + 0.2)
        stuck.peer.submit(3, [5], 5, deadline=time.monotonic() - 1)
        ends = stuck.peer.until_end(2, 3)
        assert [ends[key].error[0] for key in (2, 3)] == ["DeadlineExceeded"] * 2  # type: ignore[index]
        assert stuck.runner.launched == 4


def test_deadline_keeps_the_generated_tokens(tmp_path: Path) -> None:
    with running(tmp_path, delay=0.01) as engine:
        peer = Peer(engine.address)
        peer.submit(1, [5, 6], 240, deadline=time.monotonic() + 0.4)
        finish = peer.until_end(1)[1].finish
        assert finish
        assert finish.reason == "deadline"
        assert finish.generated_tokens == len(peer.tokens(1)) > 0
        assert engine.scheduler.deadlines.tokens_in_vain == 0


def test_deadline_finish_is_sent_before_the_deadline_when_steps_became_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test controls the engine's clock: each step takes 0.3 s of it."""
    now = time.monotonic()
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now))
    with running(tmp_path) as engine:
        peer = Peer(engine.address)
        collect, send = engine.runner.collect, engine.engine._socket.send
        sent: list[float] = []

        def collect_slowly(handle: tuple[StepResult, float]) -> StepResult:
            nonlocal now
            now += 0.3
            return collect(handle)

        def send_and_note(frontend: bytes, message: m.ToFrontend) -> bool:
            if isinstance(message, m.Outputs) and any(output.finish for output in message.outputs):
                sent.append(now)
            return send(frontend, message)

        engine.runner.collect = collect_slowly  # type: ignore[method-assign]
        engine.engine._socket.send = send_and_note  # type: ignore[method-assign]
        deadline = now + 5.0
        peer.submit(1, [5, 6], 240, deadline=deadline)
        finish = peer.until_end(1)[1].finish
        assert finish
        assert (finish.reason, finish.generated_tokens) == ("deadline", len(peer.tokens(1)))
        assert deadline - 1.0 < sent[0] < deadline


def test_idle_engine_keeps_deadlines(tmp_path: Path) -> None:
    """All requests are paused: nothing is launched, and no message arrives."""
    with running(tmp_path, delay=0.002) as engine:
        peer = Peer(engine.address)
        peer.submit(1, [5, 6], 240, deadline=time.monotonic() + 0.5)
        peer.until_tokens(1, 3)
        peer.send(m.Pause(1))
        finish = peer.until_end(1)[1].finish
        assert finish
        assert finish.reason == "deadline"
        assert finish.generated_tokens < 200


def test_idle_engine_frees_the_requests_of_a_lost_front_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent that would show the loss."""
    with running(tmp_path, delay=0.002) as engine:
        peer = Peer(engine.address)
        peer.submit(1, [5, 6], 240)
        peer.until_tokens(1, 3)
        peer.send(m.Pause(1))
        until(lambda: engine.engine._is_idle)
        monkeypatch.setattr(engine_module, "HEARTBEAT_SECONDS", 3600.0)
        peer.socket.close()
        until(lambda: not engine.scheduler.num_paused)
        assert engine.engine._frontends == set()
        monkeypatch.undo()
        engine.engine._socket.wake()


class Stepped(FakeRunner):
    """Runner whose steps end only when the test releases them."""

    def __init__(self) -> None:
        super().__init__(block_size=4)
        self._changed = threading.Condition()
        self._released = 0
        self._blocked = False

    def release(self, steps: int) -> None:
        with self._changed:
            self._released += steps
            self._changed.notify_all()

    def wait_until_blocked(self) -> None:
        """Wait until the engine has used all released steps."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._blocked and not self._released, 20)

    def collect(self, handle: tuple[StepResult, float]) -> StepResult:
        with self._changed:
            self._blocked = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._released, 20)
            self._released -= 1
            self._blocked = False
        return super().collect(handle)


def test_paused_request_gets_no_tokens_while_others_do(tmp_path: Path) -> None:
    runner = Stepped()
    with running(tmp_path, runner=runner) as engine:
        peer = Peer(engine.address)
        peer.submit(1, [5, 6], 100)
        while len(peer.tokens(1)) < 3:
            runner.release(1)
            peer.keep(peer.receive())
        runner.wait_until_blocked()
        peer.send(m.Pause(1))
        peer.submit(2, [7], 150)
        runner.release(1000)
        peer.until_end(2)
        assert len(peer.tokens(1)) < 10
        peer.send(m.Pause(99))
        peer.send(m.Unpause(1))
        peer.until_end(1)
        assert peer.tokens(1) == list(range(7, 107))


@pytest.mark.parametrize("paused", [False, True])
def test_cancel_frees_within_two_steps(tmp_path: Path, paused: bool) -> None:
    runner = Stepped()
    with running(tmp_path, runner=runner) as engine:
        peer = Peer(engine.address)
        peer.submit(1, [9], 200)
        for key in (2, 3, 4):
            peer.submit(key, [1, 2, 3], 200)
            while len(peer.tokens(key)) < 2:
                runner.release(1)
                peer.keep(peer.receive())
            runner.wait_until_blocked()
            if paused:
                peer.send(m.Pause(key))
            used = engine.blocks.counts.used
            peer.send(m.Cancel(key))
            runner.release(2)
            until(lambda used=used: engine.blocks.counts.used < used)
        runner.release(300)
        peer.until_end(1)
        assert engine.blocks.counts.used == 0


def test_front_end_lost_as_its_request_starts_is_forgotten_before_the_step_ends(tmp_path: Path) -> None:
    """It may connect again during the step, and restores requests of the same names."""
    runner = Stepped()
    with running(tmp_path, runner=runner) as engine:
        peer, lost = Peer(engine.address), Peer(engine.address)
        for key in range(4):
            peer.submit(key, [5, 6], 20)
        while len(peer.tokens(3)) < 1:
            runner.release(1)
            peer.keep(peer.receive())
        lost.submit(9, [5, 6], 20)
        runner.wait_until_blocked()
        engine_socket, names = engine.engine._socket, list[bytes]()
        send = engine_socket.send

        def send_and_lose(frontend: bytes, message: m.ToFrontend) -> bool:
            if isinstance(message, m.Outputs) and message.started:
                names.append(frontend)
                engine_socket._disconnect(frontend, "lost")
            return send(frontend, message)

        engine_socket.send = send_and_lose  # type: ignore[method-assign]
        while not names:
            runner.release(1)
            runner.wait_until_blocked()
        assert engine.engine.registry.of_frontend(names[0]) == []
        runner.release(1000)
        peer.until_end(*range(4))
