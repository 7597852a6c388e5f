"""A token by chance."""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.registry import Case, kernel

# Candidates for top_p: those this much less likely than the likeliest, then this much less again, and so on.
_STRIDE = 1 / 64


def _case(rows: int, vocabulary: int, padding: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor | int, ...]:
        logits = torch.randn(rows, vocabulary + padding, generator=generator).mul(3).to(dtype)
        logits[:, vocabulary:] = 100.0
        temperature = torch.rand(rows, generator=generator).add(0.5)
        # Every other row is unfiltered, so that both kinds meet in one call.
        off = torch.arange(rows) % 2 == 1
        top_ks = torch.full((rows,), top_k).masked_fill(off, 0)
        top_ps = torch.full((rows,), top_p).masked_fill(off, 1.0)
        min_ps = torch.full((rows,), min_p).masked_fill(off, 0.0)
        uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
        return logits, vocabulary, temperature, top_ks, top_ps, min_ps, uniform

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
    cut: bool = True,
) -> Tensor:
    """logits [R, Vp] float32 or bfloat16 -> ids [R, 1] int64, below `vocabulary`.

    temperature: [R] float32, above 0. top_k: [R] int64, off where below 1. top_p: [R] float32 in (0, 1], off at 1.
    min_p: [R] float32 in [0, 1], off at 0. uniform: [R] float64 in [0, 1). cut: False where top_k and top_p are known
    to be off in all rows, which spares a device to find out.

    Filters in Hugging Face's order: temperature; the top_k largest; of those, renormalized, the fewest likeliest whose
    mass reaches top_p (Holtzman et al. 2020, arXiv:1904.09751); those at least min_p times as likely as the likeliest.
    Where equal tokens meet a border, those of smaller ids are kept. The token is then the first, in the order of ids,
    at which the cumulative mass (summed in float64) passes `uniform` of the whole: one number decides a row. Rows that
    only temperature and min_p shape are not sorted.

    NaN counts as minus infinity. A row without a number above minus infinity gives any id.
    """
    scores = logits[:, :vocabulary]
    scores = scores if scores.dtype == torch.float64 else scores.float()
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ids = torch.empty(len(scores), 1, dtype=torch.int64, device=logits.device)
    ranked = ((top_k > 0) & (top_k < vocabulary)) | (top_p < 1)

    rest = (~ranked).nonzero().squeeze(1)
    if len(rest):
        # Softmax works row by row, so that a row's numbers do not depend on its place, as those of exp may.
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
    cut: bool = True,
) -> Tensor:
    """Weights below 2**-126 of the likeliest's count as 0."""
    ids = native.empty(len(logits), 1, dtype=torch.int64)
    native.call(
        "sample",
        ("sample", logits.dtype, [logits, temperature, top_k, top_p, min_p, uniform, ids],
         [*logits.shape, vocabulary]))
    return ids


@ascend.implementation(sample)
def _(
    logits: Tensor, vocabulary: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor,
    cut: bool = True,
) -> Tensor:
    """Mass is summed in float32, which the device computes in, and `uniform` is rounded to it. No value visits the
    host: all rows are sorted if one of them may be cut."""
    scores = logits[:, :vocabulary].float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    weights = _scaled(scores, temperature.unsqueeze(1)).exp()
    if cut:
        # In the order of likelihood, equal ones in that of ids.
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        ranked = weights.gather(1, order)
        places = torch.arange(vocabulary, device=logits.device)
        beyond = (places >= top_k.unsqueeze(1)) & (top_k > 0).unsqueeze(1)
        ranked = ranked.masked_fill(beyond, 0.0)
        mass = ranked.cumsum(dim=-1)
        enough = (mass - ranked >= top_p.unsqueeze(1) * mass[:, -1:]) & (top_p < 1).unsqueeze(1)
        weights = torch.zeros_like(weights).scatter(1, order, ranked.masked_fill(enough, 0.0))
    weights = weights.masked_fill(weights < min_p.unsqueeze(1), 0.0)
    # A sum in parts may not rise from each place to the next: only places that have weight count, and the largest sum
    # among them is the whole.
    cumulative = weights.cumsum(dim=-1).masked_fill(weights == 0, 0.0)
    below_one = uniform.float().clamp(max=1 - 2**-24).unsqueeze(1)
    passed = cumulative > below_one * cumulative.amax(dim=-1, keepdim=True)
    return passed.to(torch.float32).argmax(dim=-1, keepdim=True)


@triton.implementation(sample)
def _(
    logits: Tensor, vocabulary: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor,
    cut: bool = True,
) -> Tensor:
    from npuserve.kernels.triton import launch_vocabulary

    return launch_vocabulary.sample(logits, vocabulary, temperature, top_k, top_p, min_p, uniform, cut)


def largest(scores: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest of scores [V], free of NaN: largest first, smaller ids first among equals."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    ids = (scores >= scores.topk(count).values[-1]).nonzero().squeeze(1)
    return ids[scores[ids].sort(descending=True, stable=True).indices[:count]]


def likeliest(scores: Tensor, temperature: Tensor, top_k: int, top_p: float) -> Tensor:
    """The ids of scores [V] that top_k and top_p leave at a temperature [], likeliest first."""
    vocabulary = len(scores)
    if 0 < top_k < vocabulary:
        ids = largest(scores, top_k)
        if top_p >= 1:
            return ids
        total = _scaled(scores[ids], temperature).exp().sum(dtype=torch.float64)
    else:
        weights = _scaled(scores, temperature).exp()
        total = weights.sum(dtype=torch.float64)
        # All weights below the floor add up to less than 1 - top_p of the total, so that none of them is needed.
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
    """Logarithms of how likely each is against the likeliest of its row, which is 0 also where the scores are infinite
    or the temperature is tiny."""
    peak = scores.amax(dim=-1, keepdim=True)
    return torch.where(scores == peak, 0.0, (scores - peak) / temperature)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the cumulative distribution: weights [..., n], uniform [..., 1] float64 -> index [..., 1]."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # A float64 below 1 times the total rounds to less than the total: there is such an index, of a weight above 0.
    return torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True)
