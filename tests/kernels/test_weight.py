"""Forms of weights: a further form is one class, by which all products and rows are computed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels.bench.costs import cost
from npuserve.kernels.embedding import embedding
from npuserve.kernels.layer import Linear
from npuserve.kernels.linear import linear, linear_argmax, linear_swiglu
from npuserve.kernels.quantize import quantize
from npuserve.kernels.quantized import DYNAMIC
from npuserve.kernels.swiglu import swiglu
from npuserve.kernels.weight import FloatWeight, WeightForm, form_of
from tests.kernels.comparison import generator

GROUP = 8


@dataclass(slots=True, eq=False)
class Nibbles(WeightForm):
    """Two numbers of 4 bits a byte, [N, K / 2], with a scale for each GROUP columns; inputs are floats."""

    values: Tensor
    scale: Tensor
    dtype: torch.dtype
    inputs: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        n, half = self.values.shape
        return n, 2 * half

    @property
    def operand_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def row_bytes(self) -> int:
        return self.values[0].nbytes + self.scale[0].nbytes

    def rows(self, ids: Tensor) -> Tensor:
        values = torch.stack([self.values[ids] & 15, self.values[ids] >> 4], dim=-1).flatten(1)
        return ((values.float() - 8) * self.scale[ids].repeat_interleave(GROUP, dim=1)).to(self.dtype)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.rows(torch.arange(len(self.values))), bias)


@pytest.fixture
def weight() -> Nibbles:
    g = generator()
    return Nibbles(torch.randint(256, (12, 16), generator=g, dtype=torch.uint8), torch.rand(12, 4, generator=g),
                   torch.float32)


def test_kernels_another_form_of_weight_equals_its_floats(weight):
    x, dense = torch.randn(3, 32, generator=generator()), weight.rows(torch.arange(12))
    assert torch.equal(linear(x, weight, None), F.linear(x, dense))
    assert torch.equal(linear_swiglu(x, weight, None), swiglu(F.linear(x, dense)))
    assert torch.equal(linear_argmax(x, weight, None, 12), F.linear(x, dense).argmax(dim=1, keepdim=True))
    assert torch.equal(embedding(torch.tensor([5, 0]), weight), dense[[5, 0]])
    assert Linear(weight, None).inputs is None


def test_cost_another_form_of_weight_counts_its_bytes(weight):
    ids = torch.tensor([5, 0])
    assert cost("embedding", (ids, weight)).nbytes == ids.nbytes + 2 * (16 + 4 * 4 + 32 * 4)
    x = torch.randn(3, 32)
    expected = x.nbytes + weight.values.nbytes + weight.scale.nbytes + 3 * 12 * 4
    assert cost("linear", (x, weight, None)).nbytes == expected


def test_form_of_a_matrix_is_floats_and_a_form_stays():
    matrix = torch.randn(3, 4)
    form = form_of(matrix)
    assert isinstance(form, FloatWeight)
    assert form.values is matrix
    assert form_of(form) is form


def test_float_weight_quantized_input_is_refused():
    x, weight = torch.randn(2, 4), torch.randn(3, 4)
    with pytest.raises(TypeError, match="x is quantized, the weight is not"):
        linear(quantize(x, DYNAMIC), weight, None)
