"""The process of a store whose values are files of a folder, as a program. Files of the folder cause faults.

    slow     seconds that each call takes
    full     no value is saved
    error    calls fail
    crash    the process ends at the next call
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from npuserve.service.store import store_process
from npuserve.service.store.mooncake import StoreError


class FolderStore:
    """Store of the values in a folder; see MooncakeStore for the methods."""

    def __init__(self, address: str, memory: int, value_bytes: int) -> None:
        self._folder = Path(address)

    def _call(self) -> None:
        slow = self._folder / "slow"
        if slow.exists():
            time.sleep(float(slow.read_text()))
        if (self._folder / "crash").exists():
            (self._folder / "crash").unlink()
            os.abort()
        if (self._folder / "error").exists():
            raise StoreError("an error")

    def _file(self, name: str) -> Path:
        return self._folder / name.replace("/", ".")

    def find(self, names: Sequence[str]) -> list[bool]:
        self._call()
        return [self._file(name).exists() for name in names]

    def get(self, name: str) -> bytes:
        self._call()
        return self._file(name).read_bytes() if self._file(name).exists() else b""

    def put(self, name: str, value: bytes) -> bool:
        if (self._folder / "full").exists():
            return False
        self._file(name).write_bytes(value)
        return True

    def discard(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)

    def remove(self, prefix: str) -> None:
        self._call()
        for file in self._folder.glob(prefix.replace("/", ".") + "*"):
            file.unlink()


if __name__ == "__main__":
    store_process.MooncakeStore = FolderStore  # type: ignore[assignment, misc]
    store_process.main()
