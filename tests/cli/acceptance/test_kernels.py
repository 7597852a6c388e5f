"""Kernels part of the acceptance check on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from npuserve.cli.acceptance import kernels
from npuserve.cli.acceptance.report import Finding
from npuserve.kernels.registry import KERNELS, Implementation
from npuserve.npu.backends.base import BackendError
from npuserve.npu.backends.cpu import CpuBackend
from tests.cli.acceptance.running import built

pytestmark = pytest.mark.usefixtures("small")


def check_changed(monkeypatch: pytest.MonkeyPatch, function: Any, name: str = "swiglu") -> Finding:
    kernel = KERNELS[name]
    right = kernel.implementations["cpu"]
    wrong = Implementation(function(right.function), right.adapt, right.restore)
    monkeypatch.setitem(kernel.implementations, "cpu", wrong)
    return kernels.check_kernel(kernel, torch.float32, CpuBackend())


@built
@pytest.mark.parametrize("wrong", [lambda x: x + 1e-3, lambda x: x.index_fill(0, torch.tensor([0]), torch.nan)])
def test_check_kernel_wrong_or_nan_results_fail(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_changed(monkeypatch, lambda right: lambda x: wrong(right(x)))
    assert found.passed is False
    assert found.figures["wrong"] == [c.name for c in KERNELS["swiglu"].cases if not c.benchmark]
    assert "compare the versions" in found.advice


@built
def test_check_kernel_other_ids_than_golden_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_changed(monkeypatch, lambda right: lambda logits, vocabulary: right(logits, vocabulary) ^ 1, "greedy")
    assert found.passed is False
    assert found.figures["other_ids"] > found.figures["golden_other_ids"] == 0


@built
def test_check_kernel_exception_fails_only_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("aclnnSwiGlu failed, error code is 161002\nand more")

    found = check_changed(monkeypatch, lambda right: refuse)
    assert (found.passed, found.figures["fault"]) == (False, "engine")
    assert found.said.endswith(": RuntimeError: aclnnSwiGlu failed, error code is 161002")
    assert "and more" in found.figures["traceback"]


def test_check_kernel_unsupported_heads_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_128(self: CpuBackend, head_dim: int) -> None:
        if head_dim != 128:
            raise BackendError("device: no such heads")

    monkeypatch.setattr(CpuBackend, "check_heads", only_128)
    backend = CpuBackend(native=False)
    for name in ("paged_attention", "qk_norm_rope_kv_write"):
        assert kernels.check_kernel(KERNELS[name], torch.float32, backend).figures["cases"] == 2  # one of them of int8
    monkeypatch.setattr(KERNELS["paged_attention"], "cases", KERNELS["paged_attention"].cases[:2])
    none = kernels.check_kernel(KERNELS["paged_attention"], torch.float32, backend)
    assert (none.passed, none.figures["cases"]) == (False, 0)


@pytest.mark.parametrize("device", [{"int8_zeros": True}, {"int8_zeros": False, "int8_levels": 127.0}])
def test_supported_cases_int8_has_levels_of_the_device(device: dict[str, Any]) -> None:
    backend = CpuBackend(native=False, capabilities=replace(CpuBackend.capabilities, **device))
    cases = list(kernels.supported_cases(KERNELS["quantize"], backend, benchmark=False))
    schemes = [case.make(torch.Generator(), torch.float32)[1] for case in cases]
    assert {scheme.levels for scheme in schemes} == {device.get("int8_levels", 127.5)}
    assert any(scheme.has_zero for scheme in schemes) == device["int8_zeros"]
    assert any(scheme.scale is None for scheme in schemes)
