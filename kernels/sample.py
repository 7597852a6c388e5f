"""Sampling of tokens with temperature, top_k, top_p and min_p."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.registry import Case, kernel

# Factor between successive thresholds of the top_p search: candidates are the tokens above the threshold.
_STRIDE = 1 / 64

MAX_SMALL_TOP_K = 1024
"""Largest top_k of `Filters.SMALL_TOP_K`: the limit that torch_npu documents for npu_top_k_top_p."""


class Filters(IntEnum):
    """Filters of the rows of one call, from the fewest to all. A device may omit work; a larger value is also right."""

    NONE = 0
    """top_k and top_p are off in all rows."""
    SMALL_TOP_K = 1
    """Each row has a top_k from 1 to MAX_SMALL_TOP_K and any top_p, or both are off."""
    ANY = 2

    @classmethod
    def of(cls, top_k: int, top_p: float, vocabulary: int) -> Filters:
        """Return the filters of one row. vocabulary: number of ids; a top_k of at least as many is off."""
        if 0 < top_k < vocabulary:
            return cls.SMALL_TOP_K if top_k <= MAX_SMALL_TOP_K else cls.ANY
        return cls.ANY if top_p < 1 else cls.NONE


def _case(rows: int, vocabulary: int, padding: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor | int, ...]:
        logits = torch.randn(rows, vocabulary + padding, generator=generator).mul(3).to(dtype)
        logits[:, vocabulary:] = 100.0
        temperature = torch.rand(rows, generator=generator).add(0.5)
        # Odd rows are unfiltered, so that one call has filtered and unfiltered rows.
        off = torch.arange(rows) % 2 == 1
        top_ks = torch.full((rows,), top_k).masked_fill(off, 0)
        top_ps = torch.full((rows,), top_p).masked_fill(off, 1.0)
        min_ps = torch.full((rows,), min_p).masked_fill(off, 0.0)
        uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
        return logits, vocabulary, temperature, top_ks, top_ps, min_ps, uniform, Filters.of(top_k, top_p, vocabulary)

    name = f"{rows}x{vocabulary}+{padding} top_k {top_k} top_p {top_p:g} min_p {min_p:g}"
    return Case(name, make, benchmark=vocabulary > 10_000)


@kernel(
    "sample",
    cases=[
        _case(1, 7, 0),
        _case(5, 101, 27, top_k=9, top_p=0.8),
        _case(6, 999, 1, top_p=0.9),
        _case(4, 999, 25, min_p=0.1),
        _case(3, 500, 12, top_k=50, top_p=0.9, min_p=0.05),
        _case(8, 151936, 0),
        _case(8, 151936, 0, top_k=20, top_p=0.95),
        _case(8, 151936, 0, top_p=0.95),
    ],
)
def sample(
    logits: Tensor, vocabulary: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor,
    filters: Filters = Filters.ANY,
) -> Tensor:
    """Sample one token per row of logits [R, Vp] float32 or bfloat16: ids [R, 1] int64 below `vocabulary`.

    temperature: [R] float32, above 0.
    top_k: [R] int64, off below 1; or int32 from 1 on, off at `vocabulary`.
    top_p: [R] float32 in (0, 1], off at 1.
    min_p: [R] float32 in [0, 1], off at 0.

    uniform: [R] float64 in [0, 1).
    filters: the most that any row has.

    The order of the filters is Hugging Face's: temperature, top_k, top_p, min_p. The top_p filter renormalizes the mass
    that remains, and keeps the fewest tokens whose mass reaches top_p (Holtzman et al. 2020, arXiv:1904.09751). The
    min_p filter is relative to the most likely token. Smaller ids are kept among equal tokens at a filter's border.

    One random number decides a row. The result is the first token, in order of ids, at which the cumulative mass
    exceeds `uniform` times the total. Mass is summed in float64. Rows with only temperature and min_p are not sorted.

    NaN counts as minus infinity. A row of minus infinity gives any id.
    """
    scores = logits[:, :vocabulary]
    scores = scores if scores.dtype == torch.float64 else scores.float()
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ids = torch.empty(len(scores), 1, dtype=torch.int64, device=logits.device)
    ranked = ((top_k > 0) & (top_k < vocabulary)) | (top_p < 1)

    rest = (~ranked).nonzero().squeeze(1)
    if len(rest):
        # Softmax is computed row by row: the results of exp may depend on a row's position in the tensor.
        mass = _scaled(scores[rest], temperature[rest].unsqueeze(1)).softmax(dim=-1)
        least = min_p[rest].unsqueeze(1) * mass.amax(dim=-1, keepdim=True)
        ids[rest] = _draw(mass.masked_fill_(mass < least, 0.0), uniform[rest].unsqueeze(1))

    for row in ranked.nonzero().squeeze(1).tolist():
        kept = likeliest(scores[row], temperature[row], int(top_k[row]), float(top_p[row])).sort().values
        weights = _scaled(scores[row, kept], temperature[row]).exp()
        ids[row] = kept[_draw(weights.masked_fill_(weights < min_p[row], 0.0), uniform[row : row + 1])]
    return ids


@native.implementation(sample)
def _(
    logits: Tensor, vocabulary: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor,
    filters: Filters = Filters.ANY,
) -> Tensor:
    """Sample; weights below 2**-126 of the largest count as 0."""
    ids = native.empty(len(logits), 1, dtype=torch.int64)
    native.call(
        "sample",
        ("sample", logits.dtype, [logits, temperature, top_k, top_p, min_p, uniform, ids],
         [*logits.shape, vocabulary]))
    return ids


@ascend.implementation(sample)
def _(
    logits: Tensor, vocabulary: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor,
    filters: Filters = Filters.ANY,
) -> Tensor:
    """Sum mass in float32, the device's dtype, and round `uniform` to float32.

    Nothing is copied to the host. All tokens that equal the last one kept by top_k are kept. Among equal tokens at the
    border of top_p, npu_top_k_top_p keeps the larger ids, and `_sorted_filters` keeps all.
    """
    scores = logits[:, :vocabulary].float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    scaled = _scaled(scores, temperature.unsqueeze(1))
    if filters is not Filters.NONE:
        if top_k.dtype != torch.int32:
            top_k = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).to(torch.int32)
        filtered = _small_top_k if filters is Filters.SMALL_TOP_K else _sorted_filters
        scaled = filtered(scaled, top_k, top_p)
    weights = scaled.exp()
    weights = weights.masked_fill(weights < min_p.unsqueeze(1), 0.0)
    # A parallel cumulative sum may not increase monotonically. So only positions with weight count, and the total is
    # the largest sum among them.
    cumulative = weights.cumsum(dim=-1).masked_fill(weights == 0, 0.0)
    below_one = uniform.float().clamp(max=1 - 2**-24).unsqueeze(1)
    passed = cumulative > below_one * cumulative.amax(dim=-1, keepdim=True)
    return ascend.first_true(passed)


def _small_top_k(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Filter by npu_top_k_top_p, whose time grows with the largest top_k: rows without filters pass with 1.

    Its kernel writes each token that it keeps by a scalar instruction. 22 ms were measured for a row with the
    vocabulary's size, and 0.24 ms with 50 (https://github.com/vllm-project/vllm-ascend/pull/12232).

    scaled: [R, V] float32. top_k: [R] int32, off at V. top_p: [R] float32.
    """
    off = top_k >= scaled.shape[1]
    filtered = torch_npu.npu_top_k_top_p(scaled, top_p, top_k.masked_fill(off, 1))
    return torch.where(off.unsqueeze(1), scaled, filtered)


def _sorted_filters(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Filter by a sort of all tokens. The arguments are those of `_small_top_k`, with any top_k and top_p."""
    ranked = scaled.sort(dim=-1, descending=True).values
    places = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    mass = ranked.exp().masked_fill(places >= top_k.unsqueeze(1), 0.0)
    above = mass.cumsum(dim=-1) - mass
    kept = (above < top_p.unsqueeze(1) * mass.sum(dim=-1, keepdim=True)) & (mass > 0)
    border = torch.where(kept, ranked, torch.inf).amin(dim=-1, keepdim=True)
    return scaled.masked_fill(scaled < border, -torch.inf)


@triton.implementation(sample)
def _(
    logits: Tensor, vocabulary: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor,
    filters: Filters = Filters.ANY,
) -> Tensor:
    from npuserve.kernels.triton import launch_vocabulary

    cut = filters is not Filters.NONE
    return launch_vocabulary.sample(logits, vocabulary, temperature, top_k, top_p, min_p, uniform, cut)


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest scores of [V] without NaN, largest first; equal ones by ascending id."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    ids = (scores >= scores.topk(count).values[-1]).nonzero().squeeze(1)
    return ids[scores[ids].sort(descending=True, stable=True).indices[:count]]


def likeliest(scores: Tensor, temperature: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the ids of scores [V] that top_k and top_p keep at temperature [], most likely first."""
    vocabulary = len(scores)
    if 0 < top_k < vocabulary:
        ids = largest(scores, top_k)
        if top_p >= 1:
            return ids
        total = _scaled(scores[ids], temperature).exp().sum(dtype=torch.float64)
    else:
        weights = _scaled(scores, temperature).exp()
        total = weights.sum(dtype=torch.float64)
        # The weights below the floor sum to less than 1 - top_p of the total, so none of them is needed.
        threshold, floor = 1.0, float((1 - top_p) * total / vocabulary)
        while True:
            threshold = max(threshold * _STRIDE, floor)
            ids = (weights >= threshold).nonzero().squeeze(1)
            if threshold == floor or weights[ids].sum(dtype=torch.float64) >= top_p * total:
                break
        ids = ids[scores[ids].sort(descending=True, stable=True).indices]
    mass = _scaled(scores[ids], temperature).exp().double()
    return ids[mass.cumsum(0) - mass < top_p * total]


def _scaled(scores: Tensor, temperature: Tensor) -> Tensor:
    """Return the log-likelihood relative to the most likely token of each row.

    It is 0 for that token, also where scores are infinite or the temperature is tiny.
    """
    peak = scores.amax(dim=-1, keepdim=True)
    return torch.where(scores == peak, 0.0, (scores - peak) / temperature)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution: weights [..., n], uniform [..., 1] float64 -> index [..., 1]."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # A float64 below 1 times the total rounds to less than the total: the index exists and has a weight above 0.
    return torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True)
