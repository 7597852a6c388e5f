"""Ids, logprobs and penalties on CUDA, beyond the cases of all kernels. test_sample.py also covers this implementation,
for which the interpreter needs minutes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.kernels.greedy import greedy
from npuserve.kernels.logprobs import logprobs
from npuserve.kernels.penalize import penalize
from npuserve.kernels.sample import sample
from tests.kernels.comparison import generator, randn
from tests.kernels.triton.hopper import Launch, compiled

LAST = 1 - 2.0**-53
"""Random number that draws the last kept id."""


@pytest.fixture
def whole(interpreted: ModuleType) -> ModuleType:
    from npuserve.kernels.triton import launch_vocabulary

    return launch_vocabulary


@pytest.fixture
def parts(whole: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with parts and blocks of undecided ids so small that small vocabularies fill several."""
    monkeypatch.setattr(whole, "PART", 64)
    monkeypatch.setattr(whole, "_CUT_BLOCK", 128)
    return whole


def shaping(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
            uniform: float | None = None, seed: int = 1) -> tuple[Tensor, ...]:
    numbers = torch.rand(rows, dtype=torch.float64, generator=generator(seed))
    return (torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p),
            torch.full((rows,), min_p), numbers if uniform is None else torch.full_like(numbers, uniform))


def test_greedy_ties_over_several_parts_give_smallest_id(parts: ModuleType) -> None:
    """Rows are apart; of zeros of both signs the first is the largest."""
    logits = torch.randint(4, (6, 300), generator=generator()).float()[:, 20:]
    logits[0], logits[1], logits[2], logits[3, 70:] = 7.0, -torch.inf, torch.nan, torch.nan
    logits[4], logits[4, 66], logits[4, 130] = -1.0, -0.0, 0.0
    logits[:, 250:] = 90.0
    assert torch.equal(parts.greedy(logits, 250), greedy(logits, 250))
    assert parts.greedy(logits, 250)[[0, 1, 2, 4], 0].tolist() == [0, 0, 0, 66]
    assert parts.greedy(logits[:0], 250).shape == (0, 1)


@pytest.mark.parametrize(("dtype", "seed"), [
    (torch.float32, 0), (torch.float16, 2),
    pytest.param(torch.bfloat16, 1, marks=pytest.mark.full)])  # test_at_the_vocabulary_of_qwen3_14b is in bfloat16
def test_filters_over_several_parts_equal_golden(parts: ModuleType, dtype: torch.dtype, seed: int) -> None:
    """Filters together, alone and none, on logits with ties, with holes, and of one value."""
    rows, vocabulary = 8, 201
    given = (randn(rows, vocabulary + 9, seed=seed) * torch.tensor([0.001, 1, 4, 20]).repeat(2)[:, None])
    given[::3] = given[::3].round(decimals=1)
    given[5, ::2], given[6], given[7, 3::7] = -torch.inf, 2.5, torch.nan
    given[:, vocabulary:] = torch.inf
    rng = generator(seed)
    temperature, top_p, min_p = (10 ** randn(rows, seed=seed + 9).mul(0.5), torch.rand(rows, generator=rng),
                                 torch.rand(rows, generator=rng) * 0.3)
    top_k = torch.randint(1, vocabulary + 3, (rows,), generator=rng)
    top_k[::4], top_p[1::4], top_p[::5], min_p[1::2] = 0, 1.0, 1.0, 0.0
    uniform = torch.rand(rows, dtype=torch.float64, generator=rng)
    args = (given.to(dtype), vocabulary, temperature, top_k, top_p, min_p, uniform)
    assert torch.equal(parts.sample(*args), sample(*args))


FILTERS: list[dict[str, Any]] = [{"top_k": 150}, {"top_k": 1}, {"top_p": 0.3}, {"top_k": 77, "top_p": 0.5},
                                 {"top_p": 0.9999}, {"top_p": 1e-9}, {"min_p": 1.0}]


@pytest.mark.parametrize(("values", "filters"), [
    pytest.param(values, filters, id=f"{values}-{filters}", marks=pytest.mark.full if (place + values) % 2 else [])
    for values in (1, 7) for place, filters in enumerate(FILTERS)])
def test_sample_last_kept_id_among_ties(parts: ModuleType, filters: dict[str, Any], values: int) -> None:
    """All ids, or nearly all, are undecided."""
    logits = torch.arange(300.0).remainder(values).mul(0.003)[None]
    args = (logits, 300, *shaping(1, uniform=LAST, **filters))
    assert torch.equal(parts.sample(*args), sample(*args))


def test_sample_ids_without_mass(parts: ModuleType) -> None:
    """The border of top_k is among ids without mass; or top_p keeps nearly everything."""
    logits = randn(1, 300).mul(5)
    for filters in ({"temperature": 0.01, "top_k": 50}, {"temperature": 0.02, "top_k": 9, "top_p": 0.9},
                    {"temperature": 0.05, "top_p": 0.99999}, {"temperature": 100.0, "top_p": 0.999, "top_k": 299}):
        args = (logits, 290, *shaping(1, **filters))
        assert torch.equal(parts.sample(*args), sample(*args))
    light = torch.full((1, 130), -60.0)
    light[0, 100] = 0.0
    assert parts.sample(light, 130, *shaping(1, uniform=0.0)).tolist() == [[100]]
    assert parts.sample(light, 130, *shaping(1, uniform=LAST)).tolist() == [[100]]


def test_sample_greedy_rows_and_rows_without_numbers(parts: ModuleType) -> None:
    logits = randn(3, 200)
    logits[1] = -torch.inf
    for cut in (True, False):
        ids = parts.sample(logits, 200, *shaping(3, temperature=0.0, top_k=5, top_p=0.5), cut)
        assert torch.equal(ids, greedy(logits, 200))
        assert parts.sample(logits, 200, *shaping(3, top_k=3 * cut), cut)[1] == 0
    assert parts.sample(logits[:0], 200, *shaping(0)).shape == (0, 1)


def test_sample_without_cut_equals_sample_with_cut(parts: ModuleType) -> None:
    args = (randn(8, 210).mul(3)[:, 3:], 200, *shaping(8, 0.7, min_p=0.01))
    expected = sample(*args)
    assert torch.equal(parts.sample(*args, True), expected)
    assert torch.equal(parts.sample(*args, False), expected)
    *others, uniform = args
    assert torch.equal(parts.sample(*others, uniform.float(), False), sample(*others, uniform.float().double()))


def test_sample_is_independent_of_program_order(parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of undecided ids depends on the order of the programs; here it is shuffled."""
    kernel, seen = parts.gather_kernel, []

    class Shuffled:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def run(**arguments: Any) -> None:
                kernel[grid](**arguments)
                for keys, number in zip(arguments["undecided"], arguments["gathered"].tolist(), strict=True):
                    keys[:number] = keys[:number][torch.randperm(number, generator=generator())]
                    seen.append(number)

            return run

    monkeypatch.setattr(parts, "gather_kernel", Shuffled())
    logits = randn(1, 400).round(decimals=1)
    for filters in ({"top_k": 90}, {"top_p": 0.6}, {"top_k": 200, "top_p": 0.8}):
        args = (logits, 390, *shaping(1, 3.0, **filters))
        assert torch.equal(parts.sample(*args), sample(*args))
    assert max(seen) > 64


def test_at_the_vocabulary_of_qwen3_14b(whole: ModuleType) -> None:
    vocabulary = 151936
    logits = randn(2, 152064).mul(3).bfloat16()
    logits[:, vocabulary:] = 100.0
    temperature, top_k, top_p, min_p, uniform = shaping(2, 0.9)
    top_k[0], top_p[0], min_p[0], top_p[1] = 20, 0.95, 0.001, 0.95
    args = (logits, vocabulary, temperature, top_k, top_p, min_p, uniform)
    assert torch.equal(whole.sample(*args), sample(*args))
    assert torch.equal(whole.greedy(logits, vocabulary), greedy(logits, vocabulary))


@pytest.mark.parametrize("n", [0, 1, 64, pytest.param(20, marks=pytest.mark.full)])
def test_logprobs_over_several_parts(parts: ModuleType, n: int) -> None:
    """Ties everywhere, NaN and holes; a part with fewer ids than requested."""
    vocabulary = 200
    logits = randn(6, 220).mul(2).round()[:, 5:]
    logits[0], logits[1, ::2], logits[2, 64:128], logits[3, 40:] = 1.0, torch.nan, -torch.inf, -torch.inf
    logits[4, :100] = torch.tensor([0.0, -0.0]).repeat(50)
    logits[:, vocabulary:] = 90.0
    ids = torch.tensor([7, 1, 64, 3, 199, 0])
    got, want = parts.logprobs(logits, vocabulary, ids, n), logprobs(logits.double(), vocabulary, ids, n)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[2], want[2])
    for some, all_of_them in ((got[0], want[0]), (got[3], want[3])):
        torch.testing.assert_close(some.double(), all_of_them.double(), rtol=1e-5, atol=1e-5)


def test_logprobs_beyond_max_top_ids_are_sorted(parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_TOP_IDS", 4)
    logits, ids = randn(3, 60).round(decimals=1), torch.tensor([1, 2, 3])
    for n in (4, 5, 60):
        got, want = logprobs.implementations["cuda"].function(logits, 60, ids, n), logprobs(logits, 60, ids, n)
        assert torch.equal(got[2], want[2])
        assert torch.equal(got[1], want[1])
        torch.testing.assert_close(got[3], want[3])


def test_penalize_over_several_parts_with_rows_apart(parts: ModuleType) -> None:
    logits = randn(3, 320).mul(3)
    logits[:, ::50] = -torch.inf
    in_prompt = torch.rand(3, 300, generator=generator()) < 0.3
    counts = torch.randint(-4, 4, (3, 300), generator=generator(2)).clamp(min=0).int()
    penalties = torch.tensor([1.3, 0.7, 1.0]), torch.tensor([0.5, -1.0, 0.0]), torch.tensor([0.25, 1.5, -2.0])
    expected = logits.clone()
    penalize(expected[:, 11:311], in_prompt, counts, *penalties)
    parts.penalize(logits[:, 11:311], in_prompt, counts, *penalties)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_calls_read_nothing_on_the_host(whole: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on tensors without values are the same, as a capture needs: seven for a sample."""
    called: list[str] = []

    class Nothing:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda **arguments: called.append(self.name)

    for name in filter(lambda name: name.endswith("_kernel"), dir(whole)):
        monkeypatch.setattr(whole, name, Nothing(name.removesuffix("_kernel")))
    meta = torch.empty(64, 151936, dtype=torch.bfloat16, device="meta")
    args = tuple(x.to("meta") for x in shaping(64))
    whole.sample(meta, 151936, *args)
    assert called == ["peaks", "probe", "probe", "gather", "cut", "weigh", "draw"]
    called.clear()
    whole.sample(meta, 151936, *args, False)
    assert called == ["peaks", "weigh", "draw"]
    called.clear()
    whole.greedy(meta, 151936)
    whole.logprobs(meta, 151936, torch.empty(64, dtype=torch.int64, device="meta"), 20)
    assert called == ["peaks", "likeliest", "report_parts", "report"]


GOOD: dict[str, Any] = dict(zip(("logits", "vocabulary", "temperature", "top_k", "top_p", "min_p", "uniform"),
                                (torch.zeros(2, 9), 8, *shaping(2)), strict=True))
ROW = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logits": torch.zeros(2, 9, 1)}, "logits"),
        ({"logits": torch.zeros(2, 9, dtype=torch.float64)}, "logits"),
        ({"vocabulary": 0}, "vocabulary: 0 is not from 1 to 9"),
        ({"vocabulary": 10}, "vocabulary: 10 is not from 1 to 9"),
        ({"temperature": torch.ones(3)}, "temperature"),
        ({"top_k": torch.ones(2)}, "top_k"),
        ({"top_p": torch.ones(2, dtype=torch.float64)}, "top_p"),
        ({"min_p": torch.ones(4)[::2]}, "min_p"),
        ({"uniform": torch.ones(2, dtype=torch.float16)}, "uniform"),
    ],
)
def test_sample_invalid_argument_raises(whole: ModuleType, change: dict[str, Any], named: str) -> None:
    whole.sample(*GOOD.values())
    with pytest.raises(ValueError, match=f"^{named}"):
        whole.sample(*(GOOD | change).values())


def test_invalid_argument_raises(whole: ModuleType) -> None:
    logits, large = torch.zeros(2, 9), torch.empty(1, 2**22 + 1, device="meta")
    one = torch.ones(2)
    masks = torch.ones(2, 9, dtype=torch.bool), torch.ones(2, 9, dtype=torch.int32)
    for call, named in (
        (lambda: whole.greedy(large, 2**22 + 1), "vocabulary: 4194305 is not from 1 to 4194304"),
        (lambda: whole.logprobs(logits, 9, ROW, 10), "n: 10 is not from 0 to 9"),
        (lambda: whole.logprobs(logits, 9, ROW.int(), 1), "ids"),
        (lambda: whole.penalize(logits.half(), *masks, one, one, one), "logits: torch.float16 is not float32"),
        (lambda: whole.penalize(logits, masks[1], masks[1], one, one, one), "in_prompt"),
        (lambda: whole.penalize(logits, masks[0], masks[1][:, :8], one, one, one), "output_counts"),
        (lambda: whole.penalize(logits, *masks, one, one.half(), one), "presence"),
    ):
        with pytest.raises(ValueError, match=f"^{named}"):
            call()


BASE = {"keys": "*i64", "vocabulary": "i32/16", "parts": "i32"}
OWN = {"logits": "*bf16", "stride": "i64/16", **BASE}
HEAT = {"temperature": "*fp32"}
CUTS = {**HEAT, "top_k": "*i64", "top_p": "*fp32"}
KEPT = {**HEAT, "min_p": "*fp32", "borders": "*i64", "masses": "*i64"}
PROBED = {**CUTS, "distances": "*fp32", "sums": "*fp32", "numbers": "*i32"}
FOUND = {"gathered": "*i32", "undecided": "*i64", "above": "*i64", "masses": "*i64"}
REPORT = {"ids": "*i64", "candidates": "*i64", "peaks": "*fp32", "sums": "*fp32", "larger": "*i32", "count": "i32",
          "logits": "*bf16", "stride": "i64/16", "vocabulary": "i32/16", "parts": "i32"}
PENALTIES = {"logits": "*fp32", "in_prompt": "*i1", "output_counts": "*i32", "repetition": "*fp32",
             "presence": "*fp32", "frequency": "*fp32", "width": "i32/16", "stride": "i64/16"}
ONE = 2.0**44


def launched(kernel: str, signature: dict[str, str], warps: int, file: str = "sampling", **constants: Any) -> Launch:
    return Launch(file, f"{kernel}_kernel", signature, {**constants, "PDL": True},
                  {"num_warps": warps, "launch_pdl": True})


COMPILED = [  # and the minimum number of loads of 16 bytes
    (launched("peaks", OWN, 4, PART=4096, gathered=None), 4),
    (launched("peaks", {**OWN, "gathered": "*i32"}, 4, PART=4096), 4),
    (launched("likeliest", {"keys": "*i64", "ids": "*i64", "parts": "i32"}, 1, PARTS=64), 0),
    *((launched("probe", {**OWN, **PROBED}, 8, ROUND=turn, PART=4096, PARTS=64), 2) for turn in range(2)),
    (launched("gather", {**OWN, **PROBED, **FOUND}, 8, ONE=ONE, PART=4096, PARTS=64), 2),
    (launched("cut", {**BASE, **CUTS, **FOUND, "borders": "*i64"}, 16, ONE=ONE, BLOCK=4096, PARTS=64), 0),
    (launched("weigh", {**OWN, **KEPT}, 8, ONE=ONE, PART=4096, PARTS=64), 2),
    (launched("draw", {**OWN, **KEPT, "uniform": "*fp64", "ids": "*i64"}, 8, ONE=ONE, PART=4096, PARTS=64), 2),
    (launched("report_parts", REPORT, 8, "logprobs", PART=4096), 2),
    (launched("report", {**REPORT, "logprob": "*fp32", "rank": "*i64", "top_ids": "*i64", "top_logprobs": "*fp32"}, 4,
              "logprobs", PARTS=64, CANDIDATES=2048), 0),
    (launched("penalize", PENALTIES, 8, "penalize", PART=4096), 8),
]


def test_hopper_has_no_spills_and_no_float_atomics(interpreted: ModuleType) -> None:
    """At the vocabulary of Qwen3-14B, with logits in bfloat16."""
    for (launch, wide), made in zip(COMPILED, compiled([x for x, _ in COMPILED]), strict=True):
        assert made.local == 0, launch
        assert made.ptx.count("griddepcontrol.wait") == 1, launch
        assert made.ptx.count("ld.global.v4.b32") >= wide, launch
        assert ".add.f" not in "".join(line for line in made.ptx.splitlines() if "atom" in line or "red." in line)
