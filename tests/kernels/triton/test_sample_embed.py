"""Greedy and sampled tokens and their embeddings, against the golden functions in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from npuserve.kernels.greedy import greedy
from npuserve.kernels.registry import Case
from npuserve.kernels.sample import likeliest, sample
from tests.kernels.triton.lowered import LoweringError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = 1e-5
"""Maximum error of a draw in float32, as a fraction of the mass."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(
    rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return temperature, top_k, top_p, min_p, and uniform in float32."""
    g = generator(seed)
    return (torch.rand(rows, generator=g) + 0.5, torch.full((rows,), top_k), torch.full((rows,), top_p),
            torch.full((rows,), min_p), torch.rand(rows, generator=g))


def missed(logits: Tensor, vocabulary: int, shaping: tuple[Tensor, ...], ids: Tensor) -> float:
    """Return by how much of the mass, in float64, the draws `ids` [R, 1] miss the distribution of the golden
    function."""
    worst = 0.0
    scores = logits[:, :vocabulary].double().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    for row, (temperature, top_k, top_p, min_p, uniform) in enumerate(zip(*shaping, strict=True)):
        heat = temperature.double()
        weights = ((scores[row] - scores[row].max()) / heat).exp()
        kept = torch.zeros_like(weights)
        kept[likeliest(scores[row], heat, int(top_k), float(top_p))] = 1
        weights = weights * kept * (weights >= min_p)
        after = weights.cumsum(0) / weights.sum()
        chosen = int(ids[row])
        assert weights[chosen] > 0
        before = after[chosen] - weights[chosen] / weights.sum()
        worst = max(worst, float(before - uniform), float(uniform - after[chosen]))
    return worst


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [c for c in greedy.cases if not c.benchmark], ids=lambda c: c.name)
def test_greedy(launch: ModuleType, case: Case, dtype: torch.dtype) -> None:
    logits, vocabulary = case.make(generator(), dtype)
    assert torch.equal(launch.greedy(logits, vocabulary), greedy(logits.double(), vocabulary))


def test_greedy_nan_and_infinities(launch: ModuleType) -> None:
    nan, inf = torch.nan, torch.inf
    rows = [[nan, 1, 2, 9], [nan, nan, nan, 9], [-inf, nan, -inf, 9], [0, inf, inf, 9], [-inf, -5, 0, nan]]
    logits = torch.tensor(rows)
    assert launch.greedy(logits, 3).tolist() == greedy(logits, 3).tolist() == [[2], [0], [0], [1], [2]]


def test_greedy_ties_over_many_blocks_give_smallest_id(launch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also rows that share programs, in a matrix whose rows are apart."""
    monkeypatch.setattr(launch, "BLOCK", 16)
    monkeypatch.setattr(launch, "PROGRAMS", 3)
    logits = torch.randint(4, (8, 300), generator=generator()).float()[:, 20:]
    logits[0] = 7.0
    assert torch.equal(launch.greedy(logits, 250), greedy(logits, 250))
    assert launch.greedy(logits, 250)[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [c for c in sample.cases if not c.benchmark], ids=lambda c: c.name)
def test_sample(launch: ModuleType, way: str, case: Case, dtype: torch.dtype) -> None:
    """In float64 bit-identical to the golden function; in float32 nearly so."""
    logits, vocabulary, *shaping, uniform = case.make(generator(), dtype)
    if way == "interpreted":
        expected = sample(logits, vocabulary, *shaping, uniform)
        assert torch.equal(launch.sample(logits, vocabulary, *shaping, uniform), expected)
    ids = launch.sample(logits, vocabulary, *shaping, uniform.float())
    assert missed(logits, vocabulary, (*shaping, uniform), ids) < NARROW


def test_sample_over_many_blocks(launch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "BLOCK", 16)
    logits = torch.randn(4, 130, generator=generator()).mul(2).round(decimals=1)
    shaping = draws(4, top_k=20, top_p=0.9, min_p=0.01)
    shaping[1][::3], shaping[2][1::3] = 0, 1.0
    ids = launch.sample(logits, 123, *shaping)
    assert missed(logits, 123, shaping, ids) < NARROW
    assert int(ids.max()) > 16


def test_sample_follows_distribution_up_to_its_ends(launch: ModuleType) -> None:
    """Every number from 0 to the largest below 1 gives the id in whose part of the mass it lies."""
    mass = torch.tensor([0.0, 0.125, 0.25, 0.0, 0.5, 0.125, 0.0])
    uniform = torch.tensor([0.0, 0.1, 0.126, 0.37, 0.38, 0.8, 0.876, 1 - 2**-24])
    logits = mass.log().expand(len(uniform), -1).contiguous()
    shaping = (torch.ones(8), torch.zeros(8, dtype=torch.int64), torch.ones(8), torch.zeros(8), uniform)
    assert launch.sample(logits, 7, *shaping)[:, 0].tolist() == [1, 1, 2, 2, 4, 4, 5, 5]
    # A number that rounds to 1 in float32.
    almost = (*shaping[:4], torch.full((8,), 1.0 - 2**-50, dtype=torch.float64).float())
    assert launch.sample(logits, 7, *almost)[:, 0].tolist() == [5] * 8


def test_sample_ties_at_border_keep_smaller_ids(launch: ModuleType) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 3.0, 0.0]]).repeat(2, 1)
    top_k, top_p = torch.tensor([2, 0]), torch.tensor([1.0, 0.4])
    one = torch.ones(2)
    last = torch.full((2,), 0.9999)
    assert launch.sample(logits, 6, one, top_k, top_p, one * 0, last)[:, 0].tolist() == [2, 2]


def test_sample_greedy_rows_and_extremes(launch: ModuleType) -> None:
    """At temperature 0; with nothing to choose from; with an infinite logit; with NaN beside numbers; with one id."""
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[1.0, 5, 5], [nan, nan, -inf], [0, inf, 3], [nan, 1, nan], [2, 2, 2]])
    temperature, *others, uniform = draws(5)
    temperature[0] = 0
    ids = launch.sample(logits, 3, temperature, *others, uniform)[:, 0].tolist()
    assert ids[:4] == [1, 0, 1, 1]
    assert launch.sample(logits, 1, *draws(5)).tolist() == [[0]] * 5


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_of_chosen_ids(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, sampled: bool
) -> None:
    """In several blocks, the last one partial, from a table whose rows are apart; for any number of rows."""
    monkeypatch.setattr(launch, "BLOCK", 32)
    monkeypatch.setattr(launch, "PROGRAMS", 2)
    logits = torch.randn(5, 60, generator=generator()).to(dtype)
    table = torch.randn(50, 90, generator=generator(2)).to(dtype)[:, :70]
    shaping = draws(5, top_k=7) if sampled else ()
    ids, embedded = launch.sample_embed(logits, 45, table, *shaping)
    assert torch.equal(ids, launch.sample(logits, 45, *shaping) if sampled else greedy(logits, 45))
    assert torch.equal(embedded, table[ids[:, 0]])
    ids, embedded = launch.sample_embed(logits[:0], 45, table, *(x[:0] for x in shaping))
    assert ids.shape == (0, 1)
    assert embedded.shape == (0, 70)


def test_row_offsets_beyond_32_bits(lowered: ModuleType) -> None:
    """Untouched memory uses no pages."""
    far = 2**30 + 8
    logits = torch.empty(2 * far + 8, dtype=torch.bfloat16).as_strided((3, 8), (far, 1))
    table = torch.empty(4 * far + 8, dtype=torch.bfloat16).as_strided((5, 8), (far, 1))
    logits.copy_(torch.eye(3, 8))
    logits[2] = torch.arange(8) == 4
    table.copy_(torch.arange(40).view(5, 8))
    ids, embedded = lowered.sample_embed(logits, 5, table)
    assert ids[:, 0].tolist() == [0, 1, 4]
    assert torch.equal(embedded, table[ids[:, 0]])


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_the_widths_of_qwen3_14b(
    launch: ModuleType, way: str, note: Callable[[str, float], None], dtype: torch.dtype, sampled: bool
) -> None:
    # The interpreter needs seconds for a sampled row.
    vocabulary, padded, hidden, rows = 151936, 152064, 5120, 1 if way == "interpreted" else 8
    logits = torch.randn(rows, padded, generator=generator()).mul(3).to(dtype)
    logits[:, vocabulary:] = 100.0
    # Row n begins at number n: as wide as the real table in little memory.
    table = torch.arange(padded + hidden).remainder(251).to(dtype).as_strided((padded, hidden), (1, 1))
    shaping = draws(rows, top_p=0.95, min_p=0.001) if sampled else ()
    ids, embedded = launch.sample_embed(logits, vocabulary, table, *shaping)
    if sampled:
        error = missed(logits, vocabulary, shaping, ids)
        assert error < NARROW
    else:
        error = float((ids != greedy(logits.double(), vocabulary)).sum())
        assert error == 0
    assert torch.equal(embedded, table[ids[:, 0]])
    name = f"sample_embed {'sampled' if sampled else 'greedy'} {vocabulary} ids, hidden {hidden}"
    note(f"{name} {str(dtype).removeprefix('torch.')}", error)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logits": torch.zeros(2, 9, 1)}, "logits"),
        ({"logits": torch.zeros(2, 9, dtype=torch.float64)}, "logits"),
        ({"logits": torch.zeros(9, 2).t()}, "logits"),
        ({"vocabulary": 0}, "vocabulary: 0 is not from 1 to 9"),
        ({"vocabulary": 10}, "vocabulary: 10 is not from 1 to 9"),
        ({"table": torch.zeros(7, 4)}, "rows of table: 7 is not from 8"),
        ({"table": torch.zeros(9, 0)}, "columns of table"),
        ({"table": torch.zeros(9, 4, device="meta")}, "table"),
        ({"temperature": torch.ones(3)}, "temperature"),
        ({"top_k": torch.ones(2)}, "top_k"),
        ({"top_p": torch.ones(2, dtype=torch.float64)}, "top_p"),
        ({"min_p": torch.ones(4)[::2]}, "min_p"),
        ({"uniform": torch.ones(2, dtype=torch.float16)}, "uniform"),
        ({"uniform": torch.ones(2, device="meta")}, "uniform"),
    ],
)
def test_invalid_argument_raises(interpreted: ModuleType, change: dict[str, Tensor], named: str) -> None:
    temperature, top_k, top_p, min_p, uniform = draws(2)
    good = {"logits": torch.zeros(2, 9), "vocabulary": 8, "table": torch.zeros(9, 4), "temperature": temperature,
            "top_k": top_k, "top_p": top_p, "min_p": min_p, "uniform": uniform}
    interpreted.sample_embed(*good.values())
    with pytest.raises(ValueError, match=f"^{named}"):
        interpreted.sample_embed(*(good | change).values())
    with pytest.raises(ValueError, match=r"^shaping: 2 tensors"):
        interpreted.sample(good["logits"], 8, temperature, top_k)


def test_more_ids_than_float32_counts_raise(interpreted: ModuleType) -> None:
    logits = torch.empty(1, 2**24 + 1, device="meta")
    with pytest.raises(ValueError, match=r"^vocabulary: 16777217 is not from 1 to 16777216"):
        interpreted.sample(logits, 2**24 + 1, *(x.to("meta") for x in draws(1)))


def test_block_beyond_unified_buffer_raises(
    lowered: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowered, "BLOCK", 4 * lowered.BLOCK)
    with pytest.raises(LoweringError, match=r"ub overflow, requires \d+ bits while 1572864 bits available"):
        lowered.sample(torch.zeros(1, 4), 4, *draws(1))
