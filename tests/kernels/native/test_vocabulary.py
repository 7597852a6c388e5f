"""Native penalties and log-probabilities, over vocabularies of several parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from npuserve.kernels import native
from npuserve.kernels.logprobs import logprobs
from npuserve.kernels.mask_logits import mask_logits, random_masks
from npuserve.kernels.penalize import penalize

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="the native kernels are not built"),
    pytest.mark.usefixtures("isa"),
]
VOCABULARY = 2 * 16384 + 1000 + 7
"""Two whole parts, and one that ends within a block and a vector."""


def _report(*args: object) -> tuple[Tensor, ...]:
    return logprobs.implementations["cpu"].function(*args)


def _rows(count: int, dtype: torch.dtype) -> Tensor:
    """Return logits with many ties, and large ones past the vocabulary."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(count, VOCABULARY + 25, generator=generator).mul(4).round(decimals=1)
    logits[:, VOCABULARY:] = 100.0
    return logits.to(dtype)


def test_penalize_equals_golden_bit_for_bit():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, VOCABULARY, generator=generator).mul(3)
    logits[0, :4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    in_prompt = torch.rand(3, VOCABULARY, generator=generator) < 0.3
    counts = torch.randint(-4, 4, (3, VOCABULARY), generator=generator).clamp(min=0).int()
    repetition, presence, frequency = torch.tensor([[1.3, 0.8, 1.0], [0.5, -1.0, 0.0], [0.25, 1.5, 0.0]])
    expected = logits.clone()
    penalize(expected, in_prompt, counts, repetition, presence, frequency)
    for threads in (1, 3):
        native.library().set_threads(threads)
        got = logits.clone()
        penalize.implementations["cpu"].function(got, in_prompt, counts, repetition, presence, frequency)
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mask_logits_equals_golden_bit_for_bit(dtype):
    logits = _rows(5, dtype)
    logits[:, 3::50], logits[:, 5::70] = torch.nan, 1e-40
    bits, _ = random_masks(torch.Generator().manual_seed(1), 5, VOCABULARY)
    of_row, expected = torch.tensor([2, -1, 0, 1, 2], dtype=torch.int32), logits.clone()
    mask_logits(expected, VOCABULARY, bits, of_row)
    numbers = torch.int16 if dtype == torch.bfloat16 else torch.int32
    for threads in (1, 3):
        native.library().set_threads(threads)
        got = logits.clone()
        mask_logits.implementations["cpu"].function(got, VOCABULARY, bits, of_row)
        assert torch.equal(got.view(numbers), expected.view(numbers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 20, 300, VOCABULARY])
def test_logprobs_against_golden_in_float64(dtype, n):
    logits = _rows(2, dtype)
    ids = torch.tensor([VOCABULARY - 1, 16384])
    logprob, rank, top_ids, top_logprobs = _report(logits, VOCABULARY, ids, n)
    expected = logprobs(logits.double(), VOCABULARY, ids, n)
    torch.testing.assert_close(logprob.double(), expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(rank, expected[1])
    assert torch.equal(top_ids, expected[2])
    torch.testing.assert_close(top_logprobs.double(), expected[3], rtol=1e-5, atol=1e-5)


def test_logprobs_row_bits_are_independent_of_batch_and_threads():
    logits, ids = _rows(5, torch.bfloat16), torch.arange(5) * 7000
    expected = _report(logits, VOCABULARY, ids, 20)
    for threads in (1, 2, 3):
        native.library().set_threads(threads)
        for row in range(5):
            alone = _report(logits[row : row + 1], VOCABULARY, ids[row : row + 1], 3)
            assert torch.equal(alone[0], expected[0][row : row + 1])
            assert torch.equal(alone[1], expected[1][row : row + 1])
            assert torch.equal(alone[2], expected[2][row : row + 1, :3])
            assert torch.equal(alone[3], expected[3][row : row + 1, :3])


def test_logprobs_equal_logits_give_smallest_ids():
    logprob, rank, top_ids, _ = _report(torch.zeros(1, VOCABULARY), VOCABULARY, torch.tensor([5]), 3)
    assert logprob.item() == pytest.approx(-torch.tensor(float(VOCABULARY)).log().item(), abs=1e-5)
    assert rank.tolist() == [1]
    assert top_ids.tolist() == [[0, 1, 2]]


def test_logprobs_nan_and_infinities_equal_golden():
    nan, inf = torch.nan, torch.inf
    rows = torch.tensor([[nan, 0.0, 0.0, 9], [-inf, -inf, 2.0, 9], [-inf, -inf, nan, 9], [inf, 0.0, inf, 9]])
    ids = torch.tensor([2, 0, 1, 1])
    got, expected = _report(rows, 3, ids, 3), logprobs(rows, 3, ids, 3)
    for each, want in zip(got, expected, strict=True):
        torch.testing.assert_close(each, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_logprobs_no_rows_is_empty():
    shapes = [x.shape for x in _report(torch.empty(0, 9), 9, torch.empty(0, dtype=torch.int64), 3)]
    assert shapes == [(0,), (0,), (0, 3), (0, 3)]
