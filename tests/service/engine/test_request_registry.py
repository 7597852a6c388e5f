"""Registry of live requests: names of calls, and the records of streams that cannot be resumed."""

from __future__ import annotations

import pytest

from npuserve.service.engine.crash_tracker import CrashTracker, request_hash
from npuserve.service.engine.request_registry import RequestRegistry
from npuserve.service.errors import DuplicateRequest, EngineKiller
from npuserve.service.ipc.messages import Request, Resume
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.streams.records import Records
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.manager import BuiltCompiler, StructuredOutputManager
from tests.support.fake_grammar import FakeCompiler


def new_registry(crashes: CrashTracker) -> RequestRegistry:
    scheduler = Scheduler(BlockManager(8, 4), max_num_seqs=2, max_num_batched_tokens=8, max_queue=4, aging_seconds=10)
    return RequestRegistry(scheduler, Records(10.0), crashes, StructuredOutputManager())


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


@pytest.mark.parametrize("is_paused", [False, True])
def test_quarantine_of_a_constrained_request_begins_when_its_grammar_is_compiled(is_paused: bool) -> None:
    """Not of one that is paused: others run while its reader is slow."""
    request = Request("r", [1], 9, 0.0, constraint=Constraint("regex", "3"))
    tracker = CrashTracker()
    tracker._fatal = frozenset({request_hash(request)})
    scheduler = Scheduler(BlockManager(8, 4), max_num_seqs=1, max_num_batched_tokens=8, max_queue=1, aging_seconds=1.0)
    compiler = FakeCompiler(9, frozenset({2}))
    structured_output = StructuredOutputManager(lambda on_done: BuiltCompiler(compiler, {2}))  # type: ignore[arg-type]
    registry = RequestRegistry(scheduler, Records(10.0), tracker, structured_output)
    registry.add(request, (b"f", 1), 0.0)
    assert not scheduler.quarantine
    if is_paused:
        scheduler.pause(registry.live[b"f", 1].id)
    while not (compiled := structured_output.poll()):
        pass
    ((sequence_id, matcher),) = compiled
    assert isinstance(matcher, AnswerMatcher)
    registry.constrain(scheduler.sequence(sequence_id), matcher)
    assert bool(scheduler.quarantine) == (not is_paused)
    structured_output.close()


def test_ended_request_waits_no_more_for_its_grammar() -> None:
    request = Request("r", [1], 9, 0.0, constraint=Constraint("regex", "3"))
    scheduler = Scheduler(BlockManager(8, 4), max_num_seqs=1, max_num_batched_tokens=8, max_queue=1, aging_seconds=1.0)
    compiler = FakeCompiler(9, frozenset({2}), is_slow=True)
    structured_output = StructuredOutputManager(lambda on_done: BuiltCompiler(compiler, {2}))  # type: ignore[arg-type]
    registry = RequestRegistry(scheduler, Records(10.0), CrashTracker(), structured_output)
    registry.add(request, (b"f", 1), 0.0)
    assert len(structured_output) == 1
    registry.end(registry.live[b"f", 1], 1.0)
    assert len(structured_output) == 0
    structured_output.close()
