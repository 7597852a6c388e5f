"""Prompts on the host (`prefill_device`): what is not possible with them, and the host's memory.

`HostPrefill` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from npuserve.npu.backends.base import Backend, BackendError
from npuserve.npu.execution.activations import decoder_bytes, rotary_bytes
from npuserve.npu.execution.host_prefill import staging_bytes
from npuserve.npu.execution.state_store import block_bytes
from npuserve.npu.model.config import ModelConfig, MtpSetting
from npuserve.npu.model.storage import check_schemes, stored_bytes


def possible_mtp(setting: MtpSetting, draft: Path | str, host: Backend) -> MtpSetting:
    """Return "off", the setting of the MTP head beside prompts on the host.

    Raises BackendError if a model is to draft: the head with "on", or a smaller model in the folder `draft`.
    """
    possible = f"with prompts computed on {host.name} (prefill_device); possible are off, auto and suffix"
    if draft:
        raise BackendError(f"speculate: a model that drafts is not possible {possible}")
    if setting == "on":
        raise BackendError(f"speculate: mtp is not possible {possible}")
    return "off"


def check_prefill(
    config: ModelConfig, host: Backend | None, dtype: torch.dtype, cached: torch.dtype, kv_cache_dtype: str,
    kv_offload_memory: int,
) -> None:
    """Raise BackendError if the host cannot compute a model's prompts, or if a setting is not possible beside them.

    host: None if the device computes the prompts; nothing is checked then.
    dtype, cached: of the activations, and of the device's KV cache.
    kv_cache_dtype, kv_offload_memory: settings.
    """
    if host is None:
        return
    try:
        check_schemes(config, host)
    except BackendError as error:
        raise BackendError(
            f"prefill_device: {host.name} cannot compute this model's prompts ({error}); possible is "
            "prefill_device: same") from None
    if (name := str(dtype).removeprefix("torch.")) not in host.capabilities.dtypes:
        raise BackendError(
            f"prefill_device: {host.name} does not compute in {name}; a dtype that it has is one of "
            f"{', '.join(host.capabilities.dtypes)}")
    if config.has_fixed_state or len(config.paged_states) > 1:
        raise BackendError(
            "prefill_device: prompts of a model whose layers have different states cannot be computed on another "
            "device; possible is prefill_device: same")
    if cached != dtype:
        raise BackendError(
            f"kv_cache_dtype: {kv_cache_dtype!r} is not possible where prompts are computed on another device "
            "(prefill_device); only auto is possible")
    if kv_offload_memory:
        raise BackendError("kv_offload_memory: is not possible where prompts are computed on another device "
                           "(prefill_device), which has a mirror of the KV cache")


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Bytes on the host if it computes the prompts for a device.

    weights: without an LM head.
    kv_cache: mirror of the device's cache.
    activations: activations of a step of max_num_batched_tokens tokens.
    staging: buffers of copies to the device.
    available: before any allocation.
    """

    backend: str
    weights: int
    kv_cache: int
    activations: int
    staging: int
    available: int

    @property
    def needed(self) -> int:
        """Bytes that the host allocates."""
        return self.weights + self.kv_cache + self.activations + self.staging

    @property
    def fits(self) -> bool:
        """True if the host has the memory."""
        return self.needed <= self.available


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of a host that computes prompts, for any size of the KV cache.

    plan_without_cache: its plan for a KV cache of no blocks. The table of rotary embeddings covers the whole context.
    block_bytes: bytes of a block in the mirror.
    max_blocks: most blocks that the host's share of memory holds.
    """

    plan_without_cache: HostPlan
    block_bytes: int
    max_blocks: int

    @classmethod
    def of(
        cls, config: ModelConfig, host: Backend, device: Backend, tokens: int, context: int, block_size: int,
        dtype: torch.dtype,
    ) -> HostMemory:
        """Return the memory for chunks of `tokens` tokens."""
        (state,) = config.paged_states
        width = device.cache.shapes(1, device.capabilities.block_size, state.heads, state.head_dim, dtype)[0][-1]
        plan = HostPlan(
            backend=host.name,
            weights=stored_bytes(config.headless, dtype, host) + rotary_bytes(config, context),
            kv_cache=0,
            activations=decoder_bytes(config, host, tokens, context, dtype.itemsize),
            staging=staging_bytes(config, width, tokens, dtype.itemsize),
            available=host.memory.available(),
        )
        block = block_bytes(config, block_size, dtype, host)
        return cls(plan, block, host.memory.cache_share(max(plan.available - plan.needed, 0)) // block)

    def plan(self, num_blocks: int) -> HostPlan:
        """Return the plan for a KV cache of so many blocks."""
        return replace(self.plan_without_cache, kv_cache=num_blocks * self.block_bytes)


def decodes_bytes(config: ModelConfig, device: Backend, rows: int, tokens: int, context: int, itemsize: int) -> int:
    """Return the bytes of a step's activations on the device: of `rows` decode rows, and the hidden states of `tokens`
    tokens, copied from the host."""
    decodes = decoder_bytes(config, device, min(rows, tokens), context, itemsize)
    return decodes + tokens * config.hidden_size * itemsize
