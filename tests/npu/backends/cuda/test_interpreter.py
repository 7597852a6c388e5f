"""Triton's interpreter finds its functions once for each module of kernels, makes the objects of a shape once, and
takes operands as they are where it can."""

from __future__ import annotations

import inspect
import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from npuserve.npu.backends.cuda.interpreter import quicken
from tests.kernels.triton import needs_triton

pytestmark = [pytest.mark.slow, needs_triton]


def test_functions_are_put_in_place_once() -> None:
    from npuserve.kernels.triton import launch_rows

    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
    quicken()
    quicken()
    first, _ = launch_rows.add_rms_norm(x, residual, weight, 1e-6)
    with mock.patch.object(inspect, "getmembers", side_effect=AssertionError("the language is searched again")):
        again, total = launch_rows.add_rms_norm(x, residual, weight, 1e-6)
    assert isinstance(again, torch.Tensor)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    torch.testing.assert_close(again, total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight)


def test_objects_of_a_shape_are_made_once() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    quicken()
    numbers, flags = tl.block_type(tl.float32, [tl.constexpr(4), 8]), tl.block_type(tl.int1, (4, 8))
    assert numbers.shape is flags.shape
    assert (list(numbers.shape), numbers.numel, numbers.element_ty) == ([4, 8], 32, tl.float32)
    assert numbers.name.endswith(", fp32>")
    assert numbers != flags
    assert numbers == tl.block_type(tl.float32, [4, 8])
    value, scalar = tl.tensor("handle", flags), tl.tensor("handle", tl.int64)
    assert ([size.value for size in value.shape], value.numel.value, value.dtype) == ([4, 8], 32, tl.int1)
    assert (list(scalar.shape), scalar.numel.value, scalar.dtype, scalar.type) == ([], 1, tl.int64, tl.int64)
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [3])
    with pytest.raises(TypeError, match="0d"):
        tl.block_type(tl.float32, [])
    pointers = tl.block_type(tl.pointer_type(tl.float32), [4])
    found = [interpreter._get_np_dtype(each).name for each in (flags, tl.bfloat16, pointers)]
    assert found == ["bool", "uint16", "uint64"]


def test_operands_are_those_of_triton() -> None:
    """Of each pair of types and shapes, as triton's own functions convert them, or with the same error."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    quicken()
    quick: Any = interpreter.interpreter_semantic
    original = type(quick)(quick.builder)

    def operands(semantic: Any, lhs: Any, rhs: Any, **options: bool) -> Any:
        try:
            converted = semantic.binary_op_type_checking_impl(lhs, rhs, **options)
        except Exception as error:
            return repr(error)
        return [(str(each.type), each.handle.dtype, each.handle.data.dtype, each.handle.data.tolist())
                for each in converted]

    types = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64,
             tl.pointer_type(tl.float32)]
    shapes: list[tuple[int, ...]] = [(), (4,), (1, 4), (2, 4), (2, 1)]
    values: list[Any] = [1, -1, 2.5]
    for dtype in types:
        for shape in shapes:
            data = np.ones(shape or 1, interpreter._get_np_dtype(dtype))
            handle = interpreter.TensorHandle(data, dtype)
            values.append(tl.tensor(handle, tl.block_type(dtype, shape) if shape else dtype))
    for lhs, rhs in itertools.product(values, repeat=2):
        for options in ({}, {"allow_lhs_ptr": True}, {"arithmetic_check": False}, {"div_or_mod": True}):
            assert operands(quick, lhs, rhs, **options) == operands(original, lhs, rhs, **options)
