"""Registry of live requests: names of calls, and the records of streams that cannot be resumed."""

from __future__ import annotations

import pytest

from npuserve.service.engine.crash_tracker import CrashTracker
from npuserve.service.engine.grammars import Grammars
from npuserve.service.engine.request_registry import RequestRegistry
from npuserve.service.errors import DuplicateRequest, EngineKiller
from npuserve.service.ipc.messages import Request, Resume
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.streams.records import Records


def new_registry(crashes: CrashTracker) -> RequestRegistry:
    scheduler = Scheduler(BlockManager(8, 4), max_num_seqs=2, max_num_batched_tokens=8, max_queue=4, aging_seconds=10)
    return RequestRegistry(scheduler, Records(10.0), crashes, Grammars(scheduler))


@pytest.mark.parametrize(("index", "samples", "arrival"), [(0, 2, 5.0), (1, 3, 5.0), (1, 2, 6.0)])
def test_add_another_call_of_a_live_name_is_refused(index: int, samples: int, arrival: float) -> None:
    registry = new_registry(CrashTracker())
    registry.add(Request("r", [1], 3, 5.0, samples=2), (b"f", 1), 7.0)
    with pytest.raises(DuplicateRequest):
        registry.add(Request("r", [1], 3, arrival, samples=samples, index=index), (b"f", 2), 7.0)
    registry.add(Request("r", [1], 3, 5.0, samples=2, index=1), (b"f", 3), 7.0)
    registry.check_integrity()
    assert [len(found) for found in registry.find("r")] == [2]


def test_discard_forgets_the_record() -> None:
    registry = new_registry(CrashTracker())
    registry.add(Request("r", [1], 3, 5.0, resume_token="t", owner="me"), (b"f", 1), 7.0)
    sequence = registry.live[b"f", 1]
    registry._scheduler.cancel(sequence.id)
    registry.discard(sequence, 8.0)
    assert registry.records.find("t", "me", 8.0) is None
    registry.check_integrity()


def test_resume_of_a_request_that_kills_engines_forgets_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Request, tokens: int) -> None:
        raise EngineKiller("the engine died")

    crashes = CrashTracker()
    registry = new_registry(crashes)
    registry.add(Request("r", [1], 3, 5.0, resume_token="t", owner="me"), (b"f", 1), 7.0)
    registry.end(registry.live[b"f", 1], 8.0)
    monkeypatch.setattr(crashes, "assess", refuse)
    with pytest.raises(EngineKiller):
        registry.resume(Resume(2, "t", 0, "me", None), (b"f", 2), 8.0)
    assert registry.records.find("t", "me", 8.0) is None
    registry.check_integrity()
