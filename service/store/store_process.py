"""Process that has the native client of a store, and seals and opens its values.

    python -m npuserve.service.store.store_process DESCRIPTOR      started by `StoreClient`, serves one socket

The engine kills a process that is too slow, and starts another one. The process ends with the engine.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

import msgspec

from npuserve.service.processes import process_control
from npuserve.service.store import keys, messages
from npuserve.service.store.messages import Call, Clear, Connect, Load, Lookup, Save, Start
from npuserve.service.store.mooncake import MooncakeStore, StoreError

_DECODER = msgspec.msgpack.Decoder(Call)


class StoreServer:
    """Server of the calls of one engine, one after another."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._input = connection.makefile("rb")

    def run(self) -> None:
        """Serve until the engine closes the socket."""
        start = self._read()
        if not isinstance(start, Start):
            return
        try:
            secret = keys.read_secret(start.secret_file)
            identity = start.identity or keys.identify(secret, start.facts, start.folders)
        except (OSError, ValueError):
            self._connection.sendall(messages.LENGTH.pack(0))
            return
        self._connection.sendall(messages.LENGTH.pack(len(identity)) + identity)
        if not isinstance(self._read(), Connect):
            return
        try:
            store = MooncakeStore(start.address, start.memory, start.value_bytes + keys.OVERHEAD_BYTES)
        except (StoreError, OSError):
            self._connection.sendall(messages.ERROR)
            return
        self._connection.sendall(messages.OK)
        self._serve(store, keys.StoreKeys(secret, identity), start.value_bytes)

    def _serve(self, store: MooncakeStore, names: keys.StoreKeys, value_bytes: int) -> None:
        while (call := self._read()) is not None:
            try:
                match call:
                    case Lookup():
                        present = store.find([names.name(key) for key in call.keys])
                        self._connection.sendall(messages.OK + bytes(present))
                    case Load():
                        self._load(store, names, call, value_bytes)
                    case Save():
                        self._connection.sendall(self._save(store, names.name(call.key), names, value_bytes))
                    case Clear():
                        store.remove(names.prefix)
                        self._connection.sendall(messages.OK)
            except StoreError:
                self._connection.sendall(messages.ERROR)

    def _load(self, store: MooncakeStore, names: keys.StoreKeys, call: Load, value_bytes: int) -> None:
        """Send values until one is missing or wrong, or the time is over."""
        deadline = time.monotonic() + call.seconds
        all_names = [names.name(key) for key in call.keys]
        if call.is_whole and not all(store.find(all_names)):
            self._connection.sendall(messages.MISSING)
            return
        for name in all_names:
            if time.monotonic() > deadline:
                self._connection.sendall(messages.LATE)
                return
            sealed = store.get(name)
            if not sealed:
                self._connection.sendall(messages.MISSING)
                return
            value = names.open(name, sealed)
            if value is None or len(value) != value_bytes:
                store.discard(name)  # else the next save would leave it
                self._connection.sendall(messages.CORRUPT)
                return
            self._connection.sendall(messages.OK)
            self._connection.sendall(value)

    def _save(self, store: MooncakeStore, name: str, names: keys.StoreKeys, value_bytes: int) -> bytes:
        value = self._input.read(value_bytes)
        if len(value) < value_bytes:
            raise ConnectionResetError
        if all(store.find([name])) or store.put(name, names.seal(name, value)):
            return messages.OK
        return messages.FULL

    def _read(self) -> Call | None:
        """Return the next call; None at the end of the socket."""
        head = self._input.read(messages.LENGTH.size)
        if len(head) < messages.LENGTH.size:
            return None
        return _DECODER.decode(self._input.read(messages.LENGTH.unpack(head)[0]))


def main() -> None:
    process_control.set_dumpable(False)
    process_control.die_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the engine has ended
        StoreServer(connection).run()


if __name__ == "__main__":
    main()
