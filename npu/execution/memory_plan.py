"""Prediction of a model's memory, before any of it is allocated."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from npuserve.kernels.linear import linear
from npuserve.npu.backends.base import Backend, BackendError
from npuserve.npu.backends.memory import free_host_memory
from npuserve.npu.execution.activations import has_own_kernel, logits_bytes, rotary_bytes, step_bytes
from npuserve.npu.execution.host_blocks import chunk_sizes, num_state_parts
from npuserve.npu.execution.prefill_device import HostMemory, HostPlan, check_prefill, decodes_bytes
from npuserve.npu.execution.state_store import block_bytes, slot_bytes
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.layers.experts import Experts
from npuserve.npu.model.storage import check_schemes, stored_bytes

WARM_UP_BYTES = 28 << 20
GOLDEN_WARM_UP_BYTES = 44 << 20
"""Bytes that torch and its libraries allocate at their first work, in addition to those at import; the second value
applies if they also compute the GEMMs."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by part, and the settings derived from them.

    weights: weights, their copies in float32, and the table of rotary embeddings.
    kv_cache: num_blocks blocks of block_size tokens.
    activations: activations of a step of max_num_batched_tokens tokens, or of the decode rows with a `host` plan.
    logits: logits of max_num_seqs rows and the drafts of a step, and their sampling.
    base: memory of the process itself, after the import of torch.
    available: free memory before any allocation other than the base.

    dtype, kv_cache_dtype, max_model_len, block_size: settings of the engine.
    host: plan of the prompts, if the host computes them.
    fixed_state: num_slots slots of the layers' fixed state; 0 for a model without.
    kv_offload: evicted blocks and states in host memory.
    host_available: free memory of the host for them.
    """

    weights: int
    kv_cache: int
    activations: int
    logits: int
    base: int
    available: int
    dtype: str
    kv_cache_dtype: str
    num_blocks: int
    block_size: int
    max_model_len: int
    host: HostPlan | None = None
    fixed_state: int = 0
    num_slots: int = 0
    kv_offload: int = 0
    host_available: int = 0

    @property
    def peak(self) -> int:
        """Peak memory of the engine process in bytes."""
        return self.weights + self.kv_cache + self.fixed_state + self.activations + self.logits + self.base

    @property
    def fits(self) -> bool:
        """True if the device has the memory, and the host its part."""
        is_on_host = (self.host is None or self.host.fits) and self.kv_offload <= self.host_available
        return self.peak - self.base <= self.available and is_on_host

    def grown(self, more: int, block: int) -> MemoryPlan:
        """Return the plan with `more` bytes of weights.

        If it no longer fits, the KV cache gives up blocks of `block` bytes, as long as it holds max_model_len tokens.
        """
        plan = replace(self, weights=self.weights + more)
        lost = -(-max(plan.peak - plan.base - plan.available, 0) // block)
        if (self.num_blocks - lost) * self.block_size < self.max_model_len:
            return plan
        return replace(plan, num_blocks=self.num_blocks - lost, kv_cache=self.kv_cache - lost * block)

    def shrunk(self, num_blocks: int, max_model_len: int, block: int) -> MemoryPlan:
        """Return the plan with another number of blocks, of `block` bytes, and of positions."""
        return replace(self, num_blocks=num_blocks, max_model_len=max_model_len,
                       kv_cache=self.kv_cache - (self.num_blocks - num_blocks) * block)

    def require_fit(self) -> None:
        """Raise ModelError with the size of each part if the plan does not fit."""
        if self.fits:
            return
        if self.kv_offload > self.host_available:
            raise ModelError(f"kv_offload_memory: {mib(self.kv_offload)} is more than the host's free memory, "
                             f"{mib(self.host_available)}")
        plan: MemoryPlan | HostPlan = self
        what = "the model"
        needed = self.peak - self.base
        last = "logits"
        if needed <= self.available and self.host:
            plan = self.host
            needed = self.host.needed
            last = "staging"
            what = f"computing prompts on {plan.backend}"
        parts = ("weights", "kv_cache", *(("fixed_state",) if self.fixed_state else ()), "activations", last)
        listed = ", ".join(f"{part} {mib(getattr(plan, part))}" for part in parts if hasattr(plan, part))
        fitting = f"; {hint} fits" if plan is self and (hint := self._fitting_cache(needed - self.available)) else ""
        raise ModelError(
            f"{what} needs {mib(needed)} of memory ({listed}), and {mib(plan.available)} is available; a smaller "
            f"kv_cache_memory, max_num_batched_tokens or dtype takes less{fitting}")

    def _fitting_cache(self, excess: int) -> str:
        """Return the settings of a cache that is smaller by `excess` bytes; "" if it would hold no block."""
        num_blocks = self.num_blocks - -(-excess * self.num_blocks // self.kv_cache) if self.kv_cache else 0
        if num_blocks < 1:
            return ""
        memory = self.fixed_state + self.kv_cache * num_blocks // self.num_blocks
        return f"kv_cache_memory {mib(memory)} with max_model_len {num_blocks * self.block_size}"


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Memory of a device, measured by the largest step once the weights are loaded.

    available: free before the weights were loaded.
    step: peak of all that is neither weights nor cache: the step, its buffers, and captured steps.
    """

    available: int
    step: int


MEASURED_SHARE = 0.98
"""Share of the measured free memory that the cache takes. The rest is for what depends on requests, such as edits of
logits and log-probabilities of prompts, and for fragmentation of the pools."""


def predict(
    config: ModelConfig, backend: Backend, *, dtype: str = "auto", max_model_len: int = 0, block_size: int = 0,
    kv_cache_dtype: str = "auto", kv_cache_memory: int = 0, max_num_seqs: int = 64, max_num_batched_tokens: int = 512,
    prefill: Backend | None = None, reserved: int = 0, max_drafts: int = 0, measured: MeasuredMemory | None = None,
    kv_offload_memory: int = 0,
) -> MemoryPlan:
    """Return the plan that `load_runner` follows, for settings as in ServerConfig.

    block_size: 0 for the backend's default.
    kv_cache_memory: bytes. 0 for the lesser of max_num_seqs requests of max_model_len tokens, and the backend's share
        of the free memory.
    max_model_len: 0 for the lesser of the model's context and the tokens that the KV cache holds.
    prefill: backend that computes the prompts; None for `backend`.
    reserved: bytes of the device's free memory that others will take.
    max_drafts, kv_offload_memory: see `Runner`.
    measured: in place of predictions; None if nothing was measured.

    Raises ModelError for a max_model_len beyond the model's context or the KV cache, and for a block_size that is not
    supported. Raises BackendError for a dtype (also of the KV cache) that `backend` or `prefill` does not support, and
    for a quantization that the kernels do not support. A plan that does not fit is returned: see `MemoryPlan.fits`.
    """
    resolved, cached = _dtypes(config, backend, dtype, kv_cache_dtype)
    check_prefill(config, prefill, resolved, cached, kv_cache_dtype, kv_offload_memory)
    block_size = resolve_block_size(block_size, backend, prefill)
    length = _checked_length(config, max_model_len)
    available = measured.available if measured else backend.memory.available() - reserved
    weights = stored_bytes(config, resolved, backend) + _wide_router_bytes(config, resolved, backend)
    host = (HostMemory.of(config, prefill, backend, max_num_batched_tokens, length, block_size, resolved)
            if prefill else None)
    activations = (decodes_bytes if prefill else step_bytes)(
        config, backend, max_num_seqs, max_num_batched_tokens, length, resolved.itemsize)
    activations += _dequantized_bytes(config, backend, length, block_size) if cached != resolved else 0
    logits = logits_bytes(config, backend, max_num_seqs + max_drafts, resolved.itemsize)
    if measured:
        activations, logits = measured.step, 0
    block = block_bytes(config, block_size, cached, backend)
    free = max(available - weights - activations - logits, 0)
    free = _measured_share(free, config, backend, length, block) if measured else backend.memory.cache_share(free)
    per_request = -(-length // block_size)
    block_bytes_wanted = kv_cache_memory or min(free, max_num_seqs * per_request * block)
    spared = _spared_bytes(block_bytes_wanted, -(-max_model_len // block_size) * block)
    num_slots, fixed_state = _slots(config, backend, resolved, max_num_seqs, kv_cache_memory, free, spared)
    free_blocks = max(free - fixed_state, 0) // block
    free_blocks = min(free_blocks, host.max_blocks) if host else free_blocks
    if kv_cache_memory:
        num_blocks = _given_blocks(
            kv_cache_memory, fixed_state, slot_bytes(config, resolved, backend), block, block_size, max_model_len,
            max_num_seqs)
    else:
        num_blocks = max(min(max_num_seqs * per_request, free_blocks), per_request if max_model_len else 1)
    length = min(length, num_blocks * block_size)
    return MemoryPlan(
        weights=weights + rotary_bytes(config, length),
        kv_cache=(num_blocks + backend.capabilities.padding_blocks) * block,
        activations=activations, logits=logits, available=available, host_available=free_host_memory(),
        base=_resident() + (WARM_UP_BYTES if has_own_kernel(backend, linear) else GOLDEN_WARM_UP_BYTES),
        dtype=str(resolved).removeprefix("torch."), kv_cache_dtype=str(cached).removeprefix("torch."),
        num_blocks=num_blocks, block_size=block_size, max_model_len=length,
        host=host.plan(num_blocks) if host else None, fixed_state=fixed_state, num_slots=num_slots,
        kv_offload=_offload_bytes(config, backend, kv_offload_memory, block, resolved))


def _offload_bytes(
    config: ModelConfig, backend: Backend, kv_offload_memory: int, block: int, dtype: torch.dtype
) -> int:
    """Return the bytes of host memory for evicted blocks and fixed states, at most kv_offload_memory.

    block: bytes of a block.
    dtype: of the activations.

    Raises BackendError if these cannot go to host memory, ModelError if it holds no block with a state.
    """
    if not kv_offload_memory:
        return 0
    if not backend.capabilities.offloads:
        raise BackendError(f"kv_offload_memory: the KV cache of {backend.name} is in host memory already; a larger "
                           "kv_cache_memory keeps more prefixes")
    if config.shard.size > 1:
        raise BackendError("kv_offload_memory: is not possible with a tensor_parallel_size above 1")
    sizes = chunk_sizes(kv_offload_memory, block)
    if not sizes:
        raise ModelError(f"kv_offload_memory: {mib(kv_offload_memory)} holds no block of {mib(block)}")
    state = slot_bytes(config, dtype, backend)
    if sum(size // block for size in sizes) <= num_state_parts(state, block):
        raise ModelError(f"kv_offload_memory: {mib(kv_offload_memory)} holds no block of {mib(block)} with its state "
                         f"of {mib(state)}")
    return sum(sizes)


def _measured_share(free: int, config: ModelConfig, backend: Backend, length: int, block: int) -> int:
    """Return the size of the cache without its padding if `free` bytes were measured to be free."""
    free -= rotary_bytes(config, length) + backend.capabilities.padding_blocks * block
    return int(max(free, 0) * MEASURED_SHARE)


def _wide_router_bytes(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> int:
    """Return the bytes of the routers' weights in float32 beside those of `dtype` (`Capabilities.widens_routers`). That
    of the MTP head is among them."""
    if not backend.capabilities.widens_routers or dtype == torch.float32:
        return 0
    layers = [*config.local_layers, *(config.predictor.local_layers if config.predictor else ())]
    routers = (layer.count * layer.hidden for layer in layers if isinstance(layer, Experts))
    return sum(routers) * torch.float32.itemsize


def _dequantized_bytes(config: ModelConfig, backend: Backend, length: int, block_size: int) -> int:
    """Return the bytes of the largest copy of a row's keys and values in floats."""
    states = [*config.paged_states, *(config.draft.paged_states if config.draft else ())]
    return max(backend.cache.dequantized_bytes(length, block_size, state.heads, state.head_dim) for state in states)


STATE_SHARE, MAX_STATE_SHARE = 0.15, 0.5
"""Shares of the cache's memory that slots of fixed state take: if two for each request take less, and at most.
`bench/engine/prefix_cache.py` measures what the checkpoints of a share find."""


def _spared_bytes(wanted: int, min_block_bytes: int) -> int:
    """Return what the blocks of a cache of `wanted` bytes, min_block_bytes at least, leave to fixed states."""
    return wanted - max(min_block_bytes, int(wanted * (1 - STATE_SHARE)))


def _slots(
    config: ModelConfig, backend: Backend, dtype: torch.dtype, max_num_seqs: int, kv_cache_memory: int, free: int,
    checkpoints: int,
) -> tuple[int, int]:
    """Return the number of slots of fixed state and their bytes; 0 for a model without.

    There are two for each request: its state, and a checkpoint or the state before a constrained row. There are more if
    the bytes for checkpoints hold more. If half of the memory does not hold two for each, there are fewer, and fewer
    requests run at a time. One request has its two even if they do not fit in `free`, which is the memory where
    kv_cache_memory is 0.

    checkpoints: bytes that slots may take beyond two for each request.

    Raises ModelError if kv_cache_memory holds less than the two slots of one request.
    """
    if not config.has_fixed_state:
        return 0, 0
    slot = slot_bytes(config, dtype, backend)
    padding = 1 if backend.capabilities.padding_blocks else 0
    wanted = max(2 * max_num_seqs, checkpoints // slot)
    num_slots = min(wanted, int((kv_cache_memory or free) * MAX_STATE_SHARE) // slot - padding)
    if num_slots < 2 and kv_cache_memory:
        raise ModelError(f"kv_cache_memory: {mib(kv_cache_memory)} holds the state of no request; the least is "
                         f"{mib(int((2 + padding) * slot / MAX_STATE_SHARE))}")
    num_slots = max(num_slots, 2)
    return num_slots, (num_slots + padding) * slot


def _dtypes(
    config: ModelConfig, backend: Backend, dtype: str, kv_cache_dtype: str
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of activations and KV cache. Raises as `predict` does for what `backend` does not support."""
    dtype = backend.resolve_dtype(dtype, config.dtype)
    if config.has_fixed_state and not backend.capabilities.fixed_state:
        raise BackendError(f"device: {backend.name} does not serve models with linear attention ({config.family}); "
                           "possible is device: cpu")
    if config.has_experts and not backend.capabilities.experts:
        raise BackendError(f"device: {backend.name} does not serve mixtures of experts ({config.family}); possible is "
                           "device: cpu")
    for each in (config, config.draft) if config.draft else (config,):
        for experts in {layer for layer in each.local_layers if isinstance(layer, Experts)}:
            backend.check_experts(experts.held_count, experts.top_k)
        for state in each.paged_states:
            backend.check_heads(state.head_dim, each.rotary_dim)
    check_schemes(config, backend)
    resolved: torch.dtype = getattr(torch, dtype)
    return resolved, backend.cache_dtype(kv_cache_dtype, resolved)


def resolve_block_size(block_size: int, backend: Backend, prefill: Backend | None = None) -> int:
    """Return the tokens of a KV-cache block; the backend's default for 0. Raise ModelError for an impossible size."""
    block_size = block_size or backend.capabilities.block_size
    multiple = math.lcm(backend.capabilities.block_multiple, prefill.capabilities.block_multiple if prefill else 1)
    if block_size % multiple or block_size > backend.capabilities.max_block_size:
        largest = backend.capabilities.max_block_size
        possible = f"is {largest}" if multiple == largest else f"are powers of two from {multiple} to {largest}"
        raise ModelError(f"block_size: {block_size} is not possible here; possible {possible}")
    return block_size


def _checked_length(config: ModelConfig, max_model_len: int) -> int:
    """Return the positions of a request, by default the model's context. Raises ModelError beyond it."""
    length = max_model_len or config.context_length
    if length > config.context_length:
        raise ModelError(f"max_model_len: {length} is beyond the model's context of {config.context_length} tokens; "
                         "0 takes all of them")
    return length


def _given_blocks(
    kv_cache_memory: int, fixed_state: int, slot: int, block: int, block_size: int, max_model_len: int,
    max_num_seqs: int,
) -> int:
    """Return the blocks of `block` bytes in kv_cache_memory beside the fixed state.

    slot: bytes of a slot of fixed state; 0 for a model without.

    Raises ModelError if they hold no max_model_len tokens.
    """
    num_blocks = (kv_cache_memory - fixed_state) // block
    min_blocks = -(-max_model_len // block_size) or 1
    if num_blocks >= min_blocks:
        return num_blocks
    context = f"max_model_len {max_model_len}" if max_model_len else "one block"
    beside = f" beside {mib(fixed_state)} of states" if fixed_state else ""
    needed, single = (_cache_memory(min_blocks * block, slot, requests) for requests in (max_num_seqs, 1))
    fewer = f", or {mib(single)} with max_num_seqs 1" if single < needed else ""
    raise ModelError(
        f"kv_cache_memory: {mib(kv_cache_memory)} holds {num_blocks * block_size} tokens{beside}; {context} needs "
        f"{mib(needed)}{fewer}")


def _cache_memory(blocks: int, slot: int, requests: int) -> int:
    """Return a kv_cache_memory of which `blocks` bytes are left beside the slots of as many requests.

    The padding slot of some devices is counted for all.
    """
    return min(blocks + (2 * requests + 1) * slot, int(blocks / (1 - MAX_STATE_SHARE))) if slot else blocks


def _resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
