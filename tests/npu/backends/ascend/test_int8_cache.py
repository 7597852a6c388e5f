"""int8 KV cache on the emulated Ascend device: tokens, steps, operators, and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from npuserve.cli.acceptance.tokens import answers as scheduled
from npuserve.kernels import ascend, attention
from npuserve.kernels.attention import AttentionMetadata, gathered_bytes, paged_attention
from npuserve.kernels.kv_cache import quantize_heads
from npuserve.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from npuserve.kernels.quantized import Quantized
from npuserve.npu import emulator
from npuserve.npu.backends import select
from npuserve.npu.backends.base import DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.memory_plan import predict
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from tests.npu.backends.ascend.test_backend import RELAX, load
from tests.npu.backends.small import GREEDY, answers, asks, ids_of, saved
from tests.npu.emulator.child import emulated, needs_npu, run

LAYERS = 2


def golden(folder: Path, **settings: Any) -> Runner:
    """Load the model on the CPU with golden functions and the device's scheme: scales in float32."""

    def cpu(name: str, emulate: object, settings: DeviceSettings) -> CpuBackend:
        return CpuBackend(False, settings, replace(CpuBackend.capabilities, scale_dtype=torch.float32))

    with patch("npuserve.npu.execution.load.select", cpu):
        return load(folder, "cpu", **{"block_size": 128, "threads": 1, "kv_cache_dtype": "int8", **settings})


def equal_to_the_cpu(folder: Path, sampling: dict[str, Any], capture_chunks: bool) -> None:
    saved(folder, layers=LAYERS)
    npu = load(folder, decode_buckets=(2, 4), kv_cache_dtype="int8", capture_chunks=capture_chunks)
    assert npu.fallbacks == []
    got, results = answers(npu, asks(6, 8, **sampling))
    expected, _ = answers(golden(folder), asks(6, 8, **sampling))
    assert got == expected
    decodes = sum(result.captured_decodes for result in results)
    assert decodes > 8 if capture_chunks else decodes > 16
    assert not any(result.captured and not result.captured_decodes for result in results)


ORDERS = (("lazy", 0), ("shuffled", 1), ("eager", 0))
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.2, "top_k": 7, "top_p": 0.8}}
DEFAULT = [("greedy", True, "lazy"), ("sampled", False, "shuffled"), ("greedy", False, "eager")]
"""Cases of the default run, each value in one. test_combinations.py has sampled requests in one batch."""


@needs_npu
@pytest.mark.parametrize(("sampling", "capture_chunks", "order", "seed"), [
    pytest.param(SAMPLING[name], capture_chunks, order, seed,
                 id=f"{name}, {'one batch' if capture_chunks else 'decode rows and chunks'}, {order}",
                 marks=[] if (name, capture_chunks, order) in DEFAULT else pytest.mark.full)
    for name in SAMPLING for capture_chunks in (True, False) for order, seed in ORDERS])
def test_ascend_int8_cache_tokens_equal_cpu(
    tmp_path: Path, sampling: dict[str, Any], capture_chunks: bool, order: str, seed: int
) -> None:
    """Prompts arrive in chunks beside decode rows, in captured steps and kernel by kernel."""
    options = {"relax": RELAX, "order": order, "seed": seed, "poison": True}
    run(equal_to_the_cpu, {"folder": tmp_path, "sampling": sampling, "capture_chunks": capture_chunks}, options)


@pytest.mark.full
@emulated(relax=RELAX)
def test_ascend_int8_cache_prefix_hits_and_preemption_equal_cpu(tmp_path: Path) -> None:
    """The cache holds 6 blocks, fewer than the requests need, and the last prompt begins with the first one."""
    saved(tmp_path, layers=LAYERS)
    prompts, count = [ids_of(140, 1), ids_of(10, 2), ids_of(20, 3)], 260
    prompts.append(prompts[0] + ids_of(5, 4))
    found = []
    for load_it in (load, golden):
        settings: dict[str, Any] = {"kv_cache_dtype": "int8"} if load_it is load else {}
        runner = load_it(tmp_path, max_model_len=512, kv_cache_memory=1 << 20, **settings)
        with patch.object(runner, "num_blocks", 6):
            found.append(scheduled(runner, prompts, count, 2))
    npu, cpu = found
    assert npu.tokens == cpu.tokens
    assert all(len(tokens) == count for tokens in npu.tokens)
    assert npu.captured > 0
    at_once = sum(map(len, prompts)) + len(prompts) * (count - 1)
    assert sum(map(sum, npu.steps)) > at_once  # preempted requests were computed again


@emulated(relax=RELAX, poison=True)
def test_ascend_int8_cache_tokens_of_heads_of_256_equal_cpu(tmp_path: Path) -> None:
    saved(tmp_path, head_dim=256)
    got, results = answers(load(tmp_path, kv_cache_dtype="int8"), asks(5, 8))
    expected, _ = answers(golden(tmp_path), asks(5, 8))
    assert got == expected
    assert sum(result.captured_decodes for result in results) > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@emulated()
def test_ascend_int8_cache_in_device_dtypes_needs_no_relaxation(tmp_path: Path, dtype: str) -> None:
    """Log probabilities after a decode step are close to those without an int8 cache on the CPU."""
    saved(tmp_path)
    prompt, reports = [3, 1, 4, 1, 5, 9, 2, 6], []
    for runner in (load(tmp_path, dtype=dtype, kv_cache_dtype="int8"), load(tmp_path, "cpu", threads=1)):
        new = NewRequest(1, prompt, [], SamplingParams(temperature=0.0, logprobs=5))
        for start, end in ((0, 5), (5, 7), (7, 8)):
            step = Step([Row(1, prompt[start:end], start, [0], end == 8)], [new] if start == 0 else [])
            result = runner.collect(runner.launch(step))
        reports.append(result.logprobs[1][0])
    assert reports[0].token_id == reports[1].token_id
    assert reports[0].logprob == pytest.approx(reports[1].logprob, abs=0.1)


@emulated(relax=RELAX)
def test_ascend_int8_cache_operators_of_a_step(tmp_path: Path) -> None:
    """A layer quantizes and writes keys and values in five calls; the places of heads are computed once a step."""
    runner = load(saved(tmp_path, layers=LAYERS), kv_cache_dtype="int8", decode_buckets=(1,))
    prompts = [[1, 2], [3, 4]]
    runner.collect(runner.launch(Step([Row(0, prompts[0], 0, [0], True)], [NewRequest(0, prompts[0], [], GREEDY)])))
    torch.npu.synchronize()
    emulator.clear_calls()
    runner.collect(runner.launch(Step(
        [Row(0, [5], 2, [0], True), Row(1, prompts[1], 0, [1], True)], [NewRequest(1, prompts[1], [], GREEDY)])))
    torch.npu.synchronize()
    calls = Counter(call.name for call in emulator.calls())
    assert calls["aclnnFusedInferAttentionScoreV3"] == 2 * LAYERS  # the decode row, and the chunk
    assert calls["aclnnDynamicQuantV2"] == calls["aclnnScatterNdUpdate"] == 2 * LAYERS
    assert calls["aclnnScatterPaKvCache"] == LAYERS
    assert calls["aclnnDivMods"] == 1, calls


@emulated(relax=RELAX)
def test_ascend_int8_cache_write_equals_golden_with_float_scales() -> None:
    """Numbers and scales are the golden function's, except halves, which the operator's product may round otherwise."""
    case = next(case for case in qk_norm_rope_kv_write.cases if case.cache and case.name.startswith("33x"))
    made = qk_norm_rope_kv_write.implementations[ascend.LABEL]
    args = case.make(torch.Generator().manual_seed(0), torch.float32)
    on_device = made.adapt(args)
    made.function(*on_device)
    caches = [Quantized(cache.values, cache.scale.float()) for cache in args[7:9]]
    slots = args[6]
    qk_norm_rope_kv_write.golden(*args[:7], *caches, args[9])
    written = slots[slots >= 0]
    for want, device in zip(caches, on_device[7:9], strict=True):
        got = ascend.by_token(Quantized(device.values.cpu(), device.scale.cpu()))
        numbers = [cache.values.flatten(0, 1)[written][..., :16].int() for cache in (got, want)]
        scales = [cache.scale.flatten(0, 1)[written] for cache in (got, want)]
        torch.testing.assert_close(*scales, rtol=1e-6, atol=0)
        assert (numbers[0] - numbers[1]).abs().max() <= 1
        assert (numbers[0] != numbers[1]).float().mean() < 0.01


def _rows(rows: list[tuple[int, int]]) -> tuple[Tensor, Quantized, Quantized, AttentionMetadata]:
    """Return arguments of attention over an int8 cache. rows: (queries, context) of each."""
    generator = torch.Generator().manual_seed(0)
    width = -(-max(context for _, context in rows) // 128)
    caches = torch.randn(2, len(rows) * width, 128, 2, 32, generator=generator)
    tables = torch.randperm(len(rows) * width, generator=generator).int().view(len(rows), width)
    q = torch.randn(sum(n for n, _ in rows), 4, 32, generator=generator)
    metadata = AttentionMetadata.from_lengths(tables, [c for _, c in rows], [n for n, _ in rows])
    return q, *map(quantize_heads, caches), metadata


@pytest.mark.parametrize("most", [128, 512, 4096])
@emulated(relax=RELAX)
def test_ascend_int8_chunks_are_gathered_in_groups(most: int) -> None:
    """Any limit gives the same result, also for rows of one query behind chunks, which are gathered too."""
    q, keys, values, metadata = _rows([(1, 300), (1, 5), (7, 200), (2, 2), (1, 130), (90, 300)])
    made = paged_attention.implementations[ascend.LABEL]
    args = made.adapt((q, keys, values, metadata, 0.2))
    with patch.object(attention, "GATHERED_TOKENS", most):
        emulator.clear_calls()
        got = made.function(*args).cpu()
    calls = Counter(call.name for call in emulator.calls())
    assert calls["aclnnFusedInferAttentionScoreV3"] == 1 + {128: 4, 512: 3, 4096: 1}[most]
    torch.testing.assert_close(got, paged_attention.golden(q, keys, values, metadata, 0.2), rtol=1e-5, atol=1e-5)


def test_group_of_rows_has_the_blocks_of_its_own_longest_row() -> None:
    assert [*attention._groups([9, 5000, 100, 300, 0], 1, 128)] == [(1, 2, 40), (2, 5, 3)]


@emulated()
def test_ascend_int8_cache_memory_plan(tmp_path: Path) -> None:
    """A block holds numbers of 1 byte and a scale of 4 bytes per token and head; chunks take memory beside it."""
    backend, config = select("npu"), ModelConfig.from_folder(saved(tmp_path))
    plain, made = (predict(config, backend, kv_cache_dtype=dtype, max_num_seqs=2) for dtype in ("auto", "int8"))
    assert (made.kv_cache_dtype, plain.kv_cache_dtype) == ("int8", "bfloat16")
    of_block = [plan.kv_cache / (plan.num_blocks + 1) for plan in (plain, made)]
    tokens = config.num_layers * 2 * 128 * config.attention.num_kv_heads
    assert of_block == [tokens * 128 * 2, tokens * (128 + 4)]
    assert made.activations - plain.activations == gathered_bytes(512, 128, 2 * 128) == 8 * 4096 * 256
