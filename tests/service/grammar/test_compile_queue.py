"""Queue of constraints: clients take turns and have limits."""

from __future__ import annotations

import pytest

from npuserve.service.grammar.compile_queue import CompileQueue
from npuserve.service.grammar.errors import CompilerFull
from npuserve.service.ipc.messages import Constraint


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


def test_full_queue_is_refused() -> None:
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
