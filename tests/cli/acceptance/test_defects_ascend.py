"""Each check of the acceptance check on an emulated NPU fails if the device has the defect that it is for.

test_accept_ascend.py shows that all of them pass without a defect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest import mock

import pytest

from npuserve.cli.acceptance import kernels, model, reference, replays, sampling, variants
from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance.kernels import check_sizes
from npuserve.cli.acceptance.reference import Loaded
from npuserve.cli.acceptance.replays import check_contexts, check_soak, crossing
from npuserve.cli.acceptance.report import Finding
from npuserve.cli.acceptance.sampling import check_sampling
from npuserve.cli.acceptance.variants import check_variants
from npuserve.npu import emulator, storyteller
from npuserve.npu.backends import select
from npuserve.npu.backends.base import Backend, DeviceSettings
from tests.cli.acceptance.running import few_tokens, narrow_lm_heads
from tests.npu.emulator.child import emulated

RELAX = ("fp32", "small_heads")


def started() -> Backend:
    return select("npu", RELAX, DeviceSettings(decode_buckets=(8,)))


def story(backend: Backend, dtype: str = "bfloat16") -> Loaded:
    return reference.load(storyteller.FOLDER, backend, dtype, max_model_len=384, max_num_seqs=32,
                           max_num_batched_tokens=64)


def only(name: str) -> AbstractContextManager[object]:
    """Leave one parameter of the part sampling."""
    return mock.patch.multiple(sampling, CAPTURED={name: sampling.CAPTURED[name]}, OUTSIDE={})


def failed(found: Iterator[Finding]) -> list[str]:
    made = list(found)
    assert made
    assert all(finding.passed is not None for finding in made)
    return [finding.name for finding in made if not finding.passed]


@emulated(relax=RELAX)
def test_contexts_fail_with_an_unsplit_context() -> None:
    loaded = story(started())
    with mock.patch.object(replays, "BATCHES", (1, 2)), emulator.defects("context_split"):
        assert failed(check_contexts(loaded, quick=True)) == [
            f"{crossed}, batch {rows}" for rows in (1, 2) for crossed in ("1,000 to 1,100", "12,000 to 13,000")]


@emulated(relax=RELAX)
def test_contexts_name_the_first_wrong_context() -> None:
    """Below 1,024 tokens the device is right."""
    loaded = story(started())
    with mock.patch.object(replays, "BATCHES", (1,)), emulator.defects("context_split"):
        with mock.patch.object(replays, "CROSSINGS", ((1000, 1023),)):
            assert failed(check_contexts(loaded, quick=True)) == []
        with mock.patch.object(replays, "CROSSINGS", ((1020, 1024),)):
            finding = next(check_contexts(loaded, quick=False))
    assert (finding.passed, finding.figures["context"], finding.figures["contexts"]) == (False, 1024, 5)
    assert "at 1,024" in finding.said


def test_crossing_contains_each_context_or_ends_and_splits() -> None:
    assert crossing(1000, 1100, quick=False) == list(range(1000, 1101))
    assert crossing(1000, 1100, quick=True) == [1000, 1023, 1024, 1025, 1050, 1075, 1100]
    assert crossing(12_000, 13_000, quick=True) == [12_000, 12_250, 12_500, 12_750, 13_000]


@emulated(relax=RELAX)
def test_soak_fails_with_lost_updates() -> None:
    loaded = story(started())
    with emulator.defects("lost_update"):
        finding = next(check_soak(loaded, 0.02))
    assert not finding.passed
    assert 0 < finding.figures["wrong"] < finding.figures["replays"]
    assert 0 <= finding.figures["first_wrong"] < finding.figures["replays"]
    assert len(finding.figures["contexts"]) == replays.SOAK_ROWS
    assert f"first replay {finding.figures['first_wrong']} with contexts" in finding.said


@emulated(relax=RELAX)
def test_soak_of_0_minutes_is_no_finding() -> None:
    assert list(check_soak(story(started()), 0.0)) == []


SIZED = {
    "wide_product": ("LM head of 151,936 ids", ["linear_argmax"]),
    "wide_int8_product": ("int8 LM head of 151,936 ids", ["linear_argmax"]),
    "row_scales": ("W8A8 layers", ["quantize"]),
    "antiquant_heads": ("int8 KV cache", ["paged_attention"]),
    "top_k": ("sampling of 151,936 ids", ["sample"]),
}


@pytest.mark.parametrize("defect", [
    "row_scales", "top_k",
    *(pytest.param(defect, marks=pytest.mark.full) for defect in SIZED if defect not in ("row_scales", "top_k"))])
@emulated(relax=RELAX)
def test_sizes_fail_with_each_defect(defect: str) -> None:
    backend, (name, failing) = started(), SIZED[defect]
    size = next(size for size in kernels.SIZES if size.name == name)
    if defect == "top_k":
        size = replace(size, kernels=("sample",), wanted=lambda name: "top_k 20" in name)
    with narrow_lm_heads(), mock.patch.object(kernels, "SIZES", (size,)), emulator.defects(defect):
        assert failed(check_sizes(backend, quick=True)) == [f"{name}, {kernel}" for kernel in failing]


@emulated(relax=RELAX)
def test_sampling_fails_where_the_device_ignores_top_k() -> None:
    backend = started()
    loaded = story(backend, "float32")
    golden = reference.load_reference(storyteller.FOLDER, backend, "float32", 384, 1)
    prompts = accept_tokens.prompts_of(storyteller.FOLDER, loaded.runner.config.vocab_size, 64)
    with emulator.defects("top_k"), only("top_k"):
        assert "top_k, captured, float32" in failed(check_sampling(loaded, golden, prompts, storyteller.FOLDER))


@emulated(relax=RELAX)
def test_sampling_fails_if_the_sampler_is_not_captured() -> None:
    backend = select("npu", RELAX, DeviceSettings(decode_buckets=(1,), capture_chunks=False))
    loaded = story(backend, "float32")
    golden = reference.load_reference(storyteller.FOLDER, backend, "float32", 384, 1)
    prompts = accept_tokens.prompts_of(storyteller.FOLDER, loaded.runner.config.vocab_size, 64)
    with only("temperature"):
        assert failed(check_sampling(loaded, golden, prompts, storyteller.FOLDER)) == ["captured steps, float32"]


@pytest.mark.full
@emulated(relax=RELAX)
def test_sampling_fails_if_a_parameter_is_ignored() -> None:
    """The device gets each request with its temperature and seed alone, or its seed alone, and the CPU the request."""
    from npuserve.npu.step import SamplingParams

    backend = started()
    loaded = story(backend, "float32")
    golden = reference.load_reference(storyteller.FOLDER, backend, "float32", 384, 1)
    prompts = accept_tokens.prompts_of(storyteller.FOLDER, loaded.runner.config.vocab_size, 64)
    answers = accept_tokens.answers

    def ignoring(runner: object, given: object, count: int, depth: int, asked: list[SamplingParams]) -> object:
        plain = [SamplingParams(seed=x.seed, temperature=x.temperature) for x in asked]
        ignored = [SamplingParams(seed=x.seed) if x == y else y for x, y in zip(asked, plain, strict=True)]
        return answers(runner, given, count, depth, ignored)  # type: ignore[arg-type]

    with mock.patch.object(accept_tokens, "answers", ignoring):
        found = failed(check_sampling(loaded, golden, prompts, storyteller.FOLDER))
    assert [name.split(",")[0] for name in found] == [*sampling.CAPTURED, *sampling.OUTSIDE, "min_tokens"]


@pytest.mark.full
@pytest.mark.parametrize(("name", "defect"), [
    ("W8A8, int8 head", "shifted_columns"), ("head of 151,936", "wide_product"), ("int8 KV", "antiquant_heads"),
    ("W8A8, int8 head", "row_scales"), ("W8A8, int8 head", "column_scales"),
    ("W8A8, int8 head of 151,936", "wide_int8_product"), ("W8A8, int8 head of 151,936", "column_scales")])
@emulated(relax=RELAX)
def test_variants_fail_with_int8_defects(name: str, defect: str) -> None:
    backend = started()
    chosen = next(variant for variant in variants.VARIANTS if variant.name == name)
    # The cache is read only by decode rows, of which the defect needs many.
    tokens = mock.patch.object(accept_tokens, "ANSWER", 24) if name == "int8 KV" else few_tokens()
    with mock.patch.object(variants, "VARIANTS", (chosen,)), tokens, emulator.defects(defect):
        found = failed(check_variants(backend, 1))
    assert {f"{name}: beside the CPU, {dtype}" for dtype in ("float32", "bfloat16")} <= set(found)


@pytest.mark.full
@emulated()
def test_variants_fail_with_rows_of_other_experts() -> None:
    name = "W8A8, int8 head"
    chosen = next(variant for variant in variants.VARIANTS if variant.name == name)
    backend = select("npu", settings=DeviceSettings(decode_buckets=(8,)))
    with mock.patch.object(variants, "VARIANTS", (chosen,)), few_tokens(), emulator.defects("expert_places"):
        assert f"{name}: beside the CPU, bfloat16" in failed(check_variants(backend, 1, experts=True))


@pytest.mark.slow
@emulated(relax=RELAX)
def test_variants_fail_in_float32_with_one_wrong_column() -> None:
    """No answer has this id."""
    backend, name = started(), "W8A8, int8 head"
    chosen = next(variant for variant in variants.VARIANTS if variant.name == name)
    with mock.patch.object(variants, "VARIANTS", (chosen,)), few_tokens(), emulator.defects("wrong_column"):
        finding = next(check_variants(backend, 1))
    assert (finding.name, finding.passed) == (f"{name}: beside the CPU, float32", False)
    assert finding.figures["equal_tokens"] == 1.0
    assert finding.figures["largest_logit_difference"] > model.MAX_FOLLOWED_DIFFERENCE


@emulated(relax=RELAX)
def test_unknown_defect_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"unknown defects typo; there are .*lost_update"),
        emulator.defects("typo"),
    ):
        pass
