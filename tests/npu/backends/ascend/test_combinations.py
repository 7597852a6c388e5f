"""Formats of weights and cache with kinds of requests on the emulated Ascend device: tokens equal the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npuserve.kernels import ascend
from npuserve.npu.model.config import ModelError
from npuserve.npu.step import SamplingParams
from tests.npu.backends.ascend.test_backend import RELAX, load
from tests.npu.backends.ascend.test_int8_cache import golden
from tests.npu.backends.small import Ask, answers, asks, masked, saved, saved_w8a8
from tests.npu.emulator.child import emulated

HEAD, CACHE = {"lm_head_dtype": "int8"}, {"kv_cache_dtype": "int8"}
MODELS: dict[str, tuple[bool, dict[str, str]]] = {
    "float": (False, {}), "w8a8": (True, {}), "w8a8, int8 head": (True, HEAD), "int8 cache": (False, CACHE),
    "w8a8, int8 cache": (True, CACHE), "w8a8, int8 head and cache": (True, HEAD | CACHE)}
"""Name -> W8A8, and settings."""
SAMPLED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
PENALIZED = {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1}
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}], "sampled": [SAMPLED], "penalized": [PENALIZED], "mixed": [{}, SAMPLED, PENALIZED],
    "constrained": [{}, SAMPLED, PENALIZED]}
"""Name -> sampling of the requests in turn."""
DEFAULT = [("w8a8", "mixed"), ("w8a8, int8 head and cache", "penalized"), ("int8 cache", "constrained")]
"""Combinations of the default run. Others are in test_backend.py, test_int8.py and test_int8_cache.py."""


def requests(kind: str) -> list[Ask]:
    made = asks(6, 8)
    for index, ask in enumerate(made):
        ask.sampling = SamplingParams(seed=index, **{
            "temperature": 0.0, **REQUESTS[kind][index % len(REQUESTS[kind])]})
        ask.mask = masked(index) if kind == "constrained" and index % 3 else None
    return made


@pytest.mark.parametrize(("model", "kind"), [
    pytest.param(model, kind, marks=[] if (model, kind) in DEFAULT else pytest.mark.full, id=f"{model}, {kind}")
    for model in MODELS for kind in REQUESTS])
@emulated(relax=RELAX, poison=True)
def test_ascend_tokens_of_combination_equal_cpu(tmp_path: Path, model: str, kind: str) -> None:
    """Prompts arrive in chunks beside decode rows. The CPU has the device's int8 levels and scales.

    An activation halfway between two int8 levels may be rounded to the other one there, which changes the logits by up
    to 0.06 here. That can move a draw, about one in a hundred, so two of the six answers of sampled rows may differ.
    """
    w8a8, settings = MODELS[model]
    folder = (saved_w8a8 if w8a8 else saved)(tmp_path)
    npu = load(folder, decode_buckets=(2, 4), **settings)
    assert npu.fallbacks == []
    got, results = answers(npu, requests(kind))
    cpu = {"int8_levels": ascend.LEVELS, **settings}
    reference = golden(folder, **cpu) if "kv_cache_dtype" in settings else load(
        folder, "cpu", block_size=128, threads=1, **cpu)
    expected = answers(reference, requests(kind))[0]
    if (w8a8 or settings) and kind != "greedy":
        assert sum(a == b for a, b in zip(got, expected, strict=True)) >= len(got) - 2
    else:
        assert got == expected
    assert sum(result.captured_decodes + result.decoder_decodes for result in results) > 8
    if kind != "constrained" and "kv_cache_dtype" not in settings:
        assert all(result.captured for result in results)
        assert not any(result.decoder_decodes for result in results)


@emulated(relax=RELAX)
def test_ascend_other_blocks_are_refused(tmp_path: Path) -> None:
    """With TND and page attention blockSize is at most 128 (aclnnFusedInferAttentionScoreV3.md)."""
    saved(tmp_path)
    for size in (64, 256, 1024):
        with pytest.raises(ModelError, match=rf"block_size: {size} is not possible here; possible is 128$"):
            load(tmp_path, block_size=size)
