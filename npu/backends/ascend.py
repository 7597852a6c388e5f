"""Ascend NPUs (Atlas A2 and A3) through torch_npu.

Steps go to one stream, in order. What they sampled is copied to the host on a second one, beside the next step; the
lengths of captured attention travel on a third (`ascend_graphs`). The host waits for nothing but such copies.

The emulator (npuserve.npu.emulator) puts libraries of its own in the place of CANN's: all else is as on the device.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic

import torch

from npuserve.kernels import ascend
from npuserve.kernels.quantized import Int8Weight
from npuserve.kernels.registry import Span
from npuserve.npu import emulator
from npuserve.npu.backends import acl_errors
from npuserve.npu.backends.ascend_graphs import Graphs, Lengths, default_buckets, takes_lengths
from npuserve.npu.backends.base import Backend, BackendError, Captured, Event, Fault, Pending, T

log = logging.getLogger(__name__)


class Done(Generic[T]):
    """Work whose kernels are in the stream's queue."""

    __slots__ = ("_result",)

    def __init__(self, result: T):
        self._result = result

    def wait(self) -> T:
        return self._result

    def done(self) -> bool:
        return True


class Fetched:
    """A copy on its way to the host. staged: what is being copied, kept until it is there. events: given back to `pool`
    then, the last of them being the end."""

    __slots__ = ("_events", "_given", "_lengths", "_pool", "_staged")

    def __init__(self, staged: torch.Tensor, events: list[Any], pool: list[Any], lengths: Lengths):
        self._staged: torch.Tensor | None = staged
        self._events, self._pool, self._lengths, self._given = events, pool, lengths, lengths.given

    def wait(self) -> None:
        self._lengths.check(self._given)
        if self._staged is not None:
            self._events[-1].synchronize()
            self._pool.extend(self._events)
            self._staged = None

    def done(self) -> bool:
        return self._staged is None or bool(self._events[-1].query())


class DeviceSpan:
    """A pair of events of `pool`, to which reading gives them back."""

    __slots__ = ("_events", "_pool", "_stream")

    def __init__(self, pool: list[tuple[Any, Any]], stream: Any):
        self._pool, self._stream = pool, stream
        self._events = pool.pop() if pool else tuple(torch.npu.Event(enable_timing=True) for _ in range(2))
        self._events[0].record(stream)

    def stop(self) -> None:
        self._events[1].record(self._stream)

    def read(self) -> float:
        begin, end = self._events
        seconds = float(begin.elapsed_time(end)) / 1000
        self._pool.append(self._events)
        return seconds


class AscendBackend(Backend):
    """decode_buckets: rows of the decode steps that are captured, () for `default_buckets`."""

    name = "npu"
    dtypes = ("bfloat16", "float16")
    vocabulary_tile = 64
    block_size = ascend.BLOCK
    block_multiple = ascend.BLOCK
    padding_blocks = 1
    sampling_bytes = 40
    int8_levels = ascend.LEVELS

    def __init__(self) -> None:
        self.kernels = ascend.LABEL
        self.deterministic = False
        self.decode_buckets = ()
        self.threads = 1
        _matching_versions()
        try:
            importlib.import_module("torch_npu")
            self.device = torch.device("npu:0")
            if torch.npu.device_count() == 0:
                raise BackendError(
                    "device: no NPU is visible: check with npu-smi info that there is one, that "
                    "ASCEND_RT_VISIBLE_DEVICES names it, and that this user may open /dev/davinci*")
            torch.npu.set_device(self.device)
            torch.npu.config.allow_internal_format = True
            self._stream, self._copies = torch.npu.Stream(), torch.npu.Stream()
            self._pool = torch.npu.graph_pool_handle()
        except (ImportError, RuntimeError) as error:
            raise BackendError(f"device: {acl_errors.advice(error)}") from error
        torch.npu.set_stream(self._stream)
        self._spans: list[tuple[Any, Any]] = []
        self._events: list[Any] = []
        self._takes_lengths = False
        self._lengths = Lengths(self.device)
        weakref.finalize(self, self._lengths.close)
        self.chip = "emulated" if emulator.active() else torch.npu.get_device_name(self.device)

    @classmethod
    def emulate(cls, relax: Sequence[str] = ()) -> None:
        try:
            emulator.activate(relax=tuple(relax))
        except (RuntimeError, OSError, ValueError) as error:
            raise BackendError(f"emulate: {error}") from error

    @classmethod
    def available(cls) -> bool:
        return not cls.unavailable()

    @classmethod
    def unavailable(cls) -> str:
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed: pip install npuserve[npu], or choose another device"
        if not emulator.active():
            try:
                ctypes.CDLL("libascendcl.so")
            except OSError:
                return acl_errors.advice(ImportError("libascendcl.so: cannot open shared object file"))
        return ""

    @classmethod
    def fault(cls, error: BaseException) -> Fault | None:
        return acl_errors.fault_of(error)

    def set_threads(self, count: int) -> None:
        self.threads = count or 1

    def memory_available(self) -> int:
        free: int = torch.npu.mem_get_info(self.device)[0]
        cached: int = torch.npu.memory_reserved(self.device) - torch.npu.memory_allocated(self.device)
        return free + cached

    def kv_cache_share(self, free: int) -> int:
        """Nine tenths: what is left is for the graphs, for the operators' workspaces and for what pools cut off."""
        return free * 9 // 10

    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        if asked == "auto":
            return checkpoint if checkpoint in self.dtypes else "bfloat16"
        possible = (*self.dtypes, *(["float32"] if "fp32" in emulator.relaxations() else []))
        if asked not in possible:
            raise BackendError(f"dtype: {asked!r} is not one of auto, {', '.join(possible)}")
        return asked

    def weight(self, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
        return self.empty((n, k), dtype)

    def arrange(self, weight: Int8Weight, *, table: bool) -> None:
        """[K, N]: in FRACTAL_NZ, or as it lies where rows are read as embeddings too. In place, so that it is never
        there twice."""
        assert isinstance(weight.values, torch.Tensor)
        weight.values.data = weight.values.t() if table else ascend.fractal_nz(weight.values)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(*shape, dtype=dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            wanted = torch.Size(shape).numel() * dtype.itemsize >> 20
            raise BackendError(
                f"device: no {wanted} MiB of device memory are left of {self.memory_available() >> 20} MiB that are "
                "free: a smaller kv_cache_memory, max_num_batched_tokens or decode_buckets takes less") from error

    def cache_dtype(self, asked: str, dtype: torch.dtype) -> torch.dtype:
        """Fused attention reads an int8 cache in blocks, with scales for each token and head, for rows of one query
        alone (documentation of aclnnFusedInferAttentionScoreV4, antiquant modes on A2): chunks of prompts could not."""
        if asked == "int8":
            raise BackendError(
                f"kv_cache_dtype: 'int8' is not possible on {self.name}, whose fused attention reads an int8 cache in "
                "blocks for rows of one token alone, and not for chunks of prompts; possible is auto")
        return super().cache_dtype(asked, dtype)

    def cache_shapes(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return super().cache_shapes(num_blocks, block_size, kv_heads, ascend.cached_head_dim(head_dim), dtype)

    def check_heads(self, head_dim: int) -> None:
        """Rotary embedding takes multiples of 32 (documentation of npu_mrope), attention up to 192."""
        possible = head_dim % 32 == 0 or "small_heads" in emulator.relaxations()
        if head_dim > 192 or not possible:
            raise BackendError(
                f"device: the model's attention heads have {head_dim} dimensions; {self.name} takes multiples of 32 up "
                "to 192")

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def enqueue(self, work: Callable[[], T]) -> Pending[T]:
        with torch.npu.stream(self._stream):
            return Done(work())

    def fetch(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Event:
        staged = tensor.clone(memory_format=torch.contiguous_format)
        made, end = events = [self._events.pop() if self._events else torch.npu.Event() for _ in range(2)]
        made.record(self._stream)
        self._copies.wait_event(made)
        with torch.npu.stream(self._copies):
            buffer.copy_(staged, non_blocking=True)
        end.record(self._copies)
        return Fetched(staged, events, self._events, self._lengths)

    def span(self) -> Span:
        return DeviceSpan(self._spans, self._stream)

    def synchronize(self) -> None:
        self._lengths.check(self._lengths.given)
        torch.npu.synchronize()

    def capture(self, step: Callable[[int], torch.Tensor], largest: int, *, decode: bool) -> Captured | None:
        if not decode:
            return None
        buckets = [rows for rows in self.decode_buckets or default_buckets(largest) if rows <= largest]
        try:
            if not self._takes_lengths:
                self._takes_lengths = takes_lengths(self._lengths, self._stream, self._pool, self.device)
                if not self._takes_lengths:
                    raise BackendError(f"device: {acl_errors.TOO_OLD}")
            made = Graphs(step, buckets or [largest], self._lengths, self._stream, self._pool)
            self.synchronize()
        except RuntimeError as error:
            if (reason := acl_errors.capture_advice(error)) is None:
                raise
            raise BackendError(f"device: {reason}") from error
        log.info("captured decode steps of %s rows in %.1f s, %.1f MiB of device memory",
                 ", ".join(map(str, made.buckets)), made.seconds, made.nbytes / 2**20)
        return made


BACKEND = AscendBackend


def _matching_versions() -> None:
    """Raises BackendError unless torch_npu is made for this torch, of which it calls what is not its interface."""
    theirs, ours = (".".join(re.findall(r"\d+", version)[:3])
                    for version in (importlib.metadata.version("torch_npu"), torch.__version__))
    if theirs != ours:
        raise BackendError(
            f"device: torch_npu {theirs} is made for torch {theirs}, and torch is {ours}: install torch_npu=={ours}, "
            "or the torch of that version")
