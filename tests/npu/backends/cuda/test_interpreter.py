"""Triton's interpreter finds its functions once for each module of kernels."""

from __future__ import annotations

import inspect
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
