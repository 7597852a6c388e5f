"""The compiler of the engine process, with the library and the tokenizer of the built-in model."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from npuserve.npu import storyteller
from npuserve.service import metrics
from npuserve.service.engine import grammars as grammars_module
from npuserve.service.engine.grammars import RETRY_SECONDS, BuiltCompiler, Grammars, PendingGrammar
from npuserve.service.engine.process import build_compiler
from npuserve.service.errors import NoTokenizer, QueueFull, Unavailable
from npuserve.service.grammar.errors import CompilerFailed, CompilerFull, UnsupportedVocabulary
from npuserve.service.ipc.messages import Constraint, PriorProgress, Request
from npuserve.service.scheduling.answer_matcher import AnswerMatcher
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.text.model_folder import open_folder
from tests.support.fake_grammar import FakeCompiler, allowed, next_mask

CHOICES = Constraint("choices", '["yes", "no"]')


def request(**fields: object) -> Request:
    return Request("r", [1], 9, 0.0, constraint=CHOICES, **fields)  # type: ignore[arg-type]


def new_scheduler() -> Scheduler:
    return Scheduler(
        BlockManager(8, 4), max_num_seqs=1, max_num_batched_tokens=8, max_queue=1, aging_seconds=1.0)


def submit_and_build(grammars: Grammars, pending: PendingGrammar) -> None:
    """Submit a constraint, and wait until the compiler is built or has failed."""
    pending.submit()
    assert grammars._builder
    grammars._builder.join()


def assert_compiled(grammars: Grammars, pending: PendingGrammar) -> None:
    """Submit a constraint while the compiler is not built, and again when it is."""
    submit_and_build(grammars, pending)
    pending.submit()
    assert pending.compilation


def test_build_compiler_matches_answers_of_the_tokenizer() -> None:
    folder = open_folder(storyteller.FOLDER, "", "")
    assert folder.tokenizer
    size = int(folder.config["vocab_size"])
    compiler, end_ids = build_compiler(storyteller.FOLDER, size)
    try:
        compilation = compiler.submit(CHOICES)
        deadline = time.monotonic() + 60
        while not compilation.done:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert compilation.error is None
        matcher = AnswerMatcher(request(), compilation, end_ids)
        for token in (*folder.tokenizer.encode("yes", add_special_tokens=False), min(folder.eos_token_ids)):
            mask = next_mask(matcher, size)
            assert mask is not None
            assert allowed(token, mask)
            matcher.advance(token)
        assert matcher.error is None
        assert (matcher.has_ended, matcher.is_complete) == (True, True)
    finally:
        compiler.close()


def test_build_compiler_without_a_tokenizer_is_unsupported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedVocabulary, match="no tokenizer"):
        build_compiler(tmp_path, 100)


def test_constraint_without_a_compiler_is_refused() -> None:
    pending = Grammars(new_scheduler()).pending(request())
    assert pending
    with pytest.raises(NoTokenizer, match="choices"):
        pending.submit()


class PanicException(BaseException):
    """What a library in Rust raises."""


@pytest.mark.parametrize("cause", [OSError(errno.EMFILE, "Too many open files"), PanicException("assertion failed")])
def test_compiler_that_could_not_be_built_is_built_again(
    cause: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = FakeCompiler(9, frozenset({2}))
    causes = [cause]

    def build(on_done: Callable[[], None]) -> BuiltCompiler:
        if causes:
            raise causes.pop()
        return BuiltCompiler(compiler, {2})

    grammars = Grammars(new_scheduler(), build)
    pending = grammars.pending(request())
    assert pending
    submit_and_build(grammars, pending)
    with pytest.raises(Unavailable, match="choices: the compiler cannot start") as refused:
        pending.submit()
    assert 0 < refused.value.retry_seconds <= RETRY_SECONDS
    assert "the compiler of constraints cannot start" in caplog.text
    monkeypatch.setattr(grammars, "_retry_at", 0.0)
    assert_compiled(grammars, pending)
    grammars.close()


def test_constraint_without_a_further_thread_is_refused_and_the_next_is_compiled(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    compiler = FakeCompiler(9, frozenset({2}))
    grammars = Grammars(new_scheduler(), lambda on_done: BuiltCompiler(compiler, {2}))
    pending = grammars.pending(request())
    assert pending
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start)
        with pytest.raises(Unavailable, match="choices: the compiler cannot start"):
            pending.submit()
    assert_compiled(grammars, pending)
    grammars.close()


def test_full_compiler_refuses_new_requests_only() -> None:
    def full(constraint: Constraint, client: str) -> None:
        raise CompilerFull("256 constraints wait")

    with pytest.raises(QueueFull, match=r"choices: 256 constraints wait"):
        PendingGrammar(request(), CHOICES, full).submit()
    accepted = PendingGrammar(request(prior=PriorProgress(accepted=True)), CHOICES, full)
    accepted.submit()
    assert accepted.compilation is None


def test_failed_compiler_ends_the_request_with_unavailable() -> None:
    scheduler, compiler = new_scheduler(), FakeCompiler(9, frozenset({2}), is_slow=True)
    grammars = Grammars(scheduler, lambda on_done: BuiltCompiler(compiler, {2}))
    pending = grammars.pending(request())
    assert pending
    sequence = scheduler.add(pending.request, (b"f", 1), 0.0).sequence
    grammars.watch(sequence, pending)
    while CHOICES not in compiler.compilations:
        assert grammars.poll() == []
    assert metrics.requests_compiling._value.get() == 1
    compiler.compilations[CHOICES].error = CompilerFailed("the process was killed")
    compiler.finish()
    grammars._notify()
    ((ended, error),) = grammars.poll()
    assert ended is sequence
    assert isinstance(error, Unavailable)
    assert (error.message, len(grammars)) == ("choices: the process was killed", 0)
    assert metrics.requests_compiling._value.get() == 0
    grammars.close()


def test_poll_advances_after_a_change_or_after_poll_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "POLL_SECONDS", 1e9)
    scheduler, advanced = new_scheduler(), list[int]()
    grammars = Grammars(scheduler)

    def matcher(pending: PendingGrammar) -> None:
        advanced.append(int(pending.request.request_id))

    monkeypatch.setattr(grammars, "_matcher", matcher)
    for number in range(2):
        added = Request(f"{number}", [1], 9, 0.0, constraint=CHOICES)
        pending = grammars.pending(added)
        assert pending
        grammars.watch(scheduler.add(added, (b"f", number), 0.0).sequence, pending)
        for _ in range(2):
            grammars.poll()
    assert advanced == [0, 0, 1]
    grammars._notify()
    for _ in range(2):
        grammars.poll()
    assert advanced == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("is_paused", [False, True])
def test_request_paused_while_its_grammar_compiles_is_not_in_quarantine(is_paused: bool) -> None:
    """Others run while its reader is slow."""
    scheduler, compiler = new_scheduler(), FakeCompiler(9, frozenset({2}))
    grammars = Grammars(scheduler, lambda on_done: BuiltCompiler(compiler, {2}))
    pending = grammars.pending(Request("r", [1], 9, 0.0, constraint=Constraint("regex", "3")))
    assert pending
    sequence = scheduler.add(pending.request, (b"f", 1), 0.0).sequence
    submit_and_build(grammars, pending)
    grammars.watch(sequence, pending, (1, 4))
    if is_paused:
        scheduler.pause(sequence.id)
    assert len(grammars.poll()) == 1
    assert bool(scheduler.quarantine) == (not is_paused)
    grammars.close()
