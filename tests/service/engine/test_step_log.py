"""Step log: which requests it holds, and that it survives a crash."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from npuserve.service.engine.step_log import StepLog, request_hash
from npuserve.service.ipc.messages import Request
from tests.service.engine.test_crash_tracker import crash


def test_step_log_of_the_last_life_is_cleared_before_the_first_step(tmp_path: object) -> None:
    """Sequence ids restart in each life, and must not find the last life's hashes."""
    path, first, second = f"{tmp_path}/steps", Request("a", [1], 9, 0.0), Request("b", [1], 9, 0.0)
    crash(path, 0, first, 3, others=2)
    log = StepLog(path, 8, 8)
    assert request_hash(first) in log.read()
    assert len(log.read()) == 3
    log.clear()
    assert log.read() == frozenset()
    crash(path, 0, second, 3)
    assert StepLog(path, 8, 8).read() == {request_hash(second)}


def test_step_log_holds_only_the_steps_in_flight(tmp_path: object) -> None:
    log, requests = StepLog(f"{tmp_path}/steps", 8, 4), [Request(f"r{n}", [1], 9, 0.0) for n in range(12)]

    def step(*ids: int, new: tuple[int, ...] = (), ended: tuple[int, ...] = (), is_first: bool = False) -> list[str]:
        rows = [Row(n, [1], 1, [], True) for n in ids]
        begun = [NewRequest(n, [1], [], SamplingParams()) for n in new]
        log.write(Step(rows, begun, list(ended)), lambda n: SimpleNamespace(request=requests[n]), is_first)  # type: ignore[arg-type, return-value]
        names = {request_hash(request): request.request_id for request in requests}
        return sorted(names[name] for name in StepLog(f"{tmp_path}/steps", 8, 4).read())

    assert step(0, 1, new=(0, 1), is_first=True) == ["r0", "r1"]
    assert step(0, 2, new=(2,)) == ["r0", "r1", "r2"]
    assert step(0, 2, ended=(1,)) == ["r0", "r2"]
    assert step(2) == ["r0", "r2"]
    assert step(2) == ["r2"]
    assert step(3, new=(3,), is_first=True) == ["r3"]
    for n in range(4, 12):  # places are reused
        assert step(n, new=(n,), ended=(n - 1,)) == [f"r{n}"]


def test_step_log_with_another_size_or_without_a_file_is_empty(tmp_path: object) -> None:
    crash(f"{tmp_path}/steps", 0, Request("a", [1], 9, 0.0), 3)
    assert StepLog(f"{tmp_path}/steps", 9, 8).read() == frozenset()
    log = StepLog("", 0, 0)
    log.write(Step([Row(1, [1], 1, [], True)]), lambda n: pytest.fail("called"), True)
    log.clear()
    assert log.read() == frozenset()


def test_request_hash_differs_between_samples_of_a_call() -> None:
    first = Request("r", [1], 3, 5.0, samples=2)
    second = msgspec.structs.replace(first, index=1)
    assert request_hash(first) != request_hash(second)
    assert request_hash(second) == request_hash(msgspec.structs.replace(second, output_ids=[1]))
