"""Fake of rpc/connections.py's table of sockets, whose connections receive what a test says."""

from __future__ import annotations

from npuserve.service.rpc.connections import Traffic


class FakeSocket:
    """A connection of one peer; None: it is closed."""

    def __init__(self) -> None:
        self.received_bytes: int | None = 0

    def traffic(self) -> Traffic | None:
        return Traffic(self.received_bytes, 0.0) if self.received_bytes else None


class FakeSockets:
    """Table of the connections that have received something."""

    def __init__(self) -> None:
        self._by_peer: dict[str, FakeSocket] = {}

    def receive(self, peer: str, size: int) -> None:
        """Let a connection receive `size` further bytes."""
        accepted = self._by_peer.setdefault(peer, FakeSocket())
        accepted.received_bytes = (accepted.received_bytes or 0) + size

    def close(self, peer: str) -> None:
        self._by_peer[peer].received_bytes = None

    def find(self, peer: str) -> list[FakeSocket]:
        return [self._by_peer[peer]] if peer in self._by_peer else []
