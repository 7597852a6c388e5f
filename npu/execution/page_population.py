"""Mapping of the pages of a new state store, so that steps meet few page faults.

Fresh pages are zero, and the system clears a page when it is first used. To clear gigabytes takes seconds where memory
is short, so the start waits for the pages of the first blocks alone. A thread maps the others afterwards, in the order
in which blocks are given to requests. While steps run it maps few, since it would slow them down. A step that needs
pages before the thread has mapped them meets the page faults itself.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence

from torch import Tensor

from npuserve.npu.backends.memory import DeviceMemory

log = logging.getLogger(__name__)

START_BYTES = 64 << 20
"""Bytes that are mapped before the server is ready."""

PORTION_BYTES = 8 << 20
"""Bytes that the thread maps at a time, in about 2 ms."""

BUSY_PAUSE_SECONDS = 0.1
"""Time between two portions while steps run: 80 MiB a second, more than requests fill with tokens."""


class PagePopulation:
    """Pages of tensors [n, ...] that are used from index 0 on, all at the same rate.

    tensors: each with the memory that it is in. Tensors in memory that is not `fresh_is_zero` are left out.
    """

    def __init__(self, tensors: Sequence[tuple[DeviceMemory, Tensor]]):
        tensors = [(memory, tensor) for memory, tensor in tensors if memory.fresh_is_zero]
        self._tensors = [(memory, weakref.ref(tensor)) for memory, tensor in tensors]
        self._portions = -(-sum(tensor.nbytes for _, tensor in tensors) // PORTION_BYTES)
        self._next = 0
        self._steps_in_flight = 0

    def begin_step(self) -> None:
        """Map few pages until the step ends."""
        self._steps_in_flight += 1

    def end_step(self) -> None:
        """End a step that began."""
        self._steps_in_flight -= 1

    def map_first(self) -> None:
        """Map the first START_BYTES. Raises MemoryError."""
        while self._next < min(self._portions, START_BYTES // PORTION_BYTES):
            self._map_portion()

    def start(self) -> None:
        """Map the remaining pages in a thread. It ends early if a tensor is dropped."""
        if self._next < self._portions:
            threading.Thread(target=self._map_others, name="npuserve-pages", daemon=True).start()

    def _map_others(self) -> None:
        began = time.monotonic()
        try:
            while self._next < self._portions:
                if not self._map_portion():
                    return
                if self._steps_in_flight:
                    time.sleep(BUSY_PAUSE_SECONDS)
        except MemoryError as error:
            log.warning("the KV cache's pages are mapped at their first use: %s", error)
            return
        log.debug("the KV cache's pages are mapped, %.1f s after the start", time.monotonic() - began)

    def _map_portion(self) -> bool:
        """Map the next portion of each tensor. Return False if one is dropped."""
        portion = self._next
        self._next = self._next + 1
        for memory, reference in self._tensors:
            tensor = reference()
            if tensor is None:
                return False
            first, last = (len(tensor) * each // self._portions for each in (portion, portion + 1))
            if first < last:
                memory.populate(tensor[first:last])
        return True
