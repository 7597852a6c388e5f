"""Mixtures of experts on the emulated Ascend device: tokens equal the CPU's, by the grouped operators."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npuserve.kernels.ascend_int4 import refusal
from npuserve.kernels.int4 import Grouping
from npuserve.kernels.int4_weight import Int4Weight
from npuserve.kernels.weight import WeightForm, form_of
from npuserve.npu import emulator
from npuserve.npu.backends.base import BackendError
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.layers.experts import Experts
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.quantize.rounding import Int4Rounding, Int8Rounding
from npuserve.npu.step import PENDING, NewRequest, Row, SamplingParams, Step
from tests.npu.backends.ascend.test_backend import RELAX, load, started
from tests.npu.backends.ascend.test_hybrid import MEMORY, on_cpu, tokens_of_continued_slots
from tests.npu.backends.ascend.test_launches import EVENT, KINDS, nodes
from tests.npu.backends.ascend.test_ranks import SMALL_BUFFER, from_first, loaded, of_one_device, share
from tests.npu.backends.mixture import ARCHITECTURES, Family, saved_mixture
from tests.npu.backends.small import GREEDY, answers, asks, ids_of, sampled_asks, saved
from tests.npu.emulator.child import emulated, needs_npu, run
from tests.npu.emulator.ranks import Place, on_ranks
from tests.support import loop
from tests.support.benches import bench
from tests.support.int4_checkpoints import to_int4
from tests.support.oracle_drafts import drafting_of


def equal_to_the_cpu(folder: Path, capture_chunks: bool = True, **sizes: Any) -> None:
    saved_mixture(folder, **sizes)
    npu = load(folder, decode_buckets=(2, 4), capture_chunks=capture_chunks, **MEMORY)
    assert npu.fallbacks == []
    got, results = answers(npu, asks(6, 8))
    expected, _ = answers(on_cpu(folder), asks(6, 8))
    assert got == expected
    assert {result.captured for result in results} == ({True} if capture_chunks else {True, False})


@needs_npu
@pytest.mark.parametrize("capture_chunks", [True, False], ids=["one dispatch", "decode rows and chunks"])
@pytest.mark.parametrize(("order", "seed"), [
    ("lazy", 0), ("shuffled", 1), pytest.param("eager", 0, marks=pytest.mark.full)])
def test_mixture_tokens_equal_cpu(tmp_path: Path, order: str, seed: int, capture_chunks: bool) -> None:
    """Rows that pad a captured step choose experts, too."""
    options = {"relax": RELAX, "order": order, "seed": seed, "poison": True}
    run(equal_to_the_cpu, {"folder": tmp_path, "capture_chunks": capture_chunks}, options)


# Configurations


def configuration(seed: int) -> dict[str, Any]:
    """Return the sizes of a random mixture."""
    draw = random.Random(seed)
    family = ("qwen3", "qwen3_5", "qwen3_next")[seed % 3]
    layers, experts = draw.choice([2, 3]), draw.choice([4, 8, 16, 60, 128])
    sizes: dict[str, Any] = {
        "family": family, "layers": layers, "experts": experts, "top_k": draw.randint(1, min(8, experts)),
        "width": draw.choice([16, 32, 48]), "seed": seed}
    if family != "qwen3":
        full = (layers - 1,) if draw.random() < 0.7 else (0, layers - 1)
        sizes |= {"shared": draw.choice([32, 48]), "full": full, "head_dim": draw.choice([64, 128])}
    if family != "qwen3_5":
        sizes |= {"renormalize": draw.random() < 0.5, "dense": draw.choice([(), (), (0,), (layers - 1,)])}
    return sizes


@pytest.mark.parametrize("seed", [
    pytest.param(seed, marks=[] if seed in (1, 2) else pytest.mark.full) for seed in range(24)])
@emulated(relax=RELAX, poison=True)
def test_mixture_configuration_equals_cpu(tmp_path: Path, seed: int) -> None:
    """In float32, except for the operators of linear attention, whose near ties may fall the other way."""
    sizes = configuration(seed)
    saved_mixture(tmp_path, **sizes)
    npu = load(tmp_path, decode_buckets=(2, 4), **MEMORY)
    assert npu.fallbacks == []
    got, results = answers(npu, asks(4, 6))
    expected, _ = answers(on_cpu(tmp_path), asks(4, 6))
    equal = sum(one == other for one, other in zip(got, expected, strict=True))
    assert equal == 4 or (sizes["family"] != "qwen3" and equal == 3), sizes
    assert all(result.captured for result in results)


@emulated(relax=RELAX)
def test_mixture_counts_the_tokens_of_each_expert(tmp_path: Path) -> None:
    """As the CPU counts them, without captured steps, whose padding counts, too."""
    saved_mixture(tmp_path, layers=3, dense=(1,))
    counted = []
    for runner in (load(tmp_path, capture="off", **MEMORY), on_cpu(tmp_path)):
        before = [tokens.cpu().clone() for tokens in runner._store.counters]
        answers(runner, asks(3, 5))
        counted.append([torch.sub(tokens.cpu(), at_load).tolist()
                        for tokens, at_load in zip(runner._store.counters, before, strict=True)])
    assert counted[0] == counted[1]
    assert len(counted[0]) == 2
    captured = load(tmp_path, **MEMORY)
    before = [int(tokens.sum()) for tokens in captured._store.counters]
    answers(captured, asks(3, 5))
    for tokens, at_load, without in zip(captured._store.counters, before, counted[0], strict=True):
        assert int(tokens.sum()) - at_load >= sum(without)


# Refusals


@needs_npu
@pytest.mark.full
def test_mixture_without_an_operator_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMULATED_CANN_WITHOUT", "aclnnMoeInitRoutingV3")
        run(refused_without_operator, {"folder": tmp_path}, {"relax": RELAX}, fresh=True)


def refused_without_operator(folder: Path) -> None:
    with pytest.raises(BackendError, match="CANN lacks aclnnMoeInitRoutingV3, which mixtures of experts call"):
        load(saved_mixture(folder / "experts"), **MEMORY)
    load(saved(folder / "dense"), **MEMORY)


@emulated()
def test_mixture_with_more_experts_than_the_operators_take_is_refused() -> None:
    backend = started()
    backend.check_experts(1024, 8)
    with pytest.raises(BackendError, match="the model has 1025 experts on a rank; npu takes up to 1024"):
        backend.check_experts(1025, 8)
    with pytest.raises(BackendError, match="the model has 1025 experts of a token; npu takes up to 1024"):
        backend.check_experts(64, 1025)


@needs_npu
@pytest.mark.full
def test_mixture_tokens_equal_cpu_with_the_newest_cann(tmp_path: Path) -> None:
    """torch_npu 2.13.0 then calls a newer function for the sum of a token's experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMULATED_CANN", "9.2.0")
        run(equal_to_the_cpu, {"folder": tmp_path}, {"relax": RELAX}, fresh=True)


# Quantized


def expert_weights(runner: Runner) -> list[WeightForm]:
    """Return the weights of the runner's experts."""
    weights = runner._forward._model.weights
    return [form_of(linear.weight) for block in weights.blocks if isinstance(block.layer, Experts)
            for linear in (block.weights.gate_up, block.weights.down)]


def quantized(folder: Path, form: str, family: Family) -> Path:
    heads = {} if family == "qwen3" else {"key_heads": 2, "value_heads": 4}
    floats = saved_mixture(folder / "floats", family, experts=8, top_k=3, width=64, shared=64, **heads)
    if form == "floats":
        return floats
    if form == "W4A16":
        path, config = floats / "model.safetensors", floats / "config.json"
        save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
        config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "bfloat16"}))
    rounding = Int4Rounding(32) if form == "W4A16" else Int8Rounding(modelslim=form == "ModelSlim")
    quantize_checkpoint(floats, folder / "quantized", rounding=rounding)
    return folder / "quantized"


DEFAULT: dict[str, Any] = {}
IN_DTYPES = [("floats", "qwen3_5"), ("W4A16", "qwen3_next")]
"""Forms and families of the default run."""


@pytest.mark.parametrize(("form", "family", "settings"), [
    *(pytest.param(form, family, DEFAULT, marks=[] if (form, family) in IN_DTYPES else pytest.mark.full)
      for form in ("floats", "W8A8", "ModelSlim", "W4A16") for family in ARCHITECTURES),
    ("W8A8", "qwen3", {"kv_cache_dtype": "int8", "lm_head_dtype": "int8"}),
    pytest.param("floats", "qwen3_5", {"kv_cache_dtype": "int8"}, marks=pytest.mark.full)], ids=str)
@emulated()
def test_mixture_log_probabilities_are_near_the_cpus(
    tmp_path: Path, form: str, family: Family, settings: dict[str, Any]
) -> None:
    """Of a prompt, in the device's dtypes without relaxation: as near as those of the CPU in bfloat16.

    The rounding of an activation may choose another expert, which changes a token's numbers much more. The CPU has
    float32 and the device's int8 levels.
    """
    folder = quantized(tmp_path, form, family)
    npu = load(folder, dtype="bfloat16", **MEMORY, **settings)
    assert npu.fallbacks == []
    assert (form == "W4A16") == all(isinstance(weight, Int4Weight) for weight in expert_weights(npu))
    reports = []
    prompt = ids_of(60, 4)
    exact, rounded = (on_cpu(folder, int8_levels=127.0, dtype=dtype, **settings) for dtype in ("float32", "bfloat16"))
    for runner in (exact, npu, rounded):
        new = NewRequest(1, prompt, [], SamplingParams(temperature=0.0, prompt_logprobs=1))
        row = Row(1, prompt, 0, [0], 1, state_slot=0 if runner.num_slots else -1)
        reports.append(runner.collect(runner.launch(Step([row], [new]))).prompt_logprobs[1])
    expected, *others = reports
    error, least = (sum(abs(one.logprob - other.logprob) for one, other in zip(report, expected, strict=True))
                    / len(expected) for report in others)
    assert 0 < error < 2.2 * least
    agreeing = sum(one.top_ids[0] == other.top_ids[0] for one, other in zip(others[0], expected, strict=True))
    assert agreeing >= 0.8 * len(expected)


@emulated()
def test_mixture_in_float16_and_w8a8_with_wide_experts(tmp_path: Path) -> None:
    """Weights of the chosen experts become float16, and gate and up too wide for the fused product take three."""
    folder = quantized(tmp_path, "W8A8", "qwen3")
    prompt, reports = ids_of(20, 1), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("npuserve.kernels.quantized_weight.MAX_FUSED_COLUMNS", 64)
        for runner in (load(folder, dtype="float16", **MEMORY), on_cpu(folder, int8_levels=127.0)):
            new = NewRequest(1, prompt, [], SamplingParams(temperature=0.0, logprobs=5))
            reports.append(runner.collect(runner.launch(Step([Row(1, prompt, 0, [0], True)], [new]))).logprobs[1][0])
    assert reports[0].token_id == reports[1].token_id
    assert reports[0].logprob == pytest.approx(reports[1].logprob, abs=0.15)


@emulated(relax=RELAX)
def test_mixture_in_int4_equals_its_numbers_in_floats(tmp_path: Path) -> None:
    """Symmetric numbers are multiplied as they are, and those with zero points become floats."""
    for symmetric in (True, False):
        folders = (tmp_path / f"{name}-{symmetric}" for name in ("floats", "int4"))
        floats, int4 = (saved_mixture(folder, width=64, top_k=3) for folder in folders)
        numbers = to_int4(int4, "compressed-tensors", dtype=torch.float32, symmetric=symmetric)
        path = floats / "model.safetensors"
        save_file(load_file(path) | numbers, path)
        npu = load(int4, decode_buckets=(2, 4), **MEMORY)
        assert npu.config.quantization_name == "w4a16"
        assert all(isinstance(weight, Int4Weight) == symmetric for weight in expert_weights(npu))
        assert answers(npu, asks(4, 6))[0] == answers(on_cpu(floats), asks(4, 6))[0]


@pytest.mark.parametrize(("n", "k", "zeros", "experts", "reason"), [
    (128 * 1536, 2048, False, 128, ""), (256, 64, True, 4, ""),
    (128 * 12, 64, False, 128, "have 12 rows, which are not a multiple of 8"),
    (256, 128, True, 4, "of experts have zero points for groups of columns"),
    (256, 96, False, 4, "of experts have 96 columns, which groups of 64 do not divide"),
])
def test_int4_refusal_of_experts(n: int, k: int, zeros: bool, experts: int, reason: str) -> None:
    assert refusal(n, k, Grouping(64, torch.bfloat16, zeros=zeros), torch.bfloat16, experts) == reason


# Ranks


@pytest.mark.parametrize(("form", "family", "whole_experts"), [
    ("floats", "qwen3_5", True), *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("floats", "qwen3", False), ("floats", "qwen3", True), ("W8A8", "qwen3", False), ("W8A8", "qwen3", True)))])
@on_ranks(joined=False, relax=RELAX, environment=SMALL_BUFFER)
def test_mixture_tokens_of_two_ranks_equal_those_of_one_device(
    place: Place, tmp_path: Path, form: str, family: Family, whole_experts: bool
) -> None:
    """Each rank has a part of each expert's rows, or half of the experts.

    In W8A8 each rank quantizes its own columns of dynamic inputs, so that later tokens may differ.
    """
    folder = share(place, "model", lambda: quantized(tmp_path, form, family))
    runner, _ = loaded(place, folder, decode_buckets=(1, 4), expert_parallel=whole_experts, **MEMORY)
    assert runner.fallbacks == []
    got, results = answers(runner, asks(4, 8))
    alone = of_one_device(place, folder, **MEMORY)
    assert all(result.captured for result in results)
    if form == "W8A8":
        assert json.dumps(got) == from_first(place, "got", lambda: json.dumps(got))
        assert sum(mine[0] == theirs[0] for mine, theirs in zip(got, alone, strict=True)) >= 3
    else:
        assert got == alone


# Calls


MLP = {
    "floats": Counter({"aclnnMatmul": 1, "aclnnMoeGatingTopKSoftmaxV2": 1, "aclnnMoeInitRoutingV3": 1,
                       "aclnnGroupedMatmulV5": 2, "aclnnSwiGlu": 1, "aclnnMoeFinalizeRoutingV2": 1}),
    "W8A8": Counter({"aclnnMatmul": 1, "aclnnMoeGatingTopKSoftmaxV2": 1, "aclnnMoeInitRoutingV3": 1,
                     "aclnnGroupedMatmulSwigluQuantWeightNzV2": 1, "aclnnGroupedMatmulWeightNz": 1,
                     "aclnnMoeFinalizeRoutingV2": 1})}
"""Tasks of a layer of experts after its norm."""
DENSE = {
    "floats": Counter({"aclnnMatmul": 2, "aclnnSwiGlu": 1}),
    "W8A8": Counter({"aclnnQuantMatmulWeightNz": 2, "aclnnSwiGlu": 1, "aclnnDynamicQuantV2": 1})}
NORM = Counter({"aclnnAddRmsNormCast": 1})
SHARED = {
    "floats": Counter({"aclnnMatmul": 3, "aclnnSwiGlu": 1, "aclnnSigmoid": 1, "aclnnMul": 1}),
    "W8A8": Counter({"aclnnMatmul": 1, "aclnnQuantMatmulWeightNz": 2, "aclnnDequantSwigluQuantV2": 1,
                     "aclnnDynamicQuantV2": 1, "aclnnSigmoid": 1, "aclnnMul": 1})}
"""Tasks of the shared expert."""
COUNTS = Counter({"aclnnCat": 1, "aclnnInplaceAdd": 1})
"""Tasks of a step that count the tokens of all layers' experts."""


def step_tasks(folder: Path, form: str, *, dense: tuple[int, ...], layers: int) -> dict[str, Counter[str]]:
    """Return the tasks of a model's captured steps."""
    floats = saved_mixture(folder / "floats", layers=layers, dense=dense, head_dim=128, inner=80, width=64)
    if form == "W8A8":
        quantize_checkpoint(floats, folder / "int8")
    dispatch = load(folder / "int8" if form == "W8A8" else floats, dtype="bfloat16", decode_buckets=(1, 4))._dispatch
    return {kind: nodes(dispatch.chunks.hidden, 64, folder / "graph.json") if kind == "chunk" else
            nodes(dispatch.decodes.argmax, int(kind), folder / "graph.json") for kind in KINDS}


@pytest.mark.parametrize("form", [pytest.param("floats", marks=pytest.mark.full), "W8A8"])
@emulated()
def test_mixture_launches_of_a_layer(tmp_path: Path, form: str) -> None:
    """A layer of experts has at most 4 launches more than a dense one, and a step 2 more (COUNTS)."""
    of_experts, mixed = (step_tasks(tmp_path / str(dense), form, layers=2, dense=dense) for dense in ((), (1,)))
    norm = Counter({"aclnnAddRmsNorm" if form == "floats" else "aclnnAddRmsNormDynamicQuantV2": 1})
    for kind in KINDS:
        assert of_experts[kind] - mixed[kind] == MLP[form] + NORM - (DENSE[form] + norm), kind
        assert mixed[kind] - of_experts[kind] == DENSE[form] + norm - (MLP[form] + NORM), kind
    alone = step_tasks(tmp_path / "dense", form, layers=2, dense=(0, 1))
    for kind in KINDS:
        assert of_experts[kind].total() - mixed[kind].total() <= 4, kind
        assert mixed[kind].total() - alone[kind].total() <= 4 + COUNTS.total(), kind
        assert not COUNTS - (mixed[kind] - alone[kind])


@pytest.mark.parametrize("form", MLP)
@emulated()
def test_mixture_launches_of_a_shared_expert(tmp_path: Path, form: str) -> None:
    tasks = []
    for layers in (2, 1):
        folder = saved_mixture(tmp_path / f"floats{layers}", "qwen3_5", layers=layers, full=(*range(layers),),
                               head_dim=128, width=64, shared=64)
        if form == "W8A8":
            quantize_checkpoint(folder, tmp_path / f"int8{layers}")
            folder = tmp_path / f"int8{layers}"
        tasks.append(nodes(load(folder, dtype="bfloat16", decode_buckets=(1,))._dispatch.decodes.argmax, 1,
                           tmp_path / "graph.json"))
    layer = tasks[0] - tasks[1]
    for expected in (MLP[form] + SHARED[form], NORM):
        assert not expected - layer, layer - expected
    attention = {"floats": 12, "W8A8": 13}[form]
    assert layer.total() - EVENT.total() == attention + (MLP[form] + SHARED[form]).total()


@pytest.mark.full
@pytest.mark.parametrize("form", ["bf16", "w8a8"])
@emulated()
def test_mixture_launches_are_those_of_the_roofline(tmp_path: Path, form: str) -> None:
    """Of a step of one row: in each layer, without the event of the lengths, and besides the layers."""

    def tasks(name: str, family: Family, **sizes: Any) -> int:
        folder = saved_mixture(tmp_path / name, family, head_dim=128, width=64, shared=64, **sizes)
        if form == "w8a8":
            quantize_checkpoint(folder, tmp_path / f"{name} in int8")
            folder = tmp_path / f"{name} in int8"
        dispatch = load(folder, dtype="bfloat16", decode_buckets=(1,), **MEMORY)._dispatch
        return nodes(dispatch.decodes.argmax, 1, tmp_path / "graph.json").total()

    two, one = (tasks(f"{layers} layers", "qwen3", layers=layers) for layers in (2, 1))
    roofline = bench("kernels.roofline")
    others = roofline.LAUNCHES[form][1] + COUNTS.total()  # those of a dense model, by its profile
    assert roofline.MIXTURE_LAUNCHES["Qwen3-30B-A3B"][form] == (0, two - one - EVENT.total(), others)
    longest, attention, shortest = (
        tasks(f"attention in {full}", "qwen3_5", layers=max(full) + 1, full=full) for full in ((2,), (1, 2), (1,)))
    of_linear = longest - shortest
    of_attention = attention - shortest
    assert roofline.MIXTURE_LAUNCHES["Qwen3.5-35B-A3B"][form] == (
        of_linear, of_attention - EVENT.total(), shortest - of_linear - of_attention)


@emulated(relax=RELAX)
def test_mixture_steady_step_is_one_replay(tmp_path: Path) -> None:
    """Lists of groups stay on the device: no call beyond those of a dense model."""
    saved_mixture(tmp_path)
    runner = load(tmp_path, **MEMORY)
    rows, here = range(3), threading.get_native_id()
    flying = runner.launch(Step([Row(i, [5, 7, 9], 0, [i], 1) for i in rows],
                                [NewRequest(i, [5, 7, 9], [], GREEDY) for i in rows]))
    for step in range(6):
        runner.backend._lengths.check(runner.backend._lengths.given)  # type: ignore[attr-defined]
        emulator.clear_calls()
        following = runner.launch(Step([Row(i, [PENDING], 3 + step, [i], 1) for i in rows]))
        result = runner.collect(flying)
        flying = following
    own = Counter(call.name for call in emulator.calls() if call.thread == here)
    assert result.captured_decodes == 3
    assert own["aclmdlRIExecuteAsync"] == 1
    assert own.total() <= 12
    runner.collect(flying)


# Sampling, drafts, states


@emulated(relax=RELAX)
def test_mixture_sampled_and_constrained_tokens_equal_cpu(tmp_path: Path) -> None:
    """Constrained rows are sampled after the dispatch."""
    saved_mixture(tmp_path, dense=(0,), top_k=3)
    got, _ = answers(load(tmp_path, decode_buckets=(1, 4), **MEMORY), sampled_asks(6, 8))
    assert got == answers(on_cpu(tmp_path), sampled_asks(6, 8))[0]


@pytest.mark.parametrize("family", [pytest.param("qwen3_5", marks=pytest.mark.full), "qwen3_next"])
@emulated(relax=RELAX, poison=True)
def test_mixture_slots_are_cleared_copied_and_continued(tmp_path: Path, family: Family) -> None:
    saved_mixture(tmp_path, family)
    npu = load(tmp_path, decode_buckets=(2, 4), **MEMORY)
    assert tokens_of_continued_slots(npu) == tokens_of_continued_slots(on_cpu(tmp_path))


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=[] if family == "qwen3" else pytest.mark.full) for family in ARCHITECTURES])
@emulated(relax=RELAX, poison=True)
def test_mixture_drafts_change_no_token(tmp_path: Path, family: Family) -> None:
    saved_mixture(tmp_path, family, top_k=3)
    npu = load(tmp_path, decode_buckets=(2, 4), max_drafts=8, **MEMORY)
    requests = [loop.Ask(3 * seed, None, {"prompt_ids": ids_of(5 + 9 * seed, seed), "max_tokens": 16,
                                          "sampling": SamplingParams(seed=seed, temperature=0.0)}) for seed in range(3)]
    expected, _ = loop.serve(npu, requests, 2, 12, 4, 16)
    tokens = dict(enumerate(answer.tokens for answer in expected))
    drafting = drafting_of("mixed", lambda sequence: tokens[sequence.request.sampling.seed], 100, npu.max_drafts,
                           npu.block_size)
    drafted, _ = loop.serve(npu, requests, 2, 12, 4, 16, drafting=drafting)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in expected]
    assert 0 < drafting.accepted < drafting.drafted
