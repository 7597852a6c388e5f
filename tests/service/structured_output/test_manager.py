"""Structured output as the engine uses it: the wait for a grammar, its compiler, and the wait for masks."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from npuserve.npu import storyteller
from npuserve.service import metrics
from npuserve.service.errors import NoTokenizer, QueueFull, Unavailable
from npuserve.service.ipc.messages import Request
from npuserve.service.structured_output import manager as manager_module
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.errors import CompilerFailed, CompilerFull, UnsupportedVocabulary
from npuserve.service.structured_output.manager import (
    MASK_WAIT_SECONDS,
    RETRY_SECONDS,
    BuiltCompiler,
    PendingGrammar,
    StructuredOutputManager,
    build_compiler,
)
from npuserve.service.text.model_folder import open_folder
from tests.support.fake_grammar import FakeCompiler, allowed, next_mask

CHOICES = Constraint("choices", '["yes", "no"]')


def request(**fields: object) -> Request:
    return Request("r", [1], 9, 0.0, constraint=CHOICES, **fields)  # type: ignore[arg-type]


def submit_and_build(manager: StructuredOutputManager, pending: PendingGrammar) -> None:
    """Submit a constraint, and wait until the compiler is built or has failed."""
    pending.submit()
    assert manager._builder
    manager._builder.join()


def assert_compiled(manager: StructuredOutputManager, pending: PendingGrammar) -> None:
    """Submit a constraint while the compiler is not built, and again when it is."""
    submit_and_build(manager, pending)
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
    pending = StructuredOutputManager().pending(request())
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

    manager = StructuredOutputManager(build)
    pending = manager.pending(request())
    assert pending
    submit_and_build(manager, pending)
    with pytest.raises(Unavailable, match="choices: the compiler cannot start") as refused:
        pending.submit()
    assert 0 < refused.value.retry_seconds <= RETRY_SECONDS
    assert "the compiler of constraints cannot start" in caplog.text
    monkeypatch.setattr(manager, "_retry_at", 0.0)
    assert_compiled(manager, pending)
    manager.close()


def test_constraint_without_a_further_thread_is_refused_and_the_next_is_compiled(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    compiler = FakeCompiler(9, frozenset({2}))
    manager = StructuredOutputManager(lambda on_done: BuiltCompiler(compiler, {2}))
    pending = manager.pending(request())
    assert pending
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start)
        with pytest.raises(Unavailable, match="choices: the compiler cannot start"):
            pending.submit()
    assert_compiled(manager, pending)
    manager.close()


def test_full_compiler_refuses_new_requests_only() -> None:
    def full(constraint: Constraint, client: str) -> None:
        raise CompilerFull("256 constraints wait")

    with pytest.raises(QueueFull, match=r"choices: 256 constraints wait"):
        PendingGrammar(request(), CHOICES, False, full).submit()
    accepted = PendingGrammar(request(), CHOICES, True, full)
    accepted.submit()
    assert accepted.compilation is None


def test_failed_compiler_ends_the_request_with_unavailable() -> None:
    compiler = FakeCompiler(9, frozenset({2}), is_slow=True)
    manager = StructuredOutputManager(lambda on_done: BuiltCompiler(compiler, {2}))
    pending = manager.pending(request())
    assert pending
    manager.watch(3, pending)
    while CHOICES not in compiler.compilations:
        assert manager.poll() == []
    assert metrics.requests_compiling._value.get() == 1
    compiler.compilations[CHOICES].error = CompilerFailed("the process was killed")
    compiler.finish()
    manager._notify()
    ((ended, error),) = manager.poll()
    assert ended == 3
    assert isinstance(error, Unavailable)
    assert (error.message, len(manager)) == ("choices: the process was killed", 0)
    assert metrics.requests_compiling._value.get() == 0
    manager.close()


def test_poll_returns_no_request_that_was_cancelled() -> None:
    compiler = FakeCompiler(9, frozenset({2}))
    manager = StructuredOutputManager(lambda on_done: BuiltCompiler(compiler, {2}))
    for number, text in enumerate(("3", "4")):
        pending = manager.pending(Request("r", [1], 9, 0.0, constraint=Constraint("regex", text)))
        assert pending
        submit_and_build(manager, pending) if not number else pending.submit()
        manager.watch(number, pending)
    manager.cancel(0)
    manager.cancel(7)
    ((compiled, matcher),) = manager.poll()
    assert compiled == 1
    assert isinstance(matcher, AnswerMatcher)
    manager.close()


def test_poll_advances_after_a_change_or_after_poll_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "POLL_SECONDS", 1e9)
    manager, advanced = StructuredOutputManager(), list[str]()

    def matcher(pending: PendingGrammar) -> None:
        assert pending.constraint.text
        advanced.append(pending.constraint.text)

    monkeypatch.setattr(manager, "_matcher", matcher)
    for number in range(2):
        pending = manager.pending(Request("r", [1], 9, 0.0, constraint=Constraint("regex", f"{number}")))
        assert pending
        manager.watch(number, pending)
        for _ in range(2):
            manager.poll()
    assert advanced == ["0", "0", "1"]
    manager._notify()
    for _ in range(2):
        manager.poll()
    assert advanced == ["0", "0", "1", "0", "1"]


@pytest.mark.parametrize(("step_seconds", "waits"), [(0.0, 1), (0.015, 1), (0.04, 2), (0.06, 3), (1.0, 3)])
def test_prepare_waits_for_half_of_the_step_within_bounds(step_seconds: float, waits: int) -> None:
    manager, seconds = StructuredOutputManager(mask_seconds=MASK_WAIT_SECONDS), list[float]()
    manager._masks.prepare = lambda answers, limit: seconds.append(limit)  # type: ignore[method-assign]
    manager.prepare([], step_seconds)
    assert seconds == [waits * MASK_WAIT_SECONDS]
