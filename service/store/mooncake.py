"""Mooncake's store (PyPI: mooncake-transfer-engine-non-cuda): values in memory that its clients lend, over TCP.

Values are evicted, the least recently used first, when the memory is nearly full, and lost with the client that lent
their memory. A call may take seconds or never return if the master does not answer, so it needs a process of its own.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

from mooncake.store import MooncakeDistributedStore

BUFFER_BYTES = 64 << 20
"""Minimum size of the client's buffer for transfers."""
METADATA = "P2PHANDSHAKE"
"""Clients find each other's memory without a metadata server."""
NO_SPACE = -200
EXISTS = 1
MISSES = 0


class StoreError(Exception):
    """The store does not answer, or refuses."""


def _host_towards(address: str) -> str:
    """Return the address of this machine from which packets to HOST:PORT leave."""
    host, _, port = address.rpartition(":")
    family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


class MooncakeStore:
    """Client of a master.

    address: HOST:PORT of the master.
    memory: bytes that this client lends to the store.
    value_bytes: bytes of the largest value.

    Raises StoreError or OSError if the master cannot be reached.
    """

    def __init__(self, address: str, memory: int, value_bytes: int) -> None:
        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            _host_towards(address), METADATA, memory, max(BUFFER_BYTES, 4 * value_bytes), "tcp", "", address)
        if code:
            raise StoreError(f"Mooncake's client cannot be set up: code {code}")

    def find(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether it has a value. Raises StoreError."""
        codes = self._store.batch_is_exist(list(names))
        for code in codes:
            if code not in (EXISTS, MISSES):
                raise StoreError(f"Mooncake cannot look values up: code {code}")
        return [code == EXISTS for code in codes]

    def get(self, name: str) -> bytes:
        """Return a value; b"" if there is none, or it cannot be read."""
        return bytes(self._store.get(name))

    def put(self, name: str, value: bytes) -> bool:
        """Save a value. Return False if there is no space. Raises StoreError."""
        code: int = self._store.put(name, value)
        if code not in (0, NO_SPACE):
            raise StoreError(f"Mooncake cannot save a value: code {code}")
        return code == 0

    def discard(self, name: str) -> None:
        """Remove one value, if it can be."""
        self._store.remove(name, True)

    def remove(self, prefix: str) -> None:
        """Remove the values whose names begin with a prefix. Raises StoreError."""
        code = self._store.remove_by_regex(f"^{re.escape(prefix)}", True)
        if code < 0:
            raise StoreError(f"Mooncake cannot remove values: code {code}")
