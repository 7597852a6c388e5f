"""Implementations for Ascend on an emulated device, against their golden functions in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import npuserve.kernels  # noqa: F401
from npuserve.kernels import ascend, ascend_delta
from npuserve.kernels.quantized import with_levels
from npuserve.kernels.registry import KERNELS, Case, Implementation
from npuserve.kernels.sample import Filters
from npuserve.npu import emulator
from tests.kernels.comparison import compare
from tests.npu.emulator.child import emulated

RELAX = ("fp32", "small_heads")
OURS = {name for name, k in KERNELS.items() if ascend.LABEL in k.implementations}

HEADS = ("qk_norm_rope_kv_write", "paged_attention")
"""Kernels for which the device supports only some sizes of heads."""


def implementation(name: str) -> Implementation[..., Any]:
    return KERNELS[name].implementations[ascend.LABEL]


def taken(case: Case) -> bool:
    lacking = case.zeros or case.float8 or case.int4 % 8 or case.w4a8 or case.ragged
    return not (case.benchmark or lacking) and case.cache in (None, torch.int8)


def cases() -> Iterator[Any]:
    """Yield kernels with a case and a dtype: by default the first case in each dtype, and the others in one in turn."""
    for name in sorted(OURS):
        dtypes = KERNELS[name].dtypes
        dtypes = (*dtypes, *([torch.float16] if torch.bfloat16 in dtypes else []))
        for number, (index, case) in enumerate((i, case) for i, case in enumerate(KERNELS[name].cases) if taken(case)):
            for place, dtype in enumerate(dtypes):
                short = str(dtype).removeprefix("torch.")
                yield pytest.param(name, index, short, id=f"{name}-{case.name}-{short}",
                                   marks=[] if number == 0 or number % len(dtypes) == place else pytest.mark.full)


@pytest.mark.parametrize(("name", "index", "dtype"), list(cases()))
@emulated(relax=RELAX)
def test_implementation_against_golden_in_float64(name: str, index: int, dtype: str) -> None:
    case = with_levels(KERNELS[name].cases[index], ascend.LEVELS)
    compare(KERNELS[name], implementation(name), case, getattr(torch, dtype))


def test_every_kernel_has_an_implementation() -> None:
    """No step falls back to a golden function, which may wait for the device."""
    assert {name for name, kernel in KERNELS.items() if not (kernel.optional or kernel.by_layer)} - OURS == set()


def real_cases(name: str) -> list[Case]:
    """Return the smallest case with heads of 128 dimensions, and the cases of 256."""
    cases = KERNELS[name].cases
    smallest = next(case for case in cases if case.name.endswith("16/8x128"))
    return [smallest, *(case for case in cases if case.head_dim == 256 and taken(case))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("name", "index"), [(name, index) for name in HEADS for index in range(len(real_cases(name)))])
@emulated()
def test_heads_of_128_and_256_need_no_relaxation(name: str, index: int, dtype: str) -> None:
    case = with_levels(real_cases(name)[index], ascend.LEVELS)
    compare(KERNELS[name], implementation(name), case, getattr(torch, dtype))


@pytest.mark.parametrize("name", sorted(OURS))
@emulated(relax=RELAX)
def test_call_does_not_wait_for_device(name: str) -> None:
    """During a call the host neither synchronizes nor copies from the device, so that the call can be captured."""
    case = with_levels(list(filter(taken, KERNELS[name].cases))[-1], ascend.LEVELS)
    made, dtype = implementation(name), KERNELS[name].dtypes[-1]
    args = made.adapt(case.make(torch.Generator().manual_seed(0), dtype))
    made.function(*args)  # the first call creates masks and tables
    torch.npu.synchronize()
    emulator.clear_calls()
    made.function(*args)
    names = [call.name for call in emulator.calls()]
    assert not [called for called in names if "Synchronize" in called or called == "aclrtMemcpy"]


@emulated(relax=RELAX)
def test_greedy_nan_ties_and_padding() -> None:
    nan, inf = torch.nan, torch.inf
    rows = [[nan, 1, 2, 9], [nan, nan, nan, 9], [-inf, nan, -inf, 9], [0, inf, inf, 9], [-inf, -5, 0, nan], [3] * 4]
    logits = torch.tensor(rows).to("npu")
    assert implementation("greedy").function(logits, 3).tolist() == [[2], [0], [0], [1], [2], [0]]


@emulated(relax=RELAX)
def test_sample_never_draws_filtered_tokens() -> None:
    """At both ends of the random numbers, in rows of which one or two tokens remain."""
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[nan, -inf, 0.5, -inf, 9.0], [1.0, 2.0, 0.0, -1.0, 9.0], [1.0, 2.0, 2.0, -1.0, 9.0]])
    logits = logits.repeat_interleave(2, 0).to("npu")
    uniform = torch.tensor([0.0, 1 - 2**-53] * 3, dtype=torch.float64).to("npu")
    ones = torch.ones(6).to("npu")
    top_k = torch.tensor([0, 0, 1, 1, 0, 0]).to("npu")
    top_p = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.5, 0.5]).to("npu")
    ids = implementation("sample").function(logits, 4, ones, top_k, top_p, torch.zeros(6).to("npu"), uniform)
    assert ids.flatten().tolist() == [2, 2, 1, 1, 1, 2]


@pytest.mark.parametrize("name", ["linear_argmax", "greedy"])
@emulated(relax=RELAX)
def test_padding_tokens_are_never_chosen(name: str) -> None:
    """With any numbers in the padding columns."""
    made = implementation(name)
    for case in KERNELS[name].cases:
        if not (case.benchmark or case.float8 or case.int4 % 8 or case.w4a8):
            case = with_levels(case, ascend.LEVELS)
            args = made.adapt(case.make(torch.Generator().manual_seed(1), torch.bfloat16))
            vocabulary = args[1] if name == "greedy" else args[3]
            assert int(made.function(*args).max()) < vocabulary


@emulated(relax=RELAX)
def test_sample_without_filters_does_not_sort() -> None:
    case = next(case for case in KERNELS["sample"].cases if "min_p 0.1" in case.name)
    args = implementation("sample").adapt(case.make(torch.Generator().manual_seed(0), torch.float32))
    expected = implementation("sample").function(*args).tolist()
    emulator.clear_calls()
    assert implementation("sample").function(*args[:-1], Filters.NONE).tolist() == expected
    assert not {"aclnnSort", "aclnnApplyTopKTopP"} & {call.name.partition("GetWorkspaceSize")[0]
                                                     for call in emulator.calls()}


@pytest.mark.parametrize("rows", [
    [(5, 0.8), (0, 1.0), (1, 1.0), (1024, 0.3)], [(0, 1.0), (0, 1.0), (40, 1.0), (7, 0.99)]],
    ids=["one of the largest top_k", "rows without filters"])
@emulated(relax=RELAX)
def test_sample_by_operator_equals_sample_by_sort(rows: list[tuple[int, float]]) -> None:
    """With 200 random numbers each. The operator gets no top_k above 1024, nor one that is off."""
    count, vocabulary = 200, 3000
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(rows), vocabulary, generator=generator).mul(3).repeat_interleave(count, 0)
    top_k, top_p = (torch.tensor(values).repeat_interleave(count) for values in zip(*rows, strict=True))
    uniform = torch.rand(len(logits), dtype=torch.float64, generator=generator)
    ones = torch.ones(len(logits))
    args = (logits, vocabulary, ones, top_k, top_p, 0 * ones, uniform)
    expected = KERNELS["sample"].golden(*args).flatten()
    on_device = [arg.to("npu") if isinstance(arg, torch.Tensor) else arg for arg in args]
    for filters in (Filters.SMALL_TOP_K, Filters.ANY):
        ids = implementation("sample").function(*on_device, filters).flatten().cpu()
        # A draw within the rounding of float32 sums may differ.
        assert (ids == expected).double().mean() > 0.99, filters


@emulated(relax=RELAX)
def test_sample_takes_the_first_of_equal_tokens() -> None:
    """Where the random number is 0, as for greedy rows of captured steps."""
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, 9.0]]).to("npu")
    ones, zeros = torch.ones(1).to("npu"), torch.zeros(1).to("npu")
    for filters in Filters:
        top_k = torch.tensor([4], dtype=torch.int32).to("npu")
        ids = implementation("sample").function(logits, 4, 1e-30 * ones, top_k, ones, zeros, zeros, filters)
        assert ids.tolist() == [[1]]


def test_chunk_bytes_hold_the_states_of_all_rows() -> None:
    """For Qwen3.5-27B: three copies of the states in bfloat16 and one in float32, or the convolution's inputs."""
    states = 48 * 128 * 128
    few, many = (ascend_delta.chunk_bytes(16, 48, 128, 128, rows, 512, 2) for rows in (1, 65))
    assert many - few == 64 * states * (3 * 2 + 4)
    assert ascend_delta.chunk_bytes(16, 48, 128, 128, 1, 8192, 2) == 4 * 8192 * 10240 * 6
