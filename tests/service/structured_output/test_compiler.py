"""Compilation in other processes: limits of time and memory, the cache, the queue."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from npuserve.service.structured_output import compile_process
from npuserve.service.structured_output.compile_process import CompileProcess
from npuserve.service.structured_output.compiler import Compilation, CompileQueue, GrammarCompiler
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.errors import CompilerFailed, CompilerFull, ConstraintError
from tests.support.grammars import Kind, accepts, allowed, encode, vocabulary

SECONDS = 60
GOOD = Constraint("choices", '["yes", "no"]')


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(vocabulary(), max_seconds=20)
    yield made
    made.close()


def test_compiled_constraint_makes_independent_matchers(compiler: GrammarCompiler):
    compilation = compiler.submit(GOOD)
    assert compilation.wait(SECONDS)
    assert compilation.done
    assert compilation.error is None
    assert accepts(compilation.matcher(), "yes")
    assert accepts(compilation.matcher(), "no")
    assert not accepts(compilation.matcher(), "maybe")


def test_equal_constraints_share_a_compilation(compiler: GrammarCompiler):
    first = compiler.submit(GOOD)
    assert compiler.submit(Constraint("choices", '["yes", "no"]')) is first
    assert first.wait(SECONDS)
    assert compiler.submit(GOOD) is first
    assert compiler.submit(Constraint("choices", '["yes"]')) is not first


def test_clients_share_a_lexer_until_it_is_worn(compiler: GrammarCompiler):
    compilation = compiler.submit(Constraint("regex", "[a-c]+"))
    assert compilation.wait(SECONDS)
    shared = compilation.lexer("a")
    assert compilation.lexer("b") is shared
    shared.wear()
    lexers = {client: compilation.lexer(client) for client in "ab"}
    assert len({shared, *lexers.values()}) == 3
    assert compilation.lexer("a") is lexers["a"]
    assert not lexers["a"].is_built
    assert accepts(lexers["a"].matcher(), "abc")
    lexers["a"].wear()
    assert compilation.lexer("a") is not lexers["a"]
    assert compilation.lexer("b") is lexers["b"]
    assert compiler.submit(Constraint("regex", "[a-c]+")) is compilation


def test_refused_constraint_has_an_error_and_the_next_is_compiled(compiler: GrammarCompiler):
    bad = compiler.submit(Constraint("json_schema", '{"properties": {"a": {"not": {}}}}'))
    assert bad.wait(SECONDS)
    assert str(bad.error) == "json_schema: keyword 'not' is not supported at /properties/a/not"
    with pytest.raises(ConstraintError, match="keyword 'not'"):
        bad.matcher()
    good = compiler.submit(GOOD)
    assert good.wait(SECONDS)
    assert good.error is None


def test_error_of_a_regex_shows_nothing_of_the_translation(compiler: GrammarCompiler):
    bad = compiler.submit(Constraint("regex", "(^|b)^a"))
    assert bad.wait(SECONDS)
    error = "regex: '^' is supported only at the beginning, outside of repeated groups, at position 5"
    assert str(bad.error) == error


@pytest.mark.slow
@pytest.mark.parametrize(("schemas", "is_exclusive"), [
    (({"type": "string", "format": "date"}, {"type": "string", "format": "email"}), False),
    (({"type": "string", "format": "date"}, {"const": "x"}), False),
    (({"properties": {"a": {"format": "date"}}, "required": ["a"]},
      {"properties": {"a": {"format": "ipv4"}}, "required": ["a"]}), False),
    (({"type": "integer", "format": "int32"}, {"type": "string", "format": "date"}), True),
])
def test_one_of_must_exclude_without_formats_too(
    compiler: GrammarCompiler, schemas: Sequence[Any], is_exclusive: bool
) -> None:
    """Validators that read a format as an annotation would count both schemas as satisfied."""
    schema = json.dumps({"oneOf": schemas})
    tag = json.dumps({"format": {"type": "json_schema", "json_schema": {"oneOf": schemas}}})
    for constraint in (Constraint("json_schema", schema), Constraint("structural_tag", tag)):
        found = compiler.submit(constraint)
        assert found.wait(SECONDS)
        assert (found.error is None) is is_exclusive
        assert is_exclusive or "'oneOf' is supported only if its schemas exclude each other" in str(found.error)


def test_cache_is_bounded_by_bytes():
    compiler = GrammarCompiler(vocabulary(), max_cache_bytes=4 << 20, max_seconds=20)
    for i in range(40):
        compilation = compiler.submit(Constraint("choices", json.dumps([f"answer {i}"])))
        assert compilation.wait(SECONDS)
        assert compiler._cached_bytes <= 1 << 20
    assert accepts(compilation.matcher(), "answer 39")
    compiler.close()


def answer_with(compilation: Compilation, letters: str, tokens: int) -> None:
    """Answer with random letters."""
    rng, matcher = random.Random(1), compilation.matcher()
    ids = [encode(letter)[0] for letter in letters]
    for _ in range(tokens):
        assert allowed(matcher)
        assert matcher.advance(rng.choice(ids))


LARGE = "((.|\\n)*[a-m][^x]{25}[n-z](.|\\n)*)"
"""Answers build many states of its lexer."""


def test_memory_of_lexers_counts_the_states_that_answers_build(compiler: GrammarCompiler):
    small, large = (compiler.submit(Constraint("regex", text)) for text in ("[abcnopq]*", LARGE))
    assert small.wait(SECONDS)
    assert large.wait(SECONDS)
    before = small.lexer().num_bytes, large.lexer().num_bytes
    for _ in range(4):
        answer_with(small, "abcnopq", 300)
    answer_with(large, "abcnopq", 300)
    assert small.lexer().num_bytes < before[0] + (1 << 17)
    assert large.lexer().num_bytes > before[1] + (1 << 20)
    assert compiler.lexers.num_bytes == small.lexer().num_bytes + large.lexer().num_bytes


def test_idle_lexers_are_freed_while_answers_build_states():
    compiler = GrammarCompiler(vocabulary(), max_cache_bytes=32 << 20, max_seconds=20)
    compilations = []
    for i in range(8):
        compilations.append(compiler.submit(Constraint("regex", f"{LARGE}{i}")))
        assert compilations[-1].wait(SECONDS)
        answer_with(compilations[-1], "abcnopq", 300)
        assert compiler.lexers.num_bytes <= 24 << 20
    built = [compilation.lexer().is_built for compilation in compilations]
    assert built[-1]
    assert not all(built)
    assert accepts(compilations[built.index(False)].matcher(), f"a{'a' * 25}n{built.index(False)}")
    compiler.close()


@pytest.mark.parametrize("error", [OSError("no file"), BaseException("a panic of a library in Rust")])
def test_error_of_the_machine_is_not_kept(
    compiler: GrammarCompiler, error: BaseException, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(CompileProcess, "compile", Mock(side_effect=error))
        failed = compiler.submit(GOOD)
        assert failed.wait(SECONDS)
        assert repr(failed.error) == f"CompilerFailed('cannot be compiled: {type(error).__name__}')"
    again = compiler.submit(GOOD)
    assert again is not failed
    assert again.wait(SECONDS)
    assert again.error is None


def test_submit_without_a_thread_is_refused_and_the_next_is_compiled(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
):
    start_any = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("grammar-"):
            raise RuntimeError("can't start new thread")
        start_any(thread)  # a timer

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start)
        with pytest.raises(CompilerFull, match="no thread"):
            compiler.submit(Constraint("regex", "a"))
    done = compiler.submit(Constraint("regex", "a"))
    assert done.wait(60)
    with monkeypatch.context() as limited:  # the first thread compiles it
        limited.setattr(threading.Thread, "start", start)
        later = compiler.submit(Constraint("regex", "b"))
    assert later.wait(60)
    assert (done.error, later.error) == (None, None)


def test_close_interrupts_a_compilation(monkeypatch: pytest.MonkeyPatch):
    compiler = GrammarCompiler(vocabulary(), max_seconds=20)
    assert compiler.submit(GOOD).wait(SECONDS)
    (process,) = compiler._processes
    assert process._process
    os.kill(process._process.pid, signal.SIGSTOP)
    stuck = compiler.submit(Constraint("regex", "a"))
    compiler.close()
    assert stuck.done
    assert isinstance(stuck.error, CompilerFailed)
    assert process._process is None  # no second process was started


def test_full_queue_is_refused(monkeypatch: pytest.MonkeyPatch):
    go, began = threading.Event(), threading.Semaphore(0)
    compile_one = CompileProcess.compile

    def waiting(self: CompileProcess, constraint: Constraint) -> Any:
        began.release()
        go.wait(SECONDS)
        return compile_one(self, constraint)

    monkeypatch.setattr(CompileProcess, "compile", waiting)
    compiler = GrammarCompiler(vocabulary(), max_queue=4, max_seconds=20)
    made = []
    for i in range(2):  # as many as one client may compile at a time
        made.append(compiler.submit(Constraint("choices", json.dumps([str(i)])), "flood"))
        assert began.acquire(timeout=SECONDS)
    made += [compiler.submit(Constraint("choices", json.dumps([str(i)])), "flood") for i in (2, 3)]
    with pytest.raises(CompilerFull, match="2 constraints of this client wait"):
        compiler.submit(GOOD, "flood")
    assert compiler.submit(Constraint("choices", '["3"]'), "flood") is made[3]
    made.append(compiler.submit(GOOD, "other"))  # begins at once
    assert began.acquire(timeout=SECONDS)
    go.set()
    assert all(compilation.wait(SECONDS) and compilation.error is None for compilation in made)
    compiler.close()


def test_constraints_of_one_moment_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch):
    both = threading.Barrier(2)
    compiler = GrammarCompiler(vocabulary(), max_seconds=20)
    assert compiler.submit(GOOD).wait(SECONDS)  # its thread is idle now
    compile_one = CompileProcess.compile

    def waiting(self: CompileProcess, constraint: Constraint) -> Any:
        both.wait(SECONDS)
        return compile_one(self, constraint)

    monkeypatch.setattr(CompileProcess, "compile", waiting)
    with compiler._condition:  # no thread takes the first one before the second one is there
        made = [compiler.submit(Constraint("choices", json.dumps([str(i)]))) for i in range(2)]
    assert all(compilation.wait(SECONDS) and compilation.error is None for compilation in made)
    compiler.close()


def test_close_refuses_what_waits(monkeypatch: pytest.MonkeyPatch):
    go = threading.Event()
    monkeypatch.setattr(CompileProcess, "compile", lambda self, constraint: go.wait(SECONDS))
    compiler = GrammarCompiler(vocabulary())
    made = [compiler.submit(Constraint("choices", json.dumps([str(i)]))) for i in range(4)]
    threading.Timer(0.2, go.set).start()
    compiler.close()
    assert all(compilation.done for compilation in made)
    with pytest.raises(RuntimeError, match="closed"):
        compiler.submit(GOOD)


def test_on_done_is_called_after_each_compilation():
    called = threading.Event()
    compiler = GrammarCompiler(vocabulary(), max_seconds=20, on_done=called.set)
    compilation = compiler.submit(GOOD)
    assert called.wait(SECONDS)
    assert compilation.done
    compiler.close()


@pytest.fixture
def process() -> Iterator[CompileProcess]:
    made = CompileProcess(vocabulary(), 20, 512 << 20)
    made.compile(GOOD)
    yield made
    made.end()


def kill_later(process: CompileProcess, number: signal.Signals) -> None:
    """Stop the process, and send it a signal that ends it 0.2 s later."""
    assert process._process
    pid = process._process.pid
    os.kill(pid, signal.SIGSTOP)

    def end() -> None:
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)

    threading.Timer(0.2, end).start()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT])
def test_process_that_a_limit_ends_refuses_the_constraint(process: CompileProcess, number: signal.Signals):
    kill_later(process, number)
    with pytest.raises(ConstraintError, match="regex: must take at most 20 seconds and 512 MiB"):
        process.compile(Constraint("regex", "a"))
    assert process.compile(GOOD).grammar


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGALRM])
def test_process_that_is_killed_is_replaced_and_compiles_the_constraint(
    process: CompileProcess, number: signal.Signals
):
    assert process._process
    killed = weakref.ref(process._process)
    kill_later(process, number)
    assert process.compile(Constraint("regex", "a")).grammar
    assert killed() is None


@pytest.mark.slow
def test_process_that_is_stopped_is_killed_and_replaced(process: CompileProcess, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compile_process, "MAX_WALL_RATIO", 0.1)
    stopped = process._process
    assert stopped
    os.kill(stopped.pid, signal.SIGSTOP)
    assert process.compile(Constraint("regex", "a")).grammar
    assert stopped.returncode == -signal.SIGKILL


def test_constraint_whose_processes_are_killed_is_compiled_again_for_the_next_request(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
):
    running = CompileProcess._running

    def killed(self: CompileProcess) -> Any:
        process = running(self)
        process.interrupt()
        return process

    with monkeypatch.context() as patch:
        patch.setattr(CompileProcess, "_running", killed)
        failed = compiler.submit(GOOD)
        assert failed.wait(SECONDS)
    assert repr(failed.error) == "CompilerFailed('the process that compiles constraints was killed by signal 9')"
    with pytest.raises(CompilerFailed):
        failed.matcher()
    again = compiler.submit(GOOD)
    assert again.wait(SECONDS)
    assert again.error is None


@pytest.mark.parametrize("command", [
    (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"), ("/nothing/python",)])
def test_process_that_does_not_start_is_no_fault_of_the_constraint(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
):
    process = CompileProcess(vocabulary(), 20, 512 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(compile_process, "COMMAND", command)
        with pytest.raises(CompilerFailed, match="did not start"):
            process.compile(GOOD)
    assert process.compile(GOOD).grammar
    process.end()


HOSTILE: dict[str, tuple[Kind, Any]] = {
    "deep JSON": ("json_schema", '{"properties":' * 5000 + "{}" + "}" * 5000),
    "deep schema": ("json_schema", '{"properties":{"a":' * 200 + "{}" + "}}" * 200),
    "huge enum": ("json_schema", {"enum": [f"value {i}" for i in range(50_000)]}),
    "products of alternatives": ("json_schema", {"allOf": [
        {"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(12)]} for i in range(8)]}),
    "doubling references": ("json_schema", {"$ref": "#/$defs/a0", "$defs": {
        **{f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)}, "a30": {"type": "string"}}}),
    "circular reference": ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "recursive regex": ("regex", "(" * 5000 + ")" * 5000),
    "counted repetitions": ("regex", "((a{1000}){1000}){1000}"),
    "catastrophic regex": ("regex", "(a|a)*" * 200 + "b"),
    "exponential automaton": ("regex", "(a|b)*a(a|b){3000}"),
    "large classes": ("regex", r"[\p{L}\p{N}]{1,2000}[^\p{L}]{1,2000}" * 20),
    "deep EBNF": ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "doubling EBNF": ("grammar", "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(60))
                      + '\na60 ::= "a"'),
    "ambiguous EBNF": ("grammar", 'root ::= root root root | "a" | ""'),
    "endless EBNF": ("grammar", 'root ::= "a" root'),
    "deep Lark": ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "deep tag": ("structural_tag", '{"format":' + '{"type":"star","content":' * 3000 + "1" + "}" * 3001),
}


def refusal(process: CompileProcess, constraint: Constraint) -> str | None:
    """Return the message of a refused constraint, None for a compiled one."""
    try:
        assert process.compile(constraint).grammar
    except ConstraintError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def attacked() -> Iterator[CompileProcess]:
    """Process that compiles one hostile constraint after the other. It is replaced if one ends it."""
    process = CompileProcess(vocabulary(), 5, 256 << 20)
    yield process
    process.end()


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraint_is_compiled_or_refused_within_limits(attacked: CompileProcess, name: str):
    kind, value = HOSTILE[name]
    text = value if isinstance(value, str) else json.dumps(value)
    message = refusal(attacked, Constraint(kind, text))
    assert message is None or (message.startswith(kind) and len(message) < 1000)
    assert attacked.compile(GOOD).grammar


# The queue: clients take turns and have limits


def rule(name: str) -> Constraint:
    return Constraint("regex", name)


def take_all(queue: CompileQueue) -> list[str]:
    """Compile all that waits, one after the other. Return the constraints in their order."""
    order = []
    while taken := queue.take():
        order.append(taken.constraint.text)
        queue.end(taken.client)
    return order


def test_clients_take_turns() -> None:
    queue = CompileQueue(100)
    for name in ("f1", "f2", "f3", "f4"):
        queue.add(rule(name), "flood")
    queue.add(rule("a"), "one")
    queue.add(rule("b"), "two")
    queue.add(rule("c"), "two")
    assert take_all(queue) == ["f1", "a", "b", "f2", "c", "f3", "f4"]
    assert len(queue) == 0


def test_client_has_a_limit_of_running_constraints() -> None:
    queue = CompileQueue(100)
    for name in ("f1", "f2", "f3"):
        queue.add(rule(name), "flood")
    first, second = queue.take(), queue.take()
    assert (first, second) == ((rule("f1"), "flood"), (rule("f2"), "flood"))
    assert queue.take() is None
    queue.add(rule("a"), "one")
    assert queue.take() == (rule("a"), "one")
    queue.add(rule("f4"), "flood")
    queue.end("flood")
    assert queue.take() == (rule("f3"), "flood")
    assert queue.take() is None
    for client in ("flood", "flood", "one"):
        queue.end(client)
    assert not queue._running


def test_constraint_of_two_clients_is_taken_once_at_the_earlier_turn() -> None:
    queue = CompileQueue(100)
    for name in ("f1", "f2", "shared"):
        queue.add(rule(name), "flood")
    queue.add(rule("shared"), "one")
    queue.add(rule("shared"), "one")
    assert rule("shared") in queue
    assert take_all(queue) == ["f1", "shared", "f2"]
    assert rule("shared") not in queue
    for client in ("one", "two"):
        queue.add(rule("shared"), client)
    assert take_all(queue) == ["shared"]


def test_queue_that_is_full_refuses_constraints() -> None:
    queue = CompileQueue(4)
    for name in ("f1", "f2"):
        queue.add(rule(name), "flood")
    with pytest.raises(CompilerFull, match="2 constraints of this client wait to be compiled"):
        queue.add(rule("f3"), "flood")
    queue.add(rule("f2"), "flood")
    for name in ("a", "b"):
        queue.add(rule(name), name)
    with pytest.raises(CompilerFull, match=r"^4 constraints wait"):
        queue.add(rule("c"), "c")
    queue.clear()
    assert queue.take() is None


def test_queue_of_one_takes_one_constraint() -> None:
    queue = CompileQueue(1)
    queue.add(rule("a"), "one")
    with pytest.raises(CompilerFull):
        queue.add(rule("b"), "two")
