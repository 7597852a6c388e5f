from __future__ import annotations

from npuserve.service import metrics
from npuserve.service.client_queue import ClientQueue, ClientShares, refusal


def test_client_may_have_half_of_the_items() -> None:
    shares = ClientShares(max_items=4)
    for _ in range(2):
        assert shares.exceeded("a") is None
        shares.add("a")
    assert shares.exceeded("a") == "client_limit"
    for client in ("b", "c"):
        assert shares.exceeded(client) is None
        shares.add(client)
    assert shares.exceeded("d") == "queue_full"
    shares.remove("a")
    assert shares.exceeded("a") is None


def test_client_may_have_half_of_the_bytes_or_one_item() -> None:
    shares = ClientShares(max_bytes=100)
    assert shares.exceeded("a", 1000) is None
    shares.add("a", 50)
    assert (shares.exceeded("a", 0), shares.exceeded("a", 1)) == (None, "client_limit")
    assert (shares.exceeded("b", 50), shares.exceeded("b", 51)) == (None, "queue_full")


def test_single_item_of_the_smallest_queue_is_allowed() -> None:
    shares = ClientShares(max_items=1)
    assert shares.exceeded("a") is None
    shares.add("a")
    assert shares.exceeded("b") == "queue_full"


def test_removed_items_leave_nothing() -> None:
    shares = ClientShares()
    for client in ("a", "a", "b"):
        shares.add(client, 3)
    for client in ("a", "b", "a"):
        assert shares
        shares.remove(client, 3)
    assert not shares
    assert (shares.total_items, shares.total_bytes) == (0, 0)


def take_all(queue: ClientQueue[str]) -> list[str]:
    order = []
    while queue:
        client, item = next(queue.firsts())
        queue.take(client, item)
        order.append(item)
    return order


def test_clients_take_turns_and_keep_them_when_an_item_is_removed() -> None:
    queue: ClientQueue[str] = ClientQueue()
    for client, items in {"a": ("a1", "a2", "a3"), "b": ("b1",), "c": ("c1", "c2")}.items():
        for item in items:
            queue.append(client, item)
    assert queue.remove("a", "a1")
    assert not queue.remove("a", "a1")
    assert not queue.remove("nobody", "a1")
    assert take_all(queue) == ["a2", "b1", "c1", "a3", "c2"]


def test_largest_is_the_newest_item_of_the_client_with_most_bytes_then_items() -> None:
    queue: ClientQueue[str] = ClientQueue()
    queue.append("a", "a1", 10)
    queue.append("b", "b1", 5)
    queue.append("b", "b2", 5)
    assert queue.largest() == ("b", "b2")
    queue.append("a", "a2", 1)
    assert queue.largest() == ("a", "a2")


def test_item_of_several_clients_counts_for_each() -> None:
    queue: ClientQueue[str] = ClientQueue(max_items=4)
    queue.append("a", "shared")
    queue.append("b", "shared")
    assert (queue.clients_of("shared"), len(queue), queue.has("a", "shared")) == (["a", "b"], 2, True)
    queue.clear()
    assert (queue.clients_of("shared"), len(queue), bool(queue.shares)) == ([], 0, False)


def test_refusal_is_counted() -> None:
    counter = metrics.preparation_rejections_total.labels("tokenize", "queue_full")._value
    before = counter.get()
    error = refusal("tokenize", "queue_full", "queue full: text")
    assert error.why == "queue_full"
    assert counter.get() == before + 1
