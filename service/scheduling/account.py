"""Fairness account of one client."""

from __future__ import annotations


class Account:
    """Counters of one client. The FairQueue changes them; the scheduler adds planned tokens to `virtual_time`.

    client: its name; "" for requests without one.
    virtual_time: tokens computed for the client; see fair_queue.py.
    live: its requests that have not ended.
    waiting: its requests in the queue.
    """

    __slots__ = ("client", "live", "virtual_time", "waiting")

    def __init__(self, client: str, virtual_time: float = 0.0):
        self.client = client
        self.virtual_time = virtual_time
        self.live = 0
        self.waiting = 0
