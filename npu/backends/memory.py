"""Memory of a device: how much is free, the share that the KV cache takes, and its pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from npuserve.npu import control_group


class DeviceMemory(ABC):
    """Memory of a device."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a large, long-lived tensor."""

    @abstractmethod
    def available(self) -> int:
        """Return the bytes of device memory that this process can still allocate."""

    @abstractmethod
    def cache_share(self, free: int) -> int:
        """Return the default size of the KV cache in bytes if `free` bytes are free."""

    def wait(self) -> None:  # noqa: B027 - a device without memory of its own has nothing to wait for
        """Wait while memory of ended processes returns to the device, before its free memory is planned."""

    def excess_bytes(self, work: Callable[[], None]) -> int:
        """Run `work`, and return the bytes by which its peak of device memory exceeds the memory that it leaves taken.

        Only for devices that have `Capabilities.measures_memory`.
        """
        raise NotImplementedError

    @property
    def fresh_is_zero(self) -> bool:
        """True if `empty` returns zeros outside `sharing`, whose pages `populate` maps."""
        return False

    def populate(self, tensor: torch.Tensor) -> None:  # noqa: B027 - most devices have no pages to map
        """Map the pages of a tensor in the device's memory, whose contents do not change. Safe in any thread.

        Raises MemoryError.
        """

    def sharing(self, file: int, *, filled: bool) -> AbstractContextManager[bool]:
        """Allocate weights and large tensors within the context in an open memory file, which outlives this process.

        filled: the file holds the weights of another process that made the same allocations in the same order, and they
            are reused; False: the file is overwritten.
        Yields False, and changes nothing, if the backend does not support this.
        """
        return nullcontext(False)


def free_host_memory() -> int:
    """Return the bytes of the host's memory that this process can still allocate."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([available, *control_group.free_memory()])
