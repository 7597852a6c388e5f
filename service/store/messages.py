"""Messages between the engine's client of a store and its process, over a socket.

A message to the process is a length of 4 bytes, a call in msgpack, and after a `Save` the bytes of a value. Replies:

    Start       a length of 4 bytes, and the identity of the model; empty if its files cannot be read
    Connect     a status
    Lookup      a status, and if it is OK a byte for each key: 1 if the store has its value, else 0
    Load        for each value a status, and its bytes if it is OK; nothing follows another status
    Save, Clear a status
"""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("<I")

OK = b"\0"
MISSING = b"\1"
"""The store does not have the value, any more."""
CORRUPT = b"\2"
"""The value is not the one that was saved under its name."""
FULL = b"\3"
ERROR = b"\4"
"""The store cannot be reached, or refuses."""
LATE = b"\5"
"""The time of the call is over."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """First call.

    address: HOST:PORT of the store's master.
    secret_file: file of the secret that servers share.
    memory: bytes that this server lends to the store.
    value_bytes: bytes of a value.
    facts: what else determines the bytes of a value, as text.
    folders: folders of the models.
    identity: of the model if an earlier process has computed it; b"" otherwise.
    """

    address: str
    secret_file: str
    memory: int
    value_bytes: int
    facts: str
    folders: tuple[str, ...]
    identity: bytes = b""


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Connect to the store."""


class Lookup(msgspec.Struct, frozen=True, tag=True):
    """Ask which values the store has."""

    keys: list[bytes]


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load values.

    seconds: after this time no further value is read.
    is_whole: nothing is loaded unless the store has all of them.
    """

    keys: list[bytes]
    seconds: float
    is_whole: bool


class Save(msgspec.Struct, frozen=True, tag=True):
    """Save the value that follows."""

    key: bytes


class Clear(msgspec.Struct, frozen=True, tag=True):
    """Remove all values of the model."""


Call = Start | Connect | Lookup | Load | Save | Clear
