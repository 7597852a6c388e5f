"""What the Ascend implementations of linear attention share: operators, and tensors that all layers of a step read.

Everything is computed on the device from a step's lengths there, so that a captured step serves other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from npuserve.kernels.attention import AttentionMetadata

FORGET = -1e4
"""Exponent of a decay of 0: it clears the state before a row's first token."""


@dataclass(frozen=True, slots=True)
class DeltaOperators:
    """Operators of the gated delta rule that work on this device.

    dtype: of activations and states.
    recurrent: npu_recurrent_gated_delta_rule, for rows of one token.
    chunk: npu_chunk_gated_delta_rule, for rows of any tokens.

    Sizes are (heads of keys, heads of values, their dimensions); docs/ascend-audit.md has the sources of their bounds.
    """

    dtype: torch.dtype = torch.bfloat16
    recurrent: bool = True
    chunk: bool = True

    def can_recur(self, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> bool:
        """Return True if the recurrent operator takes these sizes."""
        return self.recurrent and max(key_heads, value_heads) <= 256 and max(key_dim, value_dim) <= 512

    def can_chunk(self, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> bool:
        """Return True if the chunk operator takes these sizes."""
        return self.chunk and max(key_heads, value_heads) <= 64 and key_dim == value_dim == 128


ALL = DeltaOperators()

@dataclass(frozen=True, slots=True)
class DeltaLaunches:
    """Functions that launch a Triton kernel each.

    convolution, rule, norm: as the kernels causal_conv_silu, gated_delta_rule with the epsilon of its norms, and
        gated_rms_norm.
    gates: as `gates`.
    """

    convolution: Callable[..., Tensor]
    gates: Callable[..., tuple[Tensor, Tensor]]
    rule: Callable[..., Tensor]
    norm: Callable[..., Tensor]


CHUNK = 64
CORES = 24
CHUNKS_PER_CORE = 2
TILING_BYTES = 16 << 20
"""Tokens of a chunk of npu_chunk_gated_delta_rule, the most cube cores of an A2, chunks on which a core works at once,
and bytes of the workspace beside these (https://github.com/hicann/ops-transformer/blob/48d9479b65f676086eae24ccb438762298975398/attention/chunk_gated_delta_rule/op_host/chunk_gated_delta_rule_tiling.cpp)."""


def chunk_bytes(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, rows: int, tokens: int, itemsize: int
) -> int:
    """Return the bytes that a chunk takes beside its inputs and outputs: those of its convolution and of its operator.

    The inputs of the convolution exist once for each of 4 taps, also in float32. The states of the rows exist three
    times, and once in float32 in the operator's workspace, beside intermediate results of its chunks.
    """
    taps = 4
    float32 = 4
    float16 = 2
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    convolution = taps * tokens * channels * (itemsize + float32)
    states = rows * value_heads * key_dim * value_dim * (3 * itemsize + float32)
    tokens_at_once = CHUNKS_PER_CORE * CORES * CHUNK
    decays = float32
    products = float16 * (3 * key_dim + 2 * value_dim + CHUNK)
    intermediate = value_heads * tokens_at_once * (decays + products)
    masks = 4 * float32 * CHUNK
    buffers = CHUNKS_PER_CORE * float32 * (2 * CHUNK + 3 * key_dim + value_dim)
    of_cores = CORES * CHUNK * (masks + buffers)
    return max(convolution, states + intermediate + of_cores + TILING_BYTES)



@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of a step.

    slots: [R] int32.
    lengths: [R] int32, tokens of each row.
    keep: [R, 1, 1] in the dtype of the activations: 0 for a row that begins with a state of zeros, else 1.
    forget: [R, 1] float32: `FORGET` for a row that begins with a state of zeros, else 0.
    """

    slots: Tensor
    lengths: Tensor
    keep: Tensor
    forget: Tensor


_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()
_sources: WeakIdKeyDictionary = WeakIdKeyDictionary()


def rows_of(metadata: AttentionMetadata, state_slots: Tensor, dtype: torch.dtype) -> StepRows:
    """Return the rows of a step, computed once for each tensor of slots: a step makes its own for all layers.

    dtype: of the activations.
    """
    rows = _rows.get(state_slots)
    if rows is None:
        starts = metadata.cu_seqlens_q
        lengths = starts[1:] - starts[:-1]
        is_continued = metadata.context_lens != lengths
        keep = is_continued.to(dtype)
        rows = _rows[state_slots] = StepRows(
            state_slots.int(), lengths, keep.view(-1, 1, 1), (1 - is_continued.float()).unsqueeze(1) * FORGET)
    return rows  # type: ignore[no-any-return]


def has_single_tokens(tokens: int, metadata: AttentionMetadata) -> bool:
    """Return True if each row has one token."""
    return metadata.host_cu_seqlens_q == list(range(tokens + 1))


@dataclass(frozen=True, slots=True)
class Windows:
    """Places of a convolution's inputs in the earlier inputs of all rows [R (K - 1)], followed by the tokens' [T].

    inputs: [T K], the K inputs of each token.
    last: [R (K - 1)], the last inputs of each row.
    """

    inputs: Tensor
    last: Tensor


def windows_of(tokens: int, taps: int, metadata: AttentionMetadata, state_slots: Tensor, lengths: Tensor) -> Windows:
    """Return the places for a convolution over `taps` tokens, computed once for each tensor of slots.

    lengths: of `StepRows`.
    """
    of_taps = _sources.get(state_slots)
    if of_taps is None or of_taps[0] != taps:
        starts = metadata.cu_seqlens_q
        device = starts.device
        rows = len(starts) - 1
        earlier = taps - 1
        places = _range(tokens, device)
        row = (places.unsqueeze(1) >= starts[1:].unsqueeze(0)).sum(1, dtype=torch.int32)
        back = _range(taps, device) - earlier  # of each input from its token

        def source(offset: Tensor, first: Tensor, row: Tensor) -> Tensor:
            """Return the place of the input at `offset` from its row's first token, which is `first`."""
            place = torch.where(offset >= 0, first + offset + rows * earlier, row * earlier + earlier + offset)
            return place.clamp_max(rows * earlier + tokens - 1).flatten()

        first = starts.index_select(0, row).unsqueeze(1)
        of_taps = _sources[state_slots] = taps, Windows(
            source(places.unsqueeze(1) - first + back, first, row.unsqueeze(1)),
            source(lengths.unsqueeze(1) + back[:-1], starts[:-1].unsqueeze(1), _range(rows, device).unsqueeze(1)))
    return of_taps[1]  # type: ignore[no-any-return]


@cache
def _range(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32).to(device)


@cache
def ones(count: int, device: torch.device) -> Tensor:
    """Return [count] int32: lengths of rows of one token."""
    return torch.ones(count, dtype=torch.int32).to(device)


@cache
def unit_gamma(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight [dim] of an RMS norm that divides by the length of its rows."""
    return torch.full((dim,), dim**-0.5).to(dtype).to(device)


def gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, forget: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the decays [T, Hv] float32, and sigmoid(b), by operators of torch.

    forget: [T, 1] float32, added to a token's decays; None for none.
    """
    step = F.softplus(a + dt_bias)
    rate = rates(a_log)
    return step * rate if forget is None else torch.addcmul(forget, step, rate), b.sigmoid()


_derived: WeakIdKeyDictionary = WeakIdKeyDictionary()


def rates(a_log: Tensor) -> Tensor:
    """Return -exp(a_log), computed once for each weight."""
    return _once(a_log, lambda: -a_log.exp())


def taps_of(weight: Tensor) -> Tensor:
    """Return the weight [C, K] of a convolution as [K, C] float32, computed once for each weight."""
    return _once(weight, lambda: weight.t().float().contiguous())


def _once(weight: Tensor, derive: Callable[[], Tensor]) -> Tensor:
    derived = _derived.get(weight)
    if derived is None:
        derived = _derived[weight] = derive()
    return derived  # type: ignore[no-any-return]
