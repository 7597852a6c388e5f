"""Variants part of the acceptance check on the CPU: dtypes, names and exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance import variants
from npuserve.cli.acceptance.reference import forced_logits, load_reference
from npuserve.cli.acceptance.report import Finding
from npuserve.cli.acceptance.variants import widen
from npuserve.npu import storyteller
from npuserve.npu.backends.base import DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend
from tests.cli.acceptance.running import built

W8A8 = "W8A8, int8 head"


def started() -> CpuBackend:
    return CpuBackend(settings=DeviceSettings(threads=1))


@pytest.mark.full
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
@pytest.mark.full
@pytest.mark.parametrize("place", [0, -1])
def test_variants_of_a_hybrid_pass_on_the_cpu(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """By default test_variants_of_experts_pass_on_the_cpu has a hybrid with experts."""
    monkeypatch.setattr(accept_tokens, "ANSWER", 16)
    monkeypatch.setattr(variants, "VARIANTS", (variants.VARIANTS[place],))
    found = {finding.name: finding for finding in variants.check_variants(started(), 1, hybrid=True)}
    assert [name for name, finding in found.items() if finding.passed is False] == []
    name = variants.VARIANTS[0].name
    assert {f"{name}: beside the CPU, float32", f"{name}: beside the CPU, bfloat16"} <= set(found)


def correlation_with_built_in_model(folder: Path) -> float:
    """Return the correlation of the logits of the model in `folder` with those of the built-in one."""
    ids = [[5, 300, 2047, 11, 42, 17, 900, 4, 250, 31]]

    def logits(model: Path) -> torch.Tensor:
        reference = load_reference(model, CpuBackend(native=False), "float32", 64, 1)
        return next(iter(forced_logits(*reference, ids, 64))).flatten()

    return float(torch.corrcoef(torch.stack([logits(storyteller.FOLDER), logits(folder)]))[0, 1])


def test_hybrid_of_the_built_in_model_says_about_the_same(tmp_path: Path) -> None:
    """Its layers of linear attention change the logits a little; the others are those of the built-in model."""
    variants.write_hybrid(storyteller.FOLDER, tmp_path / "hybrid")
    assert 0.5 < correlation_with_built_in_model(tmp_path / "hybrid") < 0.999


@built
@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [
    pytest.param(False, id="Qwen3Moe", marks=pytest.mark.full), pytest.param(True, id="Qwen3.5")])
def test_variants_of_experts_pass_on_the_cpu(monkeypatch: pytest.MonkeyPatch, hybrid: bool) -> None:
    prompts_of = accept_tokens.prompts_of
    monkeypatch.setattr(accept_tokens, "ANSWER", 12)
    monkeypatch.setattr(accept_tokens, "prompts_of", lambda *args: prompts_of(*args)[1:5])
    monkeypatch.setattr(variants, "VARIANTS", variants.VARIANTS[:1])
    found = {finding.name: finding for finding in variants.check_variants(started(), 1, hybrid=hybrid, experts=True)}
    assert [name for name, finding in found.items() if finding.passed is False] == []
    assert {f"{W8A8}: beside the CPU, float32", f"{W8A8}: beside the CPU, bfloat16"} <= set(found)


@pytest.mark.slow
def test_mixture_of_the_built_in_model_says_about_the_same(tmp_path: Path) -> None:
    """Its experts differ from the dense MLP, and so do its logits, a little."""
    variants.write_mixture(storyteller.FOLDER, tmp_path / "experts")
    assert 0.5 < correlation_with_built_in_model(tmp_path / "experts") < 0.999


@built
@pytest.mark.full
def test_int8_cache_passes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in float32, where sums in another order round keys and values to other numbers, and so change tokens."""
    monkeypatch.setattr(variants, "VARIANTS", variants.VARIANTS[-1:])
    found = list(variants.check_variants(started(), 1))
    assert [finding.name for finding in found if finding.passed is False] == []
    assert {"int8 KV: beside the CPU, float32", "int8 KV: beside the CPU, bfloat16"} <= {x.name for x in found}


@pytest.mark.slow
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


def test_wide_model_has_the_argmax_of_the_small_one(tmp_path: Path) -> None:
    widen(storyteller.FOLDER, tmp_path / "wide", 10_000)
    prompts = [[5, 300, 2047, 11, 42], [17, 900, 4]]
    small, wide = (
        torch.cat(list(forced_logits(*load_reference(folder, CpuBackend(native=False), "float32", 256, 1), ids, 64)))
        for folder, ids in ((storyteller.FOLDER, prompts),
                            (tmp_path / "wide", [[4 * token for token in prompt] for prompt in prompts])))
    assert wide.shape == (8, 10_000)
    assert torch.equal(wide.argmax(-1), 4 * small.argmax(-1))
    torch.testing.assert_close(wide[:, : 4 * 2048 : 4], small, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(wide[:, 1 : 4 * 2048 : 4], small / 2, atol=1e-4, rtol=1e-4)


def test_fewer_ids_than_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary: 2000 is less than the 2048 ids of the model"):
        widen(storyteller.FOLDER, tmp_path / "wide", 2000)
