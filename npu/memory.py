"""How much memory a model takes, before any of it is taken."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from npuserve.npu.backends.base import Backend
from npuserve.npu.kv_cache import block_bytes
from npuserve.npu.model_config import ModelConfig, ModelError

ITEMSIZE = {"float32": 4, "bfloat16": 2}

WARM_UP = 44 << 20
"""Bytes that torch and its libraries take at their first work, beyond what they take once imported."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by part, and what follows from them.

    weights: with the table of position embeddings. kv_cache: num_blocks blocks of block_size tokens.
    activations: of a step of max_num_batched_tokens tokens. logits: of max_num_seqs rows, and their sampling.
    base: the process itself: that which asks, if it has imported torch as an engine has. available: before any of it
    but the base is taken.
    dtype, max_model_len, block_size: as the engine will have them.
    """

    weights: int
    kv_cache: int
    activations: int
    logits: int
    base: int
    available: int
    dtype: str
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def peak(self) -> int:
        """Bytes that the engine process takes at most."""
        return self.weights + self.kv_cache + self.activations + self.logits + self.base

    @property
    def fits(self) -> bool:
        return self.peak - self.base <= self.available

    def require_fit(self) -> None:
        """Raises ModelError with the parts if it does not fit."""
        if not self.fits:
            parts = ("weights", "kv_cache", "activations", "logits")
            listed = ", ".join(f"{part} {mib(getattr(self, part))}" for part in parts)
            raise ModelError(
                f"the model needs {mib(self.peak - self.base)} of memory ({listed}), and {mib(self.available)} is "
                "available; a smaller kv_cache_memory, max_num_batched_tokens or dtype takes less"
            )


def predict(
    config: ModelConfig,
    backend: Backend,
    *,
    dtype: str = "auto",
    max_model_len: int = 0,
    block_size: int = 0,
    kv_cache_memory: int = 0,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
) -> MemoryPlan:
    """The plan by which `load_runner` loads, for settings as ServerConfig has them.

    block_size: 0 takes the backend's. kv_cache_memory: bytes; 0 takes enough for max_num_seqs requests of
    max_model_len tokens, or the backend's share of what is free if that is less. max_model_len: 0 takes the model's
    own context, or what the KV cache holds if that is less.

    Raises ModelError where max_model_len is beyond the model's context or the KV cache, BackendError for a dtype that
    the backend lacks. A plan that does not fit is returned: see `MemoryPlan.fits`.
    """
    dtype = backend.resolve_dtype(dtype, config.dtype)
    itemsize = ITEMSIZE[dtype]
    block_size = block_size or backend.block_size
    length = max_model_len or config.context_length
    if length > config.context_length:
        raise ModelError(f"max_model_len: {length} is beyond the model's context of {config.context_length} tokens")
    available = backend.memory_available()

    tables = 1 if config.tie_word_embeddings else 2
    padding = config.padded_vocabulary(backend.vocabulary_tile) - config.vocab_size
    weights = (config.num_parameters + tables * padding * config.hidden_size) * itemsize
    activations = _activations(config, max_num_batched_tokens, length, itemsize)
    logits = _logits(config.padded_vocabulary(backend.vocabulary_tile), max_num_seqs, itemsize)

    block = block_bytes(config, block_size, itemsize)
    least = -(-length // block_size) if max_model_len else 1
    if kv_cache_memory:
        num_blocks = kv_cache_memory // block
        if num_blocks < least:
            raise ModelError(
                f"kv_cache_memory: {mib(kv_cache_memory)} holds {num_blocks * block_size} tokens; "
                f"{f'max_model_len {length}' if max_model_len else 'one block'} needs {mib(least * block)}"
            )
    else:
        room = backend.kv_cache_share(max(available - weights - activations - logits, 0)) // block
        num_blocks = max(min(max_num_seqs * -(-length // block_size), room), least)
    length = min(length, num_blocks * block_size)
    return MemoryPlan(
        weights=weights + 4 * length * config.head_dim,
        kv_cache=num_blocks * block,
        activations=activations,
        logits=logits,
        base=_resident() + WARM_UP,
        available=available,
        dtype=dtype,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=length,
    )


def _activations(config: ModelConfig, tokens: int, context: int, itemsize: int) -> int:
    """The larger of what attention and the feed-forward layer hold at once, beside the residual and its norm."""
    stream = 2 * tokens * config.hidden_size * itemsize
    feed_forward = 4 * tokens * config.intermediate_size * itemsize
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = 3 * tokens * heads * config.head_dim * itemsize + 2 * context * config.q_size * itemsize
    return stream + max(feed_forward, attention)


def _logits(padded_vocabulary: int, rows: int, itemsize: int) -> int:
    """The LM head's, their float32 copy and the sampler's work on it. Penalties' counts come on top, by request."""
    return rows * padded_vocabulary * (itemsize + 4 + 4)


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
