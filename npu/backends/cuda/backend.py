"""Backend for NVIDIA GPUs through torch.cuda, with kernels in Triton."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import is_backend_available  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from npuserve.kernels import triton
from npuserve.kernels.decoder_layers import register_cuda
from npuserve.kernels.kv_cache import QUANTIZED
from npuserve.npu.backends.base import DEFAULT_SETTINGS, BackendError, Captured, CaptureError, DeviceSettings
from npuserve.npu.backends.capabilities import Capabilities
from npuserve.npu.backends.cuda import fault_codes
from npuserve.npu.backends.cuda import graphs as cuda_graphs
from npuserve.npu.backends.cuda.graphs import CudaGraphs, token_buckets
from npuserve.npu.backends.device_profiler import DeviceProfiler
from npuserve.npu.backends.graphs import row_buckets
from npuserve.npu.backends.streams import StreamBackend, StreamMemory, taken_bytes
from npuserve.npu.backends.trace_profiler import TraceProfiler

MIN_CAPABILITY = (8, 0)
"""Compute capability of Ampere, the first with bfloat16."""

FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of Ada, the first with float8: conversions and tensor cores."""

VISIBLE = "CUDA_VISIBLE_DEVICES"

NCCL_CHANNELS = 32
NCCL_BUFFSIZE = 4 << 20
NCCL_BUFFERS = 3
"""Maximum number of NCCL's channels, default bytes of the largest buffer of a channel's connection, and their number
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-buffsize)."""


KERNEL_NAMES = {
    "^decoder_layers": "decoder_layers", "paged_attention_kernel": "paged_attention",
    "^rms_norm_kernel": "rms_norm,add_rms_norm",
    "kv_write_kernel": "qk_norm_rope_kv_write", "embedding_kernel": "embedding",
    "causal_conv_silu_kernel": "causal_conv_silu", "gated_rms_norm_kernel": "gated_rms_norm",
    "recurrent_kernel|chunk_products_kernel|chunk_states_kernel": "gated_delta_rule",
    "sigmoid_gate_kernel": "sigmoid_gate",
    "choose_experts_kernel|place_experts_kernel": "route_experts",
    "experts_product_kernel|sources_kernel": "experts_swiglu,experts_sum", "sum_experts_kernel": "experts_sum",
    "product_kernel|finish_kernel|argmax_merge_kernel|gemm|gemv|nvjet|cutlass|cublas|splitk":
        "linear,linear_swiglu,linear_argmax",
}
"""See DeviceProfiler.names: kernels in Triton by their functions, and GEMMs of libraries."""


def limited(capabilities: Capabilities, capability: tuple[int, int]) -> Capabilities:
    """Return the capabilities without float8, also of the KV cache, if GPUs of a compute capability have none."""
    if capability >= FLOAT8_CAPABILITY:
        return capabilities
    return replace(capabilities, float8=False, cache_dtypes=(torch.int8,))


def build_driver_module() -> None:
    """Make triton compile the C module by which it calls the driver, unless its cache has the module.

    Raises BackendError if that fails, since no kernel can be launched then.
    """
    from triton.runtime import driver

    try:
        driver.active  # noqa: B018  the first access compiles
    except Exception as error:  # triton raises the errors of its parts: RuntimeError, CalledProcessError and others
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise BackendError(
            f"device: triton cannot build its module for the driver ({first[:200]}): install a C compiler (gcc) and "
            "Python's headers (python3-dev), or set CC") from error


class CudaMemory(StreamMemory):
    """Memory of a GPU, whose peak torch reports."""

    def excess_bytes(self, work: Callable[[], None]) -> int:
        """Return the excess by the peak of torch's pools; what others allocate, such as libraries, is as at the end."""
        streams = self._streams
        streams.reset_peak_memory_stats(self._device)
        work()
        streams.synchronize()
        beside_pools = taken_bytes(streams, self._device) - streams.memory_reserved(self._device)
        peak = beside_pools + streams.max_memory_reserved(self._device)
        gc.collect()  # captured steps refer to each other
        streams.empty_cache()
        return int(peak - taken_bytes(streams, self._device))


class CudaBackend(StreamBackend):
    """Backend for a GPU. Its own choice of row counts of decode steps is `graphs.default_buckets`."""

    name = "cuda"
    errors = fault_codes.CudaErrors()
    capabilities = Capabilities(
        dtypes=("bfloat16", "float16"), explicit_dtypes=("float32",),  # whose GEMMs are many times slower
        vocabulary_tile=128, float8=True, int4=True, block_size=32, block_multiple=16, padding_blocks=1,
        cache_dtypes=tuple(QUANTIZED.values()), offloads=True, fixed_state=True,
        state_dtypes=("float32", "bfloat16"), compiles=True, experts=True, sampling_bytes=8, measures_memory=True,
        collectives="nccl")

    def __init__(self, settings: DeviceSettings = DEFAULT_SETTINGS) -> None:
        self.kernels = triton.LABEL
        self._record: cuda_graphs.Record = cuda_graphs.record
        try:
            streams, device, capability = self.open_device(settings.place)
            super().__init__(streams, device, settings, limited(type(self).capabilities, capability))
            self.memory = CudaMemory(streams, device)
            self.chip: str = self._streams.get_device_name(self.device)
            register_cuda(self.device)
        except RuntimeError as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise BackendError(
                f"device: the GPU cannot be started ({first[:200]}): check with nvidia-smi that it is healthy and not "
                "in use by others") from error
        if self.capabilities.compiles:
            build_driver_module()

    def open_device(self, place: tuple[int, int]) -> tuple[Any, torch.device, tuple[int, int]]:
        """Open the GPU of a rank; return its torch module, its device and its compute capability.

        Raises BackendError if there are too few, RuntimeError if it does not start.
        """
        self.check_count(place, torch.cuda.device_count(), VISIBLE)
        device = torch.device("cuda", place[0])
        torch.cuda.set_device(device)
        matmul = torch.backends.cuda.matmul  # accumulates partial sums in float32
        matmul.allow_bf16_reduced_precision_reduction = False
        matmul.allow_fp16_reduced_precision_reduction = False
        return torch.cuda, device, torch.cuda.get_device_capability(device)

    @classmethod
    def unavailable(cls) -> str:
        if torch.version.cuda is None:
            return (f"torch {torch.__version__} is built without CUDA: install the torch of a CUDA index, or choose "
                    "another device")
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed: pip install 'npuserve[cuda]', or choose another device"
        if not torch.cuda.is_available():
            return ("no NVIDIA GPU can be used: check with nvidia-smi that there is one, that CUDA_VISIBLE_DEVICES "
                    f"names it, and that its driver is new enough for CUDA {torch.version.cuda}")
        if (capability := torch.cuda.get_device_capability(0)) < MIN_CAPABILITY:
            has, needed = (".".join(map(str, numbers)) for numbers in (capability, MIN_CAPABILITY))
            return (f"{torch.cuda.get_device_name(0)} has compute capability {has}, and {needed} or later is needed "
                    "(Ampere, Ada, Hopper, Blackwell)")
        return ""

    def profiler(self, folder: Path) -> DeviceProfiler:
        self.synchronize()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        return TraceProfiler(profile(activities=activities), folder, "torch.profiler with CUPTI", KERNEL_NAMES)

    def check_ranks(self, size: int) -> None:
        super().check_ranks(size)
        if size > 1 and not is_backend_available(self.capabilities.collectives):
            raise BackendError(f"tensor_parallel_size: {size} is not possible, since this torch has no "
                               f"{self.capabilities.collectives}; possible is 1")

    def communicator_bytes(self, size: int) -> int:
        if size == 1:
            return 0
        setting = os.environ.get("NCCL_BUFFSIZE", "")
        buffer = int(setting) if setting.isdecimal() else NCCL_BUFFSIZE
        return NCCL_BUFFERS * NCCL_CHANNELS * buffer

    def copy_all(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy in a few launches: a slot of Qwen3.5-27B has 96 tensors."""
        torch._foreach_copy_(list(targets), list(sources))

    def check_heads(self, head_dim: int, rotary_dim: int | None = None) -> None:
        """Raise BackendError for head sizes that paged attention does not support."""
        if head_dim % 2 or not 8 <= head_dim <= 256:
            raise BackendError(
                f"device: the model's attention heads have {head_dim} dimensions; {self.name} takes even numbers from "
                "8 to 256")

    def capture(
        self, step: Callable[[int], torch.Tensor], largest: int, *, decode: bool, buckets: Sequence[int] = ()
    ) -> Captured | None:
        chosen = row_buckets(buckets or self.settings.decode_buckets, largest) if decode else token_buckets(largest)
        try:
            graphs = CudaGraphs(self._streams, step, chosen, self._record, self._stream, self._pool)
            self.synchronize()
        except torch.OutOfMemoryError as error:
            raise CaptureError(
                "device: no memory is left to capture steps: a smaller kv_cache_memory, max_num_batched_tokens or "
                "fewer decode_buckets take less") from error
        except RuntimeError as error:
            if not fault_codes.is_capture_error(error):
                raise
            first = str(error).splitlines()[0][:200]
            raise CaptureError(f"device: steps cannot be captured ({first}): serve with --capture off") from error
        graphs.log_capture(decode=decode)
        return graphs


BACKEND = CudaBackend
