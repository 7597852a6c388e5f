"""Launches of a layer in captured steps on the emulated Ascend device."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from npuserve.kernels.sample import Filters
from npuserve.npu.backends.ascend.backend import AscendBackend
from npuserve.npu.backends.ascend.triton_check import agrees
from npuserve.npu.backends.base import Captured
from npuserve.npu.emulator import fused_heads
from tests.npu.backends.ascend.test_backend import load, started
from tests.npu.backends.small import answers, asks, saved, saved_w8a8
from tests.npu.emulator.child import emulated, needs_npu, run
from tests.support.benches import bench

EVENT = Counter({"aclrtValueWait": 1, "aclrtValueWrite": 1})
"""Wait for the lengths of attention, and reset of the event."""
BF16 = Counter({"aclnnMatmul": 4, "aclnnFusedInferAttentionScoreV3": 1, "aclnnAddRmsNorm": 2, "aclnnSwiGlu": 1}) + EVENT
W8A8 = Counter({"aclnnQuantMatmulWeightNz": 4, "aclnnFusedInferAttentionScoreV3": 1, "aclnnDynamicQuantV2": 2,
                "aclnnAddRmsNormDynamicQuantV2": 2, "aclnnSwiGlu": 1}) + EVENT
ONE_TOKEN = Counter({"aclnnRmsNorm": 2, "aclnnRopeWithSinCosCacheV2": 1, "aclnnScatterPaKvCache": 1})
OPERATORS = ONE_TOKEN + Counter({"aclnnInplaceCopy": 1})  # of the values
TRITON = Counter({"qk_norm_rope_kv_write_kernel": 1})


def nodes(captured: Captured | None, size: int, file: Path) -> Counter[str]:
    """Return the tasks of the graph of this size by name."""
    graph = captured._graphs[size].graph  # type: ignore[union-attr]
    graph.debug_dump(str(file))
    return Counter(node["name"] for node in json.loads(file.read_text()))


KINDS = ("1", "4", "chunk")
"""Captured steps: decode rows, or a chunk of a prompt."""


def layer(folder: Path, w8a8: bool) -> dict[str, Counter[str]]:
    """Return the tasks of one layer for each of KINDS: the tasks of a model of two layers less the tasks of a model of
    one."""
    found = []
    for layers in (2, 1):
        # Rows of 160 numbers after gate and up are not fused with quantization, as in Qwen3 from 1.7B on.
        sizes: dict[str, Any] = {"head_dim": 128, "layers": layers, "inner": 80}
        model = saved_w8a8(folder / str(layers), **sizes) if w8a8 else saved(folder / str(layers), **sizes)
        dispatch = load(model, dtype="bfloat16", decode_buckets=(1, 4))._dispatch
        found.append({kind: nodes(dispatch.chunks.hidden, 64, folder / "graph.json") if kind == "chunk" else
                      nodes(dispatch.decodes.argmax, int(kind), folder / "graph.json") for kind in KINDS})
    two, one = found
    return {kind: two[kind] - one[kind] for kind in KINDS}


def check(folder: Path, w8a8: bool, expected: dict[str, Counter[str]]) -> None:
    assert layer(folder, w8a8) == expected


@needs_npu
@pytest.mark.parametrize("w8a8", [False, True], ids=["bf16", "w8a8"])
@pytest.mark.parametrize("triton", [False, True], ids=["operators", "triton"])
def test_ascend_launches_of_a_layer(tmp_path: Path, triton: bool, w8a8: bool) -> None:
    """Beside the two tasks of the event: 12 in bfloat16 and 9 with Triton, of which at most 10 are wanted."""
    expected = {kind: (W8A8 if w8a8 else BF16) + (TRITON if triton else ONE_TOKEN if kind == "1" else OPERATORS)
                for kind in KINDS}
    for kind, tasks in expected.items():
        assert tasks.total() - EVENT.total() == (
            (11 if w8a8 else 9) if triton else (14 if w8a8 else 12) + (kind != "1"))
    run(check, {"folder": tmp_path, "w8a8": w8a8, "expected": expected}, {"triton": triton})


@emulated()
def test_ascend_graphs_and_operators_are_those_of_the_roofline(tmp_path: Path) -> None:
    """Design A of docs/ascend-roofline.md: for each bucket of rows or tokens a graph with argmax, and one with the
    sampler for each of the filters."""
    roofline = bench("kernels.roofline")
    built = roofline.DESIGNS[0]
    dispatch = load(saved(tmp_path), dtype="bfloat16", decode_buckets=(1,))._dispatch
    kinds = (dispatch.decodes.argmax, dispatch.decodes.sampled), (dispatch.chunks.argmax, dispatch.chunks.sampled)
    assert (built.of_rows, built.of_tokens) == tuple(1 + len(sampled) for _, sampled in kinds)
    assert built.samplers == tuple(len(sampled) for _, sampled in kinds)
    assert (built.heads, built.replays) == (0, (1, 1, 1, 1))
    assert (dispatch.decodes.hidden, dispatch.chunks.hidden) == tuple(greedy for greedy, _ in kinds)
    filter_of = {Filters.NONE: "", Filters.SMALL_TOP_K: "aclnnApplyTopKTopP", Filters.ANY: "aclnnSort"}
    for (greedy, each_sampled), size in zip(kinds, (1, 64), strict=True):
        argmax = nodes(greedy, size, tmp_path / "graph.json")
        assert (argmax["aclnnAmax"], argmax["aclnnAmin"], argmax["aclnnArgMax"]) == (1, 1, 0)
        for filters, captured in each_sampled.items():
            sampled = nodes(captured, size, tmp_path / "graph.json")
            others = {*filter_of.values()} - {"", filter_of[filters]}
            assert not others & sampled.keys()
            assert not filter_of[filters] or sampled[filter_of[filters]] == 1
            launches = sampled.total() - argmax.total() + roofline.ARGMAX_LAUNCHES
            assert launches == roofline.SAMPLER_LAUNCHES[filters.name], (filters, launches)


@emulated(relax=("fp32",), triton=True)
def test_ascend_tokens_with_triton_equal_cpu(tmp_path: Path) -> None:
    """Captured decode steps and chunks, whose kernel writes keys and values to the cache."""
    saved(tmp_path, head_dim=128)
    got, results = answers(load(tmp_path), asks(5, 8))
    expected, _ = answers(load(tmp_path, "cpu", block_size=128, threads=1), asks(5, 8))
    assert got == expected
    assert sum(result.captured_decodes for result in results) > 0


@emulated()
def test_triton_kernel_is_compared_with_operators() -> None:
    """The stand-in agrees with the operators; a kernel that forgets to rotate keys does not."""
    device = started().device
    assert agrees(fused_heads.launch, device)

    def unrotated(*args: Any) -> Any:
        qkv, q_gamma, k_gamma, eps, table, positions, *rest = args
        return fused_heads.launch(qkv, q_gamma, k_gamma, eps, table, positions * 0, *rest)

    assert not agrees(unrotated, device)


@pytest.mark.parametrize("fails", [False, True], ids=["differs", "fails"])
@emulated()
def test_unfit_triton_kernel_is_not_used(fails: bool) -> None:
    """triton-ascend is installed, and its kernel cannot be compiled, or gives other results."""
    launch = ModuleType("launch_ascend")
    launch.qk_norm_rope_kv_write = (  # type: ignore[attr-defined]
        None if fails else lambda qkv, *args: fused_heads.launch(qkv * 2 + 1, *args))
    backend = started()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: True)
        patch.setitem(sys.modules, "npuserve.kernels.triton.launch_ascend", launch)
        patch.setattr("npuserve.kernels.triton.launch_ascend", launch, raising=False)
        assert AscendBackend.fused_heads(backend) is None
        launch.qk_norm_rope_kv_write = fused_heads.launch  # type: ignore[attr-defined]
        assert AscendBackend.fused_heads(backend) is fused_heads.launch
