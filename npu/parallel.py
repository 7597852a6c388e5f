"""Group of the processes that compute one model together (tensor parallelism), on torch.distributed.

Rank 0 has the scheduler. It broadcasts each step, and the other ranks launch the same step. All other communication is
between kernels (`kernels/collectives.py`). Steps are broadcast between hosts' memories by Gloo. Kernels communicate by
the library of their device, or, on CPUs of one machine, through memory that all ranks map.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from npuserve.kernels.collectives import Ranks, region_bytes

HEADER_BYTES = 8
FIRST_BYTES = 1 << 14
"""Bytes of the first part of a broadcast message. Most steps fit, so that they need one broadcast."""
WAIT = timedelta(days=365)
"""Timeout of the ranks' communication: an idle server sends nothing. A rank that dies is found by its connection, one
that hangs by the watchdog."""
CONNECT = timedelta(seconds=60)
"""Timeout of the ranks' connections to each other, which are made once all have joined. A rank that waits for a
connection does not notice the end of its peer."""

POLL_SECONDS = 0.05
"""Time between two looks at which ranks have joined."""


class Group:
    """Group of ranks, as one of them sees it.

    rank: number of this process, from 0.
    size: number of ranks.
    store: store of torch.distributed, by which the ranks find each other. `serve` and `join` make one.
    memory: descriptor of an empty file in memory that all ranks share; -1 for no such file.
    local: number of ranks of each host; 0 for all. Ranks of a host have consecutive numbers.
    """

    def __init__(self, rank: int, size: int, store: Store, memory: int = -1, local: int = 0):
        self.rank = rank
        self.size = size
        self.memory = memory
        self.local = local or size
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=CONNECT)
        self._steps = dist.group.WORLD  # of the main thread
        _set_pg_timeout(WAIT, self._steps)

    @property
    def place(self) -> tuple[int, int]:
        """Place of this rank on its host, see `DeviceSettings`."""
        return self.rank % self.local, self.local

    def broadcast(self, message: bytes = b"") -> bytes:
        """Send rank 0's message to all ranks, and return it. Raises RuntimeError if a rank is lost."""
        first = bytearray(FIRST_BYTES)
        if self.rank == 0:
            first[:HEADER_BYTES] = len(message).to_bytes(HEADER_BYTES, "little")
            first[HEADER_BYTES:HEADER_BYTES + len(message)] = message[: FIRST_BYTES - HEADER_BYTES]
        head = torch.frombuffer(first, dtype=torch.uint8)
        dist.broadcast(head, 0, group=self._steps)
        if self.rank == 0:
            rest = torch.frombuffer(bytearray(message[FIRST_BYTES - HEADER_BYTES:] or b"\0"), dtype=torch.uint8)
        length = int.from_bytes(first[:HEADER_BYTES], "little")
        left = length - (FIRST_BYTES - HEADER_BYTES)
        if left <= 0:
            return bytes(first[HEADER_BYTES:HEADER_BYTES + length])
        if self.rank:
            rest = torch.empty(left, dtype=torch.uint8)
        dist.broadcast(rest, 0, group=self._steps)
        return bytes(first[HEADER_BYTES:]) + rest.numpy().tobytes()

    def minimum(self, *numbers: int) -> list[int]:
        """Return the least of each number over the ranks, once all have called it."""
        minima = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(minima, dist.ReduceOp.MIN, group=self._steps)
        return minima.tolist()

    def ranks(
        self, library: str, device: torch.device, capacity: int, *, shared: bool, reduces: bool = False
    ) -> Ranks:
        """Return the group for kernels, with its buffers on the device allocated. All ranks call it together.

        library: backend of torch.distributed that communicates tensors of `device`.
        capacity: bytes of the largest tensor that a rank communicates.
        shared: the kernels can communicate through `memory`.
        reduces: see `Capabilities.reduces`.
        """
        # Used by the thread that runs the kernels. Only Gloo connects its ranks here.
        kernels = dist.new_group(backend=library, timeout=CONNECT if library == "gloo" else WAIT)
        if library == "gloo":
            _set_pg_timeout(WAIT, kernels)
        gather, exchange = (partial(move, kernels, self.size) for move in (_gather, _exchange))
        ranks = Ranks(self.rank, self.size, gather, exchange, partial(_reduce, kernels))
        if device.type != "cpu" or not shared:
            # The communicator is created at the first collective, and the ranks connect and allocate at the first of
            # a kind and size. A graph can capture none of that, so each kind that the kernels call is called here.
            for numbers in (16, -(-capacity // 4)):
                x = torch.zeros(-(-numbers // self.size) * self.size, dtype=torch.float32, device=device)
                ranks.gather(x)
                if reduces:
                    ranks.reduce(x)
                elif self.size > 2:
                    ranks.exchange(x)
            return ranks
        if self.memory < 0:
            return ranks
        capacity = -(-capacity // 64) * 64
        nbytes = region_bytes(self.size, capacity)
        if self.rank == 0:
            os.ftruncate(self.memory, nbytes)
        self.minimum(0)
        region = torch.frombuffer(mmap.mmap(self.memory, nbytes), dtype=torch.uint8)
        return replace(ranks, region=region, capacity=capacity)


_all_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The second is the name before torch 2.13."""


def _gather(group: dist.ProcessGroup, size: int, x: Tensor) -> Tensor:
    parts = torch.empty(size * x.numel(), dtype=x.dtype, device=x.device)
    _all_gather_into(parts, x.contiguous().view(-1), group=group)
    return parts.view(size, *x.shape)


def _exchange(group: dist.ProcessGroup, size: int, x: Tensor) -> Tensor:
    parts = torch.empty(size, x.numel() // size, dtype=x.dtype, device=x.device)
    dist.all_to_all_single(parts.view(-1), x.contiguous().view(-1), group=group)
    return parts


def _reduce(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


class MissingRanks(Exception):
    """Not all ranks have joined in time."""


class TakenRank(Exception):
    """The group is complete, with another process as this rank."""


def serve(address: str, size: int, seconds: float) -> tuple[Store, str]:
    """Start the store of rank 0. address: host:port, port 0 for a free one. Return it, and its address with the port.

    Raises RuntimeError if the port is in use, or if the store does not answer at the address within `seconds`.
    """
    host, port = _endpoint(address)
    store = TCPStore(host, port, size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    return store, f"{host}:{store.port}"


def join(address: str, size: int, seconds: float) -> Store:
    """Connect to the store of rank 0, for at most `seconds`. Raises MissingRanks."""
    host, port = _endpoint(address)
    try:
        return TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=seconds))
    except RuntimeError:
        raise MissingRanks(f"rank 0 did not answer at {address} within {seconds:g} s") from None


def wait_for_ranks(store: Store, rank: int, size: int, seconds: float) -> None:
    """Wait until all ranks have joined, for at most `seconds`.

    A process of a rank replaces an earlier one unless the group was complete with that one. Raises MissingRanks, which
    names the missing ones, and TakenRank.
    """
    if store.check([f"rank-{other}" for other in range(size)]):
        raise TakenRank(f"another process has joined the group as rank {rank}")
    store.set(f"rank-{rank}", "joined")
    end = time.monotonic() + seconds
    while missing := [other for other in range(size) if not store.check([f"rank-{other}"])]:
        if time.monotonic() > end:
            raise MissingRanks(f"ranks {', '.join(map(str, missing))} of {size} did not join within {seconds:g} s")
        time.sleep(POLL_SECONDS)


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if host in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return host, int(port)
