"""Variants part of the acceptance check on the CPU: dtypes, names and exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance import variants
from npuserve.cli.acceptance.report import Finding
from npuserve.npu.backends.cpu import CpuBackend
from tests.cli.acceptance.running import built

W8A8 = "W8A8, int8 head"


def started() -> CpuBackend:
    backend = CpuBackend()
    backend.set_threads(1)
    return backend


@built
def test_variants_pass_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native kernels beside golden functions, with 127.5 levels."""
    monkeypatch.setattr(accept_tokens, "ANSWER", 24)
    monkeypatch.setattr(variants, "VARIANTS", variants.VARIANTS[:1])
    found = {finding.name: finding for finding in variants.check_variants(started(), 1)}
    assert [name for name, finding in found.items() if finding.passed is False] == []
    exact = found[f"{W8A8}: beside the CPU, float32"].figures
    assert (exact["equal_tokens"], exact["equal_argmax"], exact["int8_others"]) == (1.0, 1.0, 0)
    assert exact["int8_numbers"] > 10**6
    assert f"{W8A8}: beside the CPU, bfloat16" in found


@built
def test_int8_cache_passes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in float32, where sums in another order round keys and values to other numbers, and so change tokens."""
    monkeypatch.setattr(variants, "VARIANTS", variants.VARIANTS[-1:])
    found = list(variants.check_variants(started(), 1))
    assert [finding.name for finding in found if finding.passed is False] == []
    assert {"int8 KV: beside the CPU, float32", "int8 KV: beside the CPU, bfloat16"} <= {x.name for x in found}


def test_exception_names_the_variant_and_the_others_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(loaded: Any, *_: Any) -> Iterator[Finding]:
        if loaded.runner.dtype_name == "float32":
            raise RuntimeError("no such operator")
        yield Finding("tokens", "it", "", True)

    monkeypatch.setattr(variants, "check_tokens", broken)
    monkeypatch.setattr(variants, "VARIANTS", (variants.VARIANTS[0], variants.VARIANTS[-1]))
    found = [(finding.part, finding.name, finding.passed) for finding in variants.check_variants(started(), 1)]
    assert found == [
        ("variants", f"{W8A8}, float32: error", False), ("variants", f"{W8A8}: it", True),
        ("variants", "int8 KV, float32: error", False), ("variants", "int8 KV: it", True)]
