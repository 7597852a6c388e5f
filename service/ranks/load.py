"""Loading of the model by the settings of the server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.service import metrics
from npuserve.service.config import SPECULATE, ConfigError, ServerConfig
from npuserve.service.speculation.speculator import MAX_STEP_DRAFTS

if TYPE_CHECKING:
    from npuserve.kernels.registry import Observe
    from npuserve.npu.backends.base import CaptureMode
    from npuserve.npu.execution.load import SharedMemory
    from npuserve.npu.execution.runner import Runner
    from npuserve.npu.model.config import MtpSetting
    from npuserve.npu.parallel import Group


MTP_SETTINGS: Mapping[str, MtpSetting] = {"auto": "auto", "mtp": "on"}
"""Setting `speculate` -> whether the head for multi-token prediction is loaded, if other than "off"."""


def draft_folder(config: ServerConfig) -> str:
    """Return the folder of the smaller model that `speculate` names; "" if it names none. Raises ConfigError."""
    if config.speculate in SPECULATE:
        return ""
    folder = Path(config.speculate).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"speculate: {config.speculate!r} is neither one of {', '.join(SPECULATE)} nor the folder of "
                          "a smaller model or an EAGLE-3 head")
    return str(folder)


def max_drafts(config: ServerConfig) -> int:
    """Return the most drafts of a step."""
    return MAX_STEP_DRAFTS if config.speculate != "off" else 0


def publish_kernel(kernel: str, phase: str, backend: str, seconds: float) -> None:
    """Publish the latency of a timed kernel call on the metrics page."""
    metrics.tally(metrics.kernel_latency_seconds, kernel, phase, backend).observe(seconds)


def load_model(
    config: ServerConfig,
    folder: str,
    observe: Observe | None = None,
    memory: SharedMemory | None = None,
    kernels: Mapping[str, Any] | None = None,
    capture: CaptureMode | None = None,
    group: Group | None = None,
) -> Runner:
    """Load the model onto its device.

    observe: called with the latency of each timed kernel call; None for the metrics page.
    memory: see `load_runner`.
    kernels: CPU kernels that an earlier engine chose; None to choose them.
    capture: in place of the setting.
    group: ranks that share the model; None to load all of it.

    Raises ValueError, OSError or MemoryError if the model, the settings or this machine are at fault.
    """
    from npuserve.kernels.native.choice import CpuKernels, CpuKernelSettings
    from npuserve.npu.execution.load import load_runner

    return load_runner(
        Path(folder), backend=config.device, dtype=config.dtype, max_model_len=config.max_model_len,
        block_size=config.block_size, kv_cache_dtype=config.kv_cache_dtype, state_dtype=config.state_dtype,
        kv_cache_memory=config.kv_cache_memory, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens, kernel_sampling=config.kernel_sampling,
        observe=observe or publish_kernel, threads=config.threads,
        emulate=config.relaxations if config.emulate else None, decode_buckets=config.buckets,
        capture=capture or config.capture, capture_chunks=config.capture_chunks, cpu_binding=config.cpu_binding,
        prefill_device=config.prefill_device, lm_head_dtype=config.lm_head_dtype, task=config.task, memory=memory,
        cpu=CpuKernelSettings(config.cpu_gemm, config.cpu_weights, CpuKernels(**kernels) if kernels else None),
        group=group, expert_parallel=config.expert_parallel,
        max_drafts=max_drafts(config), mtp=MTP_SETTINGS.get(config.speculate, "off"), draft=draft_folder(config),
        draft_depth=config.draft_depth, kv_offload_memory=config.kv_offload_memory)
