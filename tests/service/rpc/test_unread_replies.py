"""Bounds of the unread replies of a front end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from npuserve.service import metrics
from npuserve.service.errors import QueueFull
from npuserve.service.rpc.unread_replies import UnreadReplies


class Call:
    """Context of a call, which ends by `end`."""

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self.end = lambda: callback(self)


def replied(unread: UnreadReplies, owner: str, size: int) -> Call:
    unread.add(call := Call(), owner, "tokenize", size)  # type: ignore[arg-type]
    return call


def test_unread_replies_one_client_has_half() -> None:
    unread = UnreadReplies(100)
    first = replied(unread, "alice", 30)
    replied(unread, "alice", 20)
    counter = metrics.preparation_rejections_total.labels("tokenize", "client_limit")._value
    before = counter.get()
    with pytest.raises(QueueFull, match="client limit: 50 bytes") as refused:
        replied(unread, "alice", 1)
    assert (refused.value.why, counter.get() - before) == ("client_limit", 1)
    replied(unread, "bob", 50)
    first.end()
    with pytest.raises(QueueFull, match="client limit"):
        replied(unread, "alice", 31)
    replied(unread, "alice", 30)


def test_unread_replies_total_is_bounded_and_each_client_may_have_one() -> None:
    unread = UnreadReplies(100)
    large = replied(unread, "alice", 1000)
    replied(unread, "bob", 1)
    with pytest.raises(QueueFull, match="queue full: 1001 bytes"):
        replied(unread, "bob", 1)
    large.end()
    replied(unread, "bob", 1)
    replied(unread, "carol", 49)
    replied(unread, "dave", 49)
    with pytest.raises(QueueFull, match="queue full: 100 bytes"):
        replied(unread, "bob", 1)


def test_unread_replies_of_ended_calls_leave_nothing() -> None:
    unread = UnreadReplies(100)
    for call in [replied(unread, owner, 1) for owner in ("alice", "alice", "bob")]:
        call.end()
    assert not unread._shares
