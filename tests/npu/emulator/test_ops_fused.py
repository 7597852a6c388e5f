"""Fused operators of the emulated NPU, called through torch_npu, against their formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.emulator.child import emulated

# Tolerance: one rounding to the dtype, or the error of a float32 sum.
STEP = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
DTYPES = list(STEP)
HALVES = [torch.float16, torch.bfloat16]
NZ = 29


def drawn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(got: Tensor, want: Tensor, roundings: int = 1) -> None:
    """Assert that `got` on the device equals `want` in float64 within that many roundings to its dtype."""
    close = STEP[got.dtype] * roundings
    torch.testing.assert_close(got.cpu().double(), want.double(), rtol=close, atol=close)


def normed(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    dims = list(range(-gamma.dim(), 0))
    rstd = 1 / (x.double().square().mean(dims, keepdim=True) + epsilon).sqrt()
    return x.double() * rstd * gamma.double(), rstd


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.double().abs().amax(-1) / 127
    return (x.double() / scale[..., None]).round(), scale


def one_apart(got: Tensor, want: Tensor) -> None:
    """Assert that quantized values are equal, except for a few that round the other way."""
    off = (got.cpu().int() - want.int()).abs()
    assert off.max() <= 1
    assert off.float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@emulated()
def test_rms_norm(dtype: torch.dtype) -> None:
    import torch_npu

    x, gamma = drawn(3, 5, 64, dtype=dtype), drawn(64, dtype=dtype, seed=1)
    for g in (gamma, gamma.float(), drawn(5, 64, dtype=dtype, seed=2)):
        y, rstd = torch_npu.npu_rms_norm(x.npu(), g.npu(), epsilon=1e-5)
        want, want_rstd = normed(x, g, 1e-5)
        assert y.dtype == dtype
        near(y, want)
        near(rstd, want_rstd)
    heads = drawn(4, 6, 128, dtype=dtype).npu()[:, 1:3]  # the query's heads in a fused projection are a view
    near(
        torch_npu.npu_rms_norm(heads, drawn(128, dtype=dtype).npu())[0],
        normed(heads.cpu(), drawn(128, dtype=dtype), 1e-6)[0],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@emulated()
def test_add_rms_norm(dtype: torch.dtype) -> None:
    import torch_npu

    a, b, gamma = drawn(7, 64, dtype=dtype), drawn(7, 64, dtype=dtype, seed=1), drawn(64, dtype=dtype, seed=2)
    y, rstd, x = torch_npu.npu_add_rms_norm(a.npu(), b.npu(), gamma.npu(), epsilon=1e-6)
    want, want_rstd = normed(a.double() + b.double(), gamma, 1e-6)
    near(x, a.double() + b.double())
    near(y, want, roundings=4)
    torch.testing.assert_close(rstd.cpu().double(), want_rstd, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
@emulated()
def test_add_rms_norm_quantized(dtype: torch.dtype) -> None:
    import torch_npu

    a, b, gamma = drawn(7, 64, dtype=dtype), drawn(7, 64, dtype=dtype, seed=1), drawn(64, dtype=dtype, seed=2)
    half = dtype == torch.float16
    scales = (drawn(64, seed=3).abs() * 0.02 + 0.02).to(torch.float32 if half else dtype)
    zeros = torch.randint(-5, 5, (64,), generator=torch.Generator().manual_seed(4)).to(torch.int32 if half else dtype)
    y, _, x = torch_npu.npu_add_rms_norm_quant(a.npu(), b.npu(), gamma.npu(), scales.npu(), zeros.npu(), epsilon=1e-6)
    want, _ = normed(a.double() + b.double(), gamma, 1e-6)
    near(x, a.double() + b.double())
    one_apart(y, (want / scales.double() + zeros.double()).round().clamp(-128, 127))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("smooth", [False, True])
@emulated()
def test_add_rms_norm_dynamically_quantized(dtype: torch.dtype, smooth: bool) -> None:
    import torch_npu

    a, b, gamma = drawn(7, 64, dtype=dtype), drawn(7, 64, dtype=dtype, seed=1), drawn(64, dtype=dtype, seed=2)
    given: dict[str, Any] = {"smooth_scale1": drawn(64, dtype=dtype, seed=3).abs().npu()} if smooth else {}
    # torch_npu 2.10 raises an error without output_mask.
    y, _, x, scale, _ = torch_npu.npu_add_rms_norm_dynamic_quant(
        a.npu(), b.npu(), gamma.npu(), output_mask=[True, False], **given)
    want, _ = normed(a.double() + b.double(), gamma, 1e-6)
    q, want_scale = by_row(want * drawn(64, dtype=dtype, seed=3).abs().double() if smooth else want)
    near(x, a.double() + b.double())
    one_apart(y, q)
    torch.testing.assert_close(scale.cpu().double(), want_scale, rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@emulated()
def test_swiglu(dtype: torch.dtype) -> None:
    import torch_npu

    x = drawn(5, 64, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    near(torch_npu.npu_swiglu(x.npu(), dim=-1), gate * torch.sigmoid(gate) * up)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool = False) -> Tensor:
    """Multiply each pair of elements, as a complex number, by cos + i sin."""
    v = x.double()
    first, second = (v[..., ::2], v[..., 1::2]) if interleave else v.chunk(2, -1)
    other = torch.stack([-second, first], -1).flatten(-2) if interleave else torch.cat([-second, first], -1)
    return v * cos.double() + other * sin.double()


def angles(positions: int, dim: int, dtype: torch.dtype, interleave: bool = False) -> tuple[Tensor, Tensor]:
    half = torch.outer(torch.arange(positions).float() * 3, 10000.0 ** (-torch.arange(dim // 2) / (dim // 2)))
    whole = half.repeat_interleave(2, -1) if interleave else torch.cat([half, half], -1)
    return whole.cos().to(dtype), whole.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@emulated()
def test_rotary_mul(dtype: torch.dtype, mode: str) -> None:
    import torch_npu

    interleave = mode == "interleave"
    x = drawn(1, 9, 4, 128, dtype=dtype)
    cos, sin = (t.view(1, 9, 1, 128) for t in angles(9, 128, dtype, interleave))
    near(
        torch_npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu(), rotary_mode=mode),
        turned(x, cos, sin, interleave),
        roundings=2,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["BSND", "TND"])
@emulated()
def test_apply_rotary_pos_emb(dtype: torch.dtype, layout: str) -> None:
    import torch_npu

    lead = (9,) if layout == "TND" else (1, 9)
    q, k = drawn(*lead, 4, 128, dtype=dtype), drawn(*lead, 2, 128, dtype=dtype, seed=1)
    cos, sin = (t.view(*lead, 1, 128) for t in angles(9, 128, dtype))
    query, key = q.npu(), k.npu()
    torch_npu.npu_apply_rotary_pos_emb(query, key, cos.npu(), sin.npu(), layout=layout)  # in place
    near(query, turned(q, cos, sin), roundings=2)
    near(key, turned(k, cos, sin), roundings=2)


@pytest.mark.parametrize("dtype", HALVES)
@emulated()
def test_dynamic_quant(dtype: torch.dtype) -> None:
    import torch_npu

    x = drawn(5, 96, dtype=dtype)
    y, scale = torch_npu.npu_dynamic_quant(x.npu())
    want, want_scale = by_row(x)
    assert y.dtype == torch.int8
    assert y.abs().cpu().amax(-1).tolist() == [127] * 5
    one_apart(y, want)
    torch.testing.assert_close(scale.cpu().double(), want_scale, rtol=1e-6, atol=0)
    smooth = drawn(96, dtype=dtype, seed=1).abs()
    y, scale = torch_npu.npu_dynamic_quant(x.npu(), smooth_scales=smooth.npu())
    one_apart(y, by_row(x.double() * smooth.double())[0])


@emulated()
def test_dynamic_quant_rounds_ties_by_the_product_with_the_reciprocal() -> None:
    """Halves of the largest number are ties: 63.5. Half of the rows round otherwise by division by the scale."""
    import torch_npu

    largest = torch.arange(1.0, 2.0, 2**-7).to(torch.bfloat16).float().unsqueeze(1)
    x = torch.cat([largest, largest / 2, -largest / 2], 1)
    y, scale = torch_npu.npu_dynamic_quant(x.bfloat16().npu())
    most = torch.tensor(127.0)  # 127.0 / largest is 127 times its reciprocal in torch
    assert torch.equal(y.cpu().float(), (x * (most / largest)).round())
    assert torch.equal(scale.cpu(), largest.squeeze(1) * (torch.tensor(1.0) / most))
    divided = (x / (largest / 127.0)).round()
    assert 0 < int((y.cpu().float() != divided).sum()) < y.numel()
    assert set(y.cpu()[:, 1].tolist()) == {63, 64}


@emulated()
def test_a_row_of_zeros_is_quantized_to_zeros() -> None:
    import torch_npu

    y, scale = torch_npu.npu_dynamic_quant(torch.zeros(2, 32, dtype=torch.bfloat16).npu())
    assert not y.cpu().any()
    assert scale.cpu().tolist() == [0.0, 0.0]


def _int8(*size: int, seed: int) -> Tensor:
    return torch.randint(-128, 128, size, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("nz", [False, True])
@emulated()
def test_quant_matmul(dtype: torch.dtype, nz: bool) -> None:
    import torch_npu

    torch.npu.config.allow_internal_format = True
    m, k, n = 5, 200, 96
    x, w = _int8(m, k, seed=0), _int8(k, n, seed=1)
    scale, per_token = drawn(n, seed=2).abs() * 1e-3, drawn(m, seed=3).abs() * 1e-2
    bias = drawn(n, dtype=dtype, seed=4)
    weight = torch_npu.npu_format_cast(w.npu(), NZ) if nz else w.npu()
    assert torch_npu.get_npu_format(weight) == (NZ if nz else 2)
    want = x.double() @ w.double() * scale.double() * per_token.double()[:, None]
    given: dict[str, Any] = {"pertoken_scale": per_token.npu(), "output_dtype": dtype}
    near(torch_npu.npu_quant_matmul(x.npu(), weight, scale.npu(), **given), want)
    near(
        torch_npu.npu_quant_matmul(x.npu(), weight, scale.npu(), bias=bias.npu(), **given),
        want + bias.double(),
        roundings=2,
    )
    whole = torch_npu.npu_quant_matmul(x.npu(), weight, scale.npu(), output_dtype=torch.int32)
    assert torch.equal(whole.cpu().long(), x.long() @ w.long())  # exact


@emulated()
def test_quant_matmul_with_a_transposed_view() -> None:
    import torch_npu

    x, w = _int8(5, 200, seed=0), _int8(96, 200, seed=1)
    scale, per_token = drawn(96, seed=2).abs() * 1e-3, drawn(5, seed=3).abs() * 1e-2
    got = torch_npu.npu_quant_matmul(
        x.npu(), w.npu().t(), scale.npu(), pertoken_scale=per_token.npu(), output_dtype=torch.bfloat16)
    near(got, x.double() @ w.double().T * scale.double() * per_token.double()[:, None])


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("smooth", [False, True])
@emulated()
def test_dequant_swiglu_quant(left: bool, smooth: bool) -> None:
    import torch_npu

    x = torch.randint(-9999, 9999, (5, 192), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    x[3] = 0
    scale, per_token = drawn(192, seed=2).abs() * 1e-2, drawn(5, seed=3).abs() * 1e-2
    factors = drawn(96, seed=4).abs()
    given: dict[str, Any] = {"quant_scale": factors.view(1, -1).npu()} if smooth else {}
    y, by = torch_npu.npu_dequant_swiglu_quant(
        x.npu(), weight_scale=scale.view(1, -1).npu(), activation_scale=per_token.view(-1, 1).npu(),
        group_index=torch.tensor([5]).npu(), activate_left=left, quant_mode=1, **given)
    first, second = (x.double() * scale.double() * per_token.double()[:, None]).chunk(2, 1)
    gate, up = (first, second) if left else (second, first)
    want = gate * torch.sigmoid(gate) * up * (factors.double() if smooth else 1)
    q, want_scale = by_row(want)
    one_apart(y, q.nan_to_num(0.0))
    torch.testing.assert_close(by.cpu().double(), want_scale, rtol=1e-5, atol=0)


@emulated()
def test_dequant_swiglu_quant_leaves_tokens_of_no_group_alone() -> None:
    import torch_npu

    torch.npu.synchronize()
    x = torch.ones(4, 128, dtype=torch.int32).npu()
    ones = torch.ones(1, 128).npu(), torch.ones(4, 1).npu()
    y, scale = torch_npu.npu_dequant_swiglu_quant(
        x, weight_scale=ones[0], activation_scale=ones[1], group_index=torch.tensor([3]).npu(), quant_mode=1)
    assert y.cpu()[:3].unique().tolist() == [127]
    torch.testing.assert_close(scale.cpu()[:3], torch.full((3,), torch.sigmoid(torch.tensor(1.0)).item() / 127))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 64])
@pytest.mark.parametrize("shift", [False, True])
@emulated()
def test_quantize_by_given_scales(dtype: torch.dtype, columns: int, shift: bool) -> None:
    import torch_npu

    x, scales = drawn(5, 64, dtype=dtype), (drawn(columns, seed=1).abs() * 0.02 + 0.01).to(dtype)
    zeros = torch.arange(columns, dtype=torch.int32) - 9 if shift else None
    y = torch_npu.npu_quantize(x.npu(), scales.npu(), zeros if zeros is None else zeros.npu(), torch.qint8, -1)
    want = x.double() / scales.double() + (0 if zeros is None else zeros.double())
    assert y.dtype == torch.int8
    one_apart(y, want.round().clamp(-128, 127))
    assert y.cpu().abs().max() >= 127  # it is clamped


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.float32])
@emulated()
def test_a_matrix_survives_the_cast_to_nz_and_back(dtype: torch.dtype) -> None:
    import torch_npu

    torch.npu.config.allow_internal_format = True
    w = _int8(50, 70, seed=0).to(dtype)
    there = torch_npu.npu_format_cast(w.npu(), NZ)
    assert torch_npu.get_npu_format(there) == NZ
    assert torch.equal(there.cpu(), w)
    assert torch.equal(torch_npu.npu_format_cast(there, 2).cpu(), w)


@emulated()
def test_nz_is_stored_by_tiles() -> None:
    import ctypes

    import torch_npu

    torch.npu.config.allow_internal_format = True
    w = torch.arange(48 * 64, dtype=torch.int16).view(48, 64)
    there = torch_npu.npu_format_cast(w.view(torch.float16).npu(), NZ)
    torch.npu.synchronize()
    assert torch_npu.get_storage_size(there) == 48 * 64
    stored = torch.frombuffer(
        ctypes.string_at(there.data_ptr(), 48 * 64 * 2), dtype=torch.int16
    )  # device memory is host memory here
    tiles = w.view(3, 16, 4, 16).permute(2, 0, 1, 3).reshape(-1)  # columns of tiles, 16 by 16 for 16 bits
    assert torch.equal(stored, tiles)


@pytest.mark.parametrize("dtype", HALVES)
@emulated()
def test_matmul_with_a_weight_in_nz(dtype: torch.dtype) -> None:
    import torch_npu

    torch.npu.config.allow_internal_format = True
    x, w = drawn(5, 64, dtype=dtype), drawn(40, 64, dtype=dtype, seed=1)
    weight = torch_npu.npu_format_cast(w.npu(), NZ)
    near(torch.nn.functional.linear(x.npu(), weight), x.double() @ w.double().T)
    near(torch.mm(x.npu(), torch_npu.npu_format_cast(w.t().contiguous().npu(), NZ)), x.double() @ w.double().T)
    bias = drawn(40, dtype=dtype, seed=2)
    near(torch.addmm(bias.npu(), x.npu(), weight.t()), x.double() @ w.double().T + bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
@emulated()
def test_top_k_top_p(dtype: torch.dtype) -> None:
    import torch_npu

    logits = drawn(6, 50, dtype=dtype) * 3
    k = torch.tensor([1, 5, 50, 20, 3, 50], dtype=torch.int32)
    p = torch.tensor([1.0, 0.9, 0.5, 1.0, 0.1, 0.01]).to(dtype)
    got = torch_npu.npu_top_k_top_p(logits.npu(), p.npu(), k.npu()).cpu()
    for row in range(6):
        kept = torch.isfinite(got[row])
        assert torch.equal(got[row][kept], logits[row][kept])
        order = logits[row].double().argsort(descending=True)[: k[row]]
        probability = logits[row].double()[order].softmax(0)
        before = probability.cumsum(0) - probability  # mass of more likely tokens
        wanted = set(order[before < p[row].double() - 1e-6].tolist()) | {order[0].item()}
        assert set(kept.nonzero().flatten().tolist()) == wanted
