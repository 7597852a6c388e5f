"""Backend for Ascend NPUs (Atlas A2 and A3) through torch_npu.

Steps and copies use the streams of `streams`; the lengths of captured attention use a third stream (`graphs`).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from npuserve.kernels import ascend, ascend_delta, ascend_experts
from npuserve.kernels.ascend_delta import DeltaLaunches
from npuserve.kernels.int4 import WORD_CODES
from npuserve.kernels.qk_norm_rope_kv_write import with_fused_heads
from npuserve.kernels.sample import Filters
from npuserve.npu.backends.ascend import fault_codes, functions
from npuserve.npu.backends.ascend.captured_graph import LengthUpdates
from npuserve.npu.backends.ascend.delta_kernels import DeltaKernels
from npuserve.npu.backends.ascend.graphs import AscendGraphs, takes_lengths
from npuserve.npu.backends.ascend.layouts import AscendCache, AscendWeights
from npuserve.npu.backends.ascend.lengths import LengthThread
from npuserve.npu.backends.ascend.native_lengths import NativeLengths, UnsupportedCall
from npuserve.npu.backends.ascend.profiler import ascend_profiler
from npuserve.npu.backends.base import (
    DEFAULT_SETTINGS,
    BackendError,
    Captured,
    CaptureError,
    DeviceSettings,
    Event,
)
from npuserve.npu.backends.capabilities import Capabilities
from npuserve.npu.backends.device_profiler import DeviceProfiler
from npuserve.npu.backends.graphs import MAX_TOKENS, row_buckets
from npuserve.npu.backends.streams import StreamBackend
from npuserve.npu.cann import preflight, processors
from npuserve.npu.cann.codes import MATCHING, TOO_OLD
from npuserve.npu.cann.readings import Readings
from npuserve.npu.large_import import import_large
from npuserve.npu.notices import Notice

log = logging.getLogger(__name__)

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"

HCCL_BUFFER_MIB = 200
"""Default of HCCL_BUFFSIZE."""

FEATURE_NOT_SUPPORTED = 207000
"""Error of an old driver, of which torch_npu only warns: after its own updates a replay would wait forever."""

TOKEN_BUCKET = 64
"""Tokens between the buckets of captured steps with chunks."""


class FetchedAfterLengths:
    """D2H copy of results of replays. `wait` raises if their lengths could not be updated: such a replay never ends."""

    __slots__ = ("_fetched", "_given", "_lengths")

    def __init__(self, fetched: Event, lengths: LengthUpdates):
        self._fetched = fetched
        self._lengths = lengths
        self._given = lengths.given

    def wait(self) -> None:
        self._lengths.check(self._given)
        self._fetched.wait()

    def done(self) -> bool:
        return self._fetched.done()


class AscendBackend(StreamBackend):
    """Backend for an Ascend NPU."""

    name = "npu"
    errors = fault_codes.AscendErrors()
    capabilities = Capabilities(
        dtypes=("bfloat16", "float16"), vocabulary_tile=64, int8_levels=ascend.LEVELS, int4=True, int4_rows=WORD_CODES,
        experts=True, ragged_experts=False, widens_routers=True, stacks=True, counts_together=True,
        block_size=ascend.BLOCK, block_multiple=ascend.BLOCK, max_block_size=ascend.BLOCK, padding_blocks=1,
        cache_dtypes=(torch.int8,), scale_dtype=torch.float32, offloads=True, fixed_state=True,
        state_dtypes=("bfloat16", "float32"),
        host_lengths=True, sampler_filters=(Filters.NONE, Filters.SMALL_TOP_K, Filters.ANY), sampling_bytes=40,
        collectives="hccl", reduces=True)

    def __init__(self, settings: DeviceSettings = DEFAULT_SETTINGS) -> None:
        place = settings.place
        self.kernels = ascend.LABEL
        _matching_versions()
        preflight.set_variables()
        try:
            import_large("torch_npu")
            device = torch.device("npu", place[0])
            if (count := torch.npu.device_count()) == 0:
                raise BackendError(
                    f"device: no NPU is visible: check with npu-smi info that there is one, that {VISIBLE} names it, "
                    "and that this user may open /dev/davinci*")
            self.check_count(place, count, VISIBLE)
            torch.npu.set_device(device)
            torch.npu.config.allow_internal_format = True
            super().__init__(torch.npu, device, settings, replace(
                type(self).capabilities, padding_blocks=padding_blocks(settings.decode_buckets)))
        except (ImportError, RuntimeError) as error:
            raise BackendError(f"device: {fault_codes.advice(error)}") from error
        self.weights = AscendWeights(self.memory.empty)
        self.cache = AscendCache()
        if lacking := functions.missing():
            raise BackendError(f"device: CANN lacks {', '.join(lacking)}, which the kernels call: {MATCHING}")
        self._acl = functions.runtime()
        self._takes_lengths = False
        self._captured = False
        self._lengths = self._first_lengths()
        self._delta = DeltaKernels(device, self.delta_launches())
        self.own_kernels = dict(self._delta.own)
        if launch := self.fused_heads():
            self.own_kernels["qk_norm_rope_kv_write"] = with_fused_heads(launch)

    @classmethod
    def unavailable(cls) -> str:
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed: pip install 'npuserve[npu]', or choose another device"
        return cls.missing_cann()

    @classmethod
    def preflight(cls, *, captures: bool, ranks: int = 1) -> Sequence[Notice]:
        return preflight.notices(Readings(environ=os.environ), captures=captures, ranks=ranks)

    @classmethod
    def cann_version(cls) -> str:
        """Return the version of CANN's toolkit; "" if it cannot be read."""
        return Readings(environ=os.environ).cann

    @classmethod
    def missing_cann(cls) -> str:
        """Return what to do if CANN cannot be loaded; "" if it can."""
        try:
            functions.runtime()
        except OSError:
            return fault_codes.advice(ImportError(f"{functions.RUNTIME}: cannot open shared object file"))
        return ""

    def bind_threads(self) -> str:
        return processors.bind(Readings(environ=os.environ), self._lengths.native_id, index=self.settings.place[0])

    def fused_heads(self) -> ascend.FusedHeads | None:
        """Return the launch of the Triton kernel for norm, rotation and cache write.

        None without triton-ascend, which is optional, and where the kernel fails or differs from the operators.
        """
        if not _has_triton():
            return None
        try:
            from npuserve.kernels.triton import launch_ascend
            from npuserve.npu.backends.ascend.triton_check import agrees

            if agrees(launch_ascend.qk_norm_rope_kv_write, self.device):
                return launch_ascend.qk_norm_rope_kv_write
            reason: object = "its results differ from those of the operators"
        except Exception as error:  # of a compiler that has never met this machine
            reason = error
        log.warning("triton-ascend is installed, and its kernel is not used: %s", reason)
        return None

    def delta_launches(self) -> DeltaLaunches | None:
        """Return the launches of the Triton kernels of linear attention; None without triton-ascend."""
        if not _has_triton():
            return None
        try:
            from npuserve.kernels.triton import launch_ascend
        except Exception as error:  # of a compiler that has never met this machine
            log.warning("triton-ascend is installed, and its kernels are not used: %s", error)
            return None
        return DeltaLaunches(launch_ascend.causal_conv_silu, launch_ascend.delta_gates, launch_ascend.gated_delta_rule,
                             launch_ascend.gated_rms_norm)

    def supports_heads(self, head_dim: int) -> bool:
        """Return True for multiples of 32 (required by npu_mrope) up to `ascend.MAX_HEAD_DIM`."""
        return head_dim <= ascend.MAX_HEAD_DIM and head_dim % 32 == 0

    def check_experts(self, experts: int, top_k: int) -> None:
        for count, limit, what in ((experts, ascend_experts.MAX_EXPERTS, "experts on a rank"),
                                   (top_k, ascend_experts.MAX_CHOSEN, "experts of a token")):
            if count > limit:
                raise BackendError(f"device: the model has {count} {what}; {self.name} takes up to {limit}")
        if lacking := functions.missing(functions.NEEDED_BY_EXPERTS):
            raise BackendError(f"device: CANN lacks {', '.join(lacking)}, which mixtures of experts call: {MATCHING}")

    def lacks_operator(self, kernel: str, sizes: Sequence[int], dtype: torch.dtype) -> bool:
        """Call the operators of the gated delta rule once; both must take the model's dtypes and sizes."""
        if kernel != "gated_delta_rule" or self._delta.has_operators(sizes, dtype, self.state_dtype(dtype)):
            return False
        self._delta.log_fallback(sizes, dtype, self.state_dtype(dtype))
        return True

    def reads_host_lengths(self, kernel: str, sizes: Sequence[int], dtype: torch.dtype) -> bool:
        return self.lacks_operator(kernel, sizes, dtype) and not self._delta.has_rule(
            sizes, dtype, self.state_dtype(dtype))

    def operator_bytes(self, kernel: str, sizes: Sequence[int], rows: int, tokens: int, itemsize: int) -> int:
        if kernel != "gated_delta_rule":
            return 0
        key_heads, value_heads, key_dim, value_dim = sizes
        return ascend_delta.chunk_bytes(key_heads, value_heads, key_dim, value_dim, rows + 1, tokens, itemsize)

    def captures_chunks(self, cache_dtype: torch.dtype) -> bool:
        """Return False for an int8 cache.

        Fused attention reads it in blocks for rows of one query alone. The blocks of a chunk's context are dequantized
        first, and their number differs from step to step.
        """
        return self.settings.capture_chunks and cache_dtype != torch.int8

    def communicator_bytes(self, size: int) -> int:
        """Return twice HCCL_BUFFSIZE, which a communicator takes to send and to receive.

        https://www.hiascend.com/document/detail/en/canncommercial/850/commlib/hcclug/hcclug_000076.html
        """
        if size == 1:
            return 0
        setting = os.environ.get("HCCL_BUFFSIZE", "")
        mebibytes = int(setting) if setting.isdecimal() else HCCL_BUFFER_MIB
        return 2 * mebibytes << 20

    def check_heads(self, head_dim: int, rotary_dim: int | None = None) -> None:
        if not self.supports_heads(head_dim):
            raise BackendError(
                f"device: the model's attention heads have {head_dim} dimensions; {self.name} takes multiples of 32 up "
                f"to {ascend.MAX_HEAD_DIM}")
        if rotary_dim is not None and not self.supports_heads(rotary_dim):
            raise BackendError(
                f"device: rotary embeddings cover {rotary_dim} dimensions of the model's attention heads; {self.name} "
                "takes multiples of 32")

    def fetch(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Event:
        return FetchedAfterLengths(super().fetch(tensor, buffer), self._lengths)

    def reach(self, event: Any) -> None:
        """Wait for an event through CANN.

        torch_npu's own wait never returns if its queue dropped the record of the event. It drops all work after a
        failed launch, without an error once the failure was reported to anyone
        ([NPUEvent](https://github.com/Ascend/pytorch/blob/9e73e708ab9350d203475609f36f8a43f6a0c2ab/torch_npu/csrc/core/npu/NPUEvent.cpp#L195),
        [NPUQueue](https://github.com/Ascend/pytorch/blob/9e73e708ab9350d203475609f36f8a43f6a0c2ab/torch_npu/csrc/core/npu/NPUQueue.cpp#L583)).
        Here the wait may then return too early: the runner finds that the ids are missing (`LostStep`).
        """
        for stream in (self._stream, *self.side_streams):  # which may have queues of their own
            _ = stream.npu_stream  # empties torch_npu's queue, and raises the failure of a launch in it
        fault_codes.check(self._acl.aclrtSynchronizeEvent(ctypes.c_void_p(event.npu_event)), "aclrtSynchronizeEvent")

    def profiler(self, folder: Path) -> DeviceProfiler:
        self.synchronize()
        return ascend_profiler(folder)

    @property
    def lengths_updater(self) -> str:
        return "C++" if isinstance(self._lengths, NativeLengths) else "Python"

    def take_lengths_lags(self) -> Sequence[float]:
        return self._lengths.take_lags()

    def synchronize(self) -> None:
        self._lengths.check(self._lengths.given)
        super().synchronize()

    def _use(self, lengths: LengthUpdates) -> LengthUpdates:
        weakref.finalize(self, lengths.close)
        return lengths

    def _first_lengths(self) -> LengthUpdates:
        """Return the updater of the native library, or torch_npu's where that is not possible."""
        try:
            return self._use(NativeLengths(self._stream, self.cann_version()))
        except (UnsupportedCall, fault_codes.AclError, OSError) as error:
            return self._from_python(error)

    def _from_python(self, reason: object) -> LengthUpdates:
        log.warning("lengths of captured attention are updated from Python, which is slow: %s", reason)
        return self._use(LengthThread(self.device, self._stream))

    def _graphs(self, step: Callable[[int], torch.Tensor], buckets: Sequence[int], decode: bool) -> AscendGraphs:
        """Capture a step. The first one decides whether the native library can update its attention."""
        try:
            graphs = AscendGraphs(step, buckets, self._lengths, self._stream, self._pool, decode=decode)
        except UnsupportedCall as error:
            if self._captured:
                raise CaptureError(f"device: this step's attention cannot be captured: {error}") from error
            self._lengths = self._from_python(error)
            graphs = AscendGraphs(step, buckets, self._lengths, self._stream, self._pool, decode=decode)
        self._captured = True
        return graphs

    def _check_lengths(self) -> None:
        """Take the first updater whose lengths captured attention applies. Raises CaptureError if there is none."""
        if self._takes_lengths:
            return
        if isinstance(self._lengths, NativeLengths):
            reason: object = "a replay ignored them"
            try:
                self._takes_lengths = takes_lengths(self._lengths, self._stream, self._pool, self.device)
            except (UnsupportedCall, fault_codes.AclError) as error:
                if fault_codes.code_of(error) == FEATURE_NOT_SUPPORTED:
                    raise
                reason = error
            if self._takes_lengths:
                return
            self._lengths = self._from_python(reason)
        self._takes_lengths = takes_lengths(self._lengths, self._stream, self._pool, self.device)
        if not self._takes_lengths:
            raise CaptureError(f"device: {TOO_OLD}")

    def capture(
        self, step: Callable[[int], torch.Tensor], largest: int, *, decode: bool, buckets: Sequence[int] = ()
    ) -> Captured | None:
        if decode:
            chosen = row_buckets(buckets or self.settings.decode_buckets, largest)
        else:
            max_tokens = min(largest, MAX_TOKENS)
            chosen = [*range(TOKEN_BUCKET, max_tokens, TOKEN_BUCKET), max_tokens]
        try:
            self._check_lengths()
            graphs = self._graphs(step, chosen, decode)
            self.synchronize()
        except RuntimeError as error:
            if (reason := fault_codes.capture_advice(error)) is None:
                raise
            raise CaptureError(f"device: {reason}") from error
        graphs.log_capture(decode=decode)
        return graphs


BACKEND = AscendBackend


def padding_blocks(decode_buckets: Sequence[int]) -> int:
    """Return the blocks with a slot for each padding row of a step: npu_scatter_pa_kv_cache takes no slot twice.

    The default buckets, of rows and of tokens, leave less than one block of padding.
    """
    buckets = [0, *sorted(decode_buckets)]
    largest_padding = max((high - low - 1 for low, high in pairwise(buckets)), default=0)
    return max(1, -(-largest_padding // ascend.BLOCK))


def _has_triton() -> bool:
    """Return True if triton-ascend is installed."""
    return (importlib.util.find_spec("triton") is not None
            and importlib.util.find_spec("triton.backends.ascend") is not None)


def _matching_versions() -> None:
    """Raise BackendError unless torch_npu is made for this torch version: it calls torch's internals."""
    theirs, ours = (".".join(re.findall(r"\d+", version)[:3])
                    for version in (importlib.metadata.version("torch_npu"), torch.__version__))
    if theirs != ours:
        raise BackendError(
            f"device: torch_npu {theirs} is made for torch {theirs}, and torch is {ours}: install torch_npu=={ours}, "
            "or the torch of that version")
