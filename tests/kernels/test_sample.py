"""Sampling: the golden function against independent ones, and every implementation against the allowed tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from npuserve.kernels.registry import GOLDEN
from npuserve.kernels.sample import largest, likeliest, sample
from tests.kernels.comparison import generator, randn
from tests.kernels.variants import implementation, params

Serve = Callable[..., Tensor]


@pytest.fixture(params=params(sample))
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    """The kernel, as each of its implementations."""
    with implementation(sample, request.param) as made:
        yield lambda *args: made.function(*made.adapt(args)).cpu()


def draw(
    serve: Serve,
    logits: Tensor,
    uniform: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Return the tokens of one row of logits at each of `uniform`."""
    n = len(uniform)
    full = [torch.full((n,), x) for x in (temperature, top_k, top_p, min_p)]
    return serve(logits.repeat(n, 1), logits.shape[-1], *full, uniform)[:, 0]


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 2.0, "top_p": 0.99},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.8},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
]


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_sample_against_transformers(serve: Serve, filters: dict[str, Any]) -> None:
    """At evenly spaced numbers each token is drawn as often as its probability says, plus or minus one."""
    n, vocabulary = 1000, 90
    logits = randn(1, vocabulary, seed=3).mul(2)
    scores = logits.clone()
    ids = torch.zeros(1, 1, dtype=torch.int64)
    warpers = [
        TemperatureLogitsWarper(filters["temperature"]),
        TopKLogitsWarper(filters["top_k"]) if "top_k" in filters else None,
        TopPLogitsWarper(filters["top_p"]) if "top_p" in filters else None,
        MinPLogitsWarper(filters["min_p"]) if "min_p" in filters else None,
    ]
    for warper in filter(None, warpers):
        scores = warper(ids, scores)
    expected = scores.double().softmax(dim=-1)[0]

    drawn = draw(serve, logits, (torch.arange(n).double() + 0.5) / n, **filters)
    assert torch.equal(drawn, drawn.sort().values)
    frequency = torch.bincount(drawn, minlength=vocabulary) / n
    assert (frequency - expected).abs().max() <= 1 / n + 1e-6
    assert not frequency[expected == 0].any()


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.95, 0.999])
def test_likeliest_of_a_large_vocabulary_against_transformers(spread: float, top_p: float) -> None:
    """The same set, except for tokens within a rounding of the border."""
    vocabulary = 20000
    scores = randn(vocabulary, seed=5).double().mul(spread)
    theirs = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.int64), scores[None])[0].isfinite()
    kept = likeliest(scores, torch.tensor(1.0), 0, top_p)
    assert torch.equal(scores[kept], scores.sort(descending=True).values[: len(kept)])
    assert abs(len(kept) - int(theirs.sum())) <= 1


def test_sample_of_random_numbers_follows_the_distribution(serve: Serve) -> None:
    """Chi-square over the vocabulary, five standard deviations."""
    n, vocabulary = 20000, 40
    logits = randn(1, vocabulary)
    drawn = draw(serve, logits, torch.rand(n, dtype=torch.float64, generator=generator(7)), 1.0)
    expected = logits.double().softmax(dim=-1)[0] * n
    chi_square = ((torch.bincount(drawn, minlength=vocabulary) - expected) ** 2 / expected).sum()
    assert abs(chi_square - (vocabulary - 1)) < 5 * (2 * (vocabulary - 1)) ** 0.5


def test_sample_resolves_ties_towards_smaller_ids(serve: Serve) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 0.0]])
    grid = torch.linspace(0, 1 - 1e-9, 200, dtype=torch.float64)
    assert set(draw(serve, logits, grid, 1.0, top_k=1).tolist()) == {1}
    assert set(draw(serve, logits, grid, 1.0, top_k=4).tolist()) == {1, 2, 3, 4}
    mass = logits.exp()[0] / logits.exp().sum()
    assert set(draw(serve, logits, grid, 1.0, top_p=float(2 * mass[1] + 0.5 * mass[2])).tolist()) == {1, 2, 3}
    assert set(draw(serve, torch.zeros(1, 300), grid, 1.0, top_p=0.0999).tolist()) == set(range(30))


def test_sample_at_the_ends_of_the_unit_interval(serve: Serve) -> None:
    """0 gives the first token with any mass, the largest number below 1 the last one."""
    logits = torch.tensor([[-torch.inf, 0.0, -200.0, 0.0, -torch.inf]])
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    for filters in ({}, {"top_k": 4}, {"top_p": 0.999}, {"min_p": 0.5}):
        assert draw(serve, logits, ends, 1.0, **filters).tolist() == [1, 3]


def test_largest_uniform_stays_below_every_total() -> None:
    below_one = torch.tensor([1 - 2.0**-53], dtype=torch.float64).expand(2000)
    totals = torch.rand(2000, dtype=torch.float64, generator=generator()) + 0.5
    totals[:3] = torch.tensor([1.0, 1 + 2.0**-52, 2 - 2.0**-52], dtype=torch.float64)
    assert (below_one * totals < totals).all()


def test_sample_extremes(serve: Serve) -> None:
    nan, inf = torch.nan, torch.inf
    half = torch.tensor([0.5], dtype=torch.float64)
    for filters in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert draw(serve, torch.tensor([[nan, 1.0, nan]]), half, 1.0, **filters).tolist() == [1]
        assert draw(serve, torch.tensor([[3.0, inf, 5.0]]), half, 1.0, **filters).tolist() == [1]
        assert draw(serve, torch.tensor([[1e30, 2e30, -3e38]]), half, 1e-30, **filters).tolist() == [1]
        assert draw(serve, torch.tensor([[1.0, 2.0, 3.0]]), half, 1e-45, **filters).tolist() == [2]
        assert 0 <= draw(serve, torch.full((1, 3), -inf), half, 1.0, **filters).item() < 3


def test_sample_ignores_padding_and_other_rows(serve: Serve) -> None:
    rows, vocabulary = 24, 517
    logits = randn(rows, vocabulary + 11).mul(3)
    logits[:, vocabulary:] = 1000
    temperature = torch.rand(rows, generator=generator(1)) + 0.3
    top_k = torch.randint(-1, 40, (rows,), generator=generator(2)) * (torch.arange(rows) % 2)
    top_p = torch.where(torch.arange(rows) % 3 == 0, 0.8, 1.0)
    min_p = torch.where(torch.arange(rows) % 4 == 0, 0.1, 0.0)
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator(3))
    args = (temperature, top_k, top_p, min_p, uniform)
    before = logits.clone()
    ids = serve(logits, vocabulary, *args)
    assert torch.equal(logits, before)
    assert ids.shape == (rows, 1)
    assert (ids < vocabulary).all()
    alone = [serve(logits[r : r + 1], vocabulary, *(a[r : r + 1] for a in args)) for r in range(rows)]
    assert torch.equal(ids, torch.cat(alone))
    shuffled = torch.randperm(rows, generator=generator(4))
    assert torch.equal(ids[shuffled], serve(logits[shuffled], vocabulary, *(a[shuffled] for a in args)))


@pytest.mark.parametrize("n", [0, 1, 5, 64, 300])
def test_largest_is_a_stable_sort(n: int) -> None:
    scores = randn(300).mul(2).round()
    scores[::7] = -torch.inf
    order = np.lexsort((np.arange(300), -scores.numpy()))
    np.testing.assert_array_equal(largest(scores, n).numpy(), order[:n])


def assert_may_be_drawn(
    logits: npt.NDArray[np.float64], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float, id: int
) -> None:
    """Assert in float64, for one row, that the filters keep the id and that `uniform` falls into its mass.

    Only tokens whose mass is within SLACK of the total from a border may be kept or dropped."""
    slack = 2e-6
    scores = np.where(np.isnan(logits), -np.inf, logits)
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.exp(np.where(scores == scores.max(), 0.0, (scores - scores.max()) / temperature))
    order = np.lexsort((np.arange(len(scores)), -scores))
    order = order[:top_k] if 0 < top_k < len(scores) else order
    mass = weights[order] / weights[order].sum()
    before = mass.cumsum() - mass
    some, all_of_them = np.zeros_like(weights), np.zeros_like(weights)  # tokens that must be kept, and that may be
    for kept, side in ((some, -slack), (all_of_them, slack)):
        ids = order[(before < top_p + side) | (np.arange(len(order)) == 0) | (top_p == 1)]
        ids = ids[weights[ids] >= min_p * (1 - side)]
        kept[ids] = weights[ids]
    assert all_of_them[id] > 0
    least, most = uniform * some.sum(), uniform * all_of_them.sum()
    assert most >= some[:id].sum() - slack * most
    assert least <= all_of_them[: id + 1].sum() + slack * least


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 12))])
def test_sample_draws_allowed_tokens(serve: Serve, seed: int) -> None:
    """Rows with ties, holes, infinities, tiny and huge temperatures, and filters alone and together."""
    rng, rows = np.random.default_rng(seed), 24
    vocabulary, padding = int(rng.integers(1, 40 if seed % 3 == 0 else 2600)), int(rng.integers(0, 20))
    logits = rng.standard_normal((rows, vocabulary + padding)) * rng.choice([0.01, 1, 3, 10, 100], (rows, 1))
    logits = np.where(rng.random((rows, 1)) < 0.2, logits.round(), logits)
    for part, chance, value in ((0.2, 0.3, -np.inf), (0.1, 0.01, np.inf), (0.1, 0.2, np.nan), (0.1, 1.0, 2.5),
                                (0.05, 1.0, -np.inf)):
        logits[(rng.random((rows, 1)) < part) & (rng.random(logits.shape) < chance)] = value
    logits[:, vocabulary:] = np.inf
    given = torch.from_numpy(logits).to(torch.bfloat16 if seed % 4 == 3 else torch.float32)

    temperature = 10 ** rng.normal(0, 0.7, rows)
    temperature[rng.random(rows) < 0.1] = rng.choice([1e-45, 1e-10, 1e30])
    top_k = np.where(rng.random(rows) < 0.5, 0, rng.integers(-1, vocabulary + 3, rows))
    top_k[rng.random(rows) < 0.1] = 1
    top_p = np.where(rng.random(rows) < 0.5, 1, 1 - rng.random(rows))
    top_p[rng.random(rows) < 0.1] = rng.choice([1e-9, 0.9999])
    min_p = np.where(rng.random(rows) < 0.7, 0, rng.random(rows))
    uniform = rng.random(rows)
    params = [torch.from_numpy(x).float() for x in (temperature, top_p, min_p)]
    ids = serve(given, vocabulary, params[0], torch.from_numpy(top_k), *params[1:], torch.from_numpy(uniform))[:, 0]
    temperature, top_p, min_p = (x.double().numpy() for x in params)
    for row, id in enumerate(ids.tolist()):
        assert 0 <= id < vocabulary
        assert_may_be_drawn(given[row, :vocabulary].double().numpy(), temperature[row], int(top_k[row]), top_p[row],
                            min_p[row], uniform[row], id)


@pytest.mark.slow
@pytest.mark.parametrize(
    "filters", [{"top_k": 1500}, {"top_k": 7, "top_p": 0.7}, {"top_p": 0.3}, {"min_p": 0.9}], ids=str
)
@pytest.mark.parametrize("logits", [torch.zeros(1, 3000), torch.arange(3000.0).div(500).floor().mul(0.1)[None]])
def test_sample_ties_at_border_keep_smaller_ids(
    serve: Serve, filters: dict[str, Any], logits: Tensor, request: pytest.FixtureRequest
) -> None:
    """Every id that can be drawn, from few values over several blocks."""
    is_golden = request.node.callspec.params["serve"] == GOLDEN
    count = 200 if is_golden else 4000  # the golden function filters each row by itself, in milliseconds
    grid = (torch.arange(count).double() + 0.5) / count
    drawn = draw(serve, logits, grid, 1.0, **filters)
    expected = drawn_in_order(logits[0], grid, **filters)
    if is_golden:
        assert torch.equal(drawn, expected)
    assert torch.equal(drawn, drawn.sort().values)
    assert drawn.unique().tolist() == expected.unique().tolist()


def drawn_in_order(
    logits: Tensor, uniform: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return the tokens of one row [V] without temperature: the filters keep the first of the stably sorted ids."""
    order = logits.sort(descending=True, stable=True).indices[: top_k or None]
    weights = (logits[order] - logits.max()).exp()
    mass = weights.double()
    is_kept = (mass.cumsum(0) - mass < torch.tensor(top_p).double() * mass.sum()) & (weights >= min_p)
    kept = order[is_kept].sort().values
    sums = (logits[kept] - logits.max()).exp().double().cumsum(0)
    return kept[torch.searchsorted(sums, uniform * sums[-1], right=True)]
