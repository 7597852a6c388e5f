from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch

from npuserve.kernels import native
from npuserve.kernels.native.packed import PackedWeight, compacts, packed_words
from npuserve.npu.backends import BackendError
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.load import load_runner
from npuserve.npu.execution.memory_plan import predict
from npuserve.npu.execution.state_store import StateStore, block_bytes
from npuserve.npu.model import progress
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.layers.shard import Shard
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.rope import cos_sin_table
from npuserve.npu.model.storage import read_bytes, stored_bytes
from tests.npu.model.test_weights import storage
from tests.support.hybrids import random_hybrid
from tests.support.models import FAMILIES, SIZES, random_model, saved, saved_w8a8
from tests.support.mtp import add_mtp

CONFIG = ModelConfig.from_dict({**SIZES, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16})
BLOCK = block_bytes(CONFIG, 16, torch.float32, CpuBackend())


@pytest.fixture
def available(monkeypatch, cpu):
    def set_to(count: int) -> None:
        monkeypatch.setattr(cpu.memory, "available", lambda: count)

    set_to(1 << 30)
    return set_to


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_predict_weights_and_cache_equal_allocated(tmp_path, kind, dtype, cpu):
    folder = saved(random_model(kind), tmp_path)
    config = ModelConfig.from_folder(folder)
    plan = predict(config, cpu, dtype=dtype, kv_cache_memory=1 << 20, max_num_seqs=3)
    made = getattr(torch, plan.dtype)
    weights = load_weights(folder, config, made, cpu, lambda done, total: None)
    table = cos_sin_table(config.rope, config.attention.head_dim, plan.max_model_len)
    assert plan.weights == sum(tensor.nbytes for tensor in (table, *storage(weights)))
    cache = StateStore.allocate(config, plan.num_blocks, plan.block_size, made, cpu)
    assert plan.kv_cache == sum(t.nbytes for t in cache.tensors)


def tensors_of(value: object) -> list[torch.Tensor]:
    """Return the tensors that weights hold."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PackedWeight):
        return [value.words]
    parts = value if isinstance(value, tuple) else [
        getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else []
    return [tensor for part in parts for tensor in tensors_of(part)]


@pytest.mark.parametrize(("dtype", "draft_head_dtype"), [
    ("float32", "auto"), ("bfloat16", "auto"), ("float32", "int8"), ("bfloat16", "int8")])
def test_predict_head_for_drafts_equals_allocated(tmp_path, dtype, draft_head_dtype, cpu):
    model = random_hybrid(3, num_hidden_layers=2, full_attention_interval=2)
    add_mtp(model, saved(model, tmp_path))
    config, without = (replace(ModelConfig.from_folder(tmp_path, mtp=mtp), draft_head_dtype=draft_head_dtype)
                       for mtp in ("on", "off"))
    made = getattr(torch, dtype)
    weights = load_weights(tmp_path, config, made, cpu, lambda done, total: None)
    head = sum(tensor.nbytes for tensor in tensors_of(weights.mtp))
    assert head == stored_bytes(config, made, cpu) - stored_bytes(without, made, cpu)
    assert (weights.mtp.lm_head is not None) == (draft_head_dtype == "int8")
    assert read_bytes(config, made, cpu) == read_bytes(without, made, cpu)
    plan = predict(config, cpu, dtype=dtype, kv_cache_memory=1 << 20, max_num_seqs=3)
    caches = [StateStore.allocate(part, plan.num_blocks, plan.block_size, made, cpu, plan.num_slots)
              for part in (config, config.predictor)]
    assert plan.kv_cache + plan.fixed_state == sum(tensor.nbytes for cache in caches for tensor in cache.tensors)
    plans = [predict(part, cpu, dtype=dtype, kv_cache_memory=1 << 20, max_num_seqs=3) for part in (config, without)]
    assert plans[0].activations > plans[1].activations


def test_kv_cache_slow_allocation_shows_progress(monkeypatch, caplog):
    cpu = CpuBackend(native=False)
    monkeypatch.setattr(progress, "FIRST_REPORT_SECONDS", 0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    config = ModelConfig.from_dict({**SIZES, "architectures": ["Qwen3ForCausalLM"]})
    plan = predict(config, cpu, kv_cache_memory=64 << 20)
    with caplog.at_level("INFO"):
        StateStore.allocate(config, plan.num_blocks, plan.block_size, torch.float32, cpu)
    assert re.fullmatch(r"zeroing the KV cache: \d+ of \d+ MiB", caplog.messages[0])


def test_kv_cache_has_padding_blocks_and_no_nan(monkeypatch):
    """Memory of a device is not zero."""
    backend = CpuBackend(native=False)
    backend.capabilities = replace(backend.capabilities, padding_blocks=2)
    monkeypatch.setattr(backend.memory, "empty", lambda shape, dtype: torch.full(shape, math.nan, dtype=dtype))
    config = ModelConfig.from_dict({**SIZES, "architectures": ["Qwen3ForCausalLM"]})
    cache = StateStore.allocate(config, 5, 16, torch.float32, backend)
    assert all(len(tensor) == 7 and not tensor.any() for tensor in cache.tensors)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (128, "bfloat16"), (128, "float32")])
def test_predict_int8_cache_tokens_and_bytes(cpu, head_dim, dtype):
    """A head of a token takes head_dim bytes and 2 for its scale, nearly a quarter of float32."""
    config = ModelConfig.from_dict({**SIZES, "architectures": ["Qwen3ForCausalLM"], "head_dim": head_dim})
    plans = [predict(config, cpu, dtype=dtype, kv_cache_dtype=cache, kv_cache_memory=16 << 20, block_size=16)
             for cache in ("auto", "int8")]
    assert [plan.kv_cache_dtype for plan in plans] == [dtype, "int8"]
    itemsize = getattr(torch, dtype).itemsize
    gain = plans[1].num_blocks / plans[0].num_blocks
    assert gain == pytest.approx(itemsize * head_dim / (head_dim + 2), rel=0.01)
    assert gain >= 1.9
    cache = StateStore.allocate(config, plans[1].num_blocks, 16, torch.int8, cpu)
    assert plans[1].kv_cache == sum(t.nbytes for t in cache.tensors)
    assert plans[1].weights == plans[0].weights


def test_predict_default_cache_holds_all_requests(cpu, available):
    plan = predict(CONFIG, cpu, max_num_seqs=5)
    assert (plan.block_size, plan.max_model_len, plan.num_blocks) == (cpu.capabilities.block_size, 64, 5)
    assert plan.fits
    assert predict(CONFIG, cpu, max_num_seqs=5, block_size=16).num_blocks == 5 * 4


def test_predict_default_cache_is_limited_to_share_of_free_memory(cpu, available):
    plan = predict(CONFIG, cpu, max_num_seqs=5, block_size=16)
    beside = plan.activations + plan.logits + plan.weights - 4 * plan.max_model_len * CONFIG.rotary_dim
    available(beside + 4 * 7 * BLOCK)
    assert predict(CONFIG, cpu, max_num_seqs=5, block_size=16).num_blocks == 7
    available(beside + 4 * 3 * BLOCK)
    short = predict(CONFIG, cpu, max_num_seqs=5, block_size=16)
    assert (short.num_blocks, short.max_model_len) == (3, 48)  # the context is limited to the cache
    asked = predict(CONFIG, cpu, max_num_seqs=5, block_size=16, max_model_len=64)
    assert (asked.num_blocks, asked.max_model_len) == (4, 64)  # unless max_model_len is given
    assert asked.fits


def test_predict_dequantized_context_has_the_heads_of_one_rank(cpu, monkeypatch):
    monkeypatch.setattr(cpu.cache, "dequantized_bytes", lambda context, block_size, kv_heads, head_dim: 1000 * kv_heads)
    for size, heads in ((1, 2), (2, 1), (4, 1)):
        plain, int8 = (predict(CONFIG.sharded(Shard(0, size)), cpu, kv_cache_dtype=cached, kv_cache_memory=1 << 20)
                       for cached in ("auto", "int8"))
        assert int8.activations - plain.activations == 1000 * heads


def test_predict_reserved_memory_is_not_available(cpu, available):
    plans = [predict(CONFIG, cpu, reserved=reserved) for reserved in (0, 1 << 20)]
    assert [plan.available for plan in plans] == [1 << 30, (1 << 30) - (1 << 20)]


def test_plan_grown_takes_blocks_from_cache(cpu, available):
    plan = predict(CONFIG, cpu, max_num_seqs=5, block_size=16)
    available(plan.peak - plan.base + 100)
    plan = predict(CONFIG, cpu, max_num_seqs=5, block_size=16, kv_cache_memory=plan.kv_cache, max_model_len=64)
    assert plan.grown(100, BLOCK) == replace(plan, weights=plan.weights + 100)
    less = plan.grown(101 + BLOCK, BLOCK)
    assert (less.num_blocks, less.kv_cache) == (plan.num_blocks - 2, plan.kv_cache - 2 * BLOCK)
    less.require_fit()
    with pytest.raises(ModelError, match="the model needs"):
        plan.grown(plan.kv_cache, BLOCK).require_fit()


@pytest.mark.parametrize("padding", [0, 1, 3])
def test_plan_shrunk_keeps_padding_blocks(cpu, available, monkeypatch, padding):
    monkeypatch.setattr(cpu, "capabilities", replace(cpu.capabilities, padding_blocks=padding))
    plan, less = (predict(CONFIG, cpu, max_num_seqs=seqs, block_size=16, max_model_len=64) for seqs in (5, 2))
    assert plan.shrunk(less.num_blocks, 64, BLOCK).kv_cache == less.kv_cache == (less.num_blocks + padding) * BLOCK


def test_load_runner_counts_weights_that_are_not_compact(tmp_path):
    model = random_model("qwen3")
    down = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        down.mul_(2.0 ** torch.randint(-60, 1, down.shape))
    folder = saved(model, tmp_path)
    runner = load_runner(folder, backend="cpu", dtype="bfloat16", max_num_seqs=2)
    config, device = ModelConfig.from_folder(folder), CpuBackend()
    compact = compacts(down.shape[1], torch.bfloat16) if native.available() else False
    more = runner.weights_bytes - stored_bytes(config, torch.bfloat16, device)
    assert more == (4 * packed_words(*down.shape, torch.bfloat16, False) if compact else 0)
    read = runner.read_bytes - read_bytes(config, torch.bfloat16, device)
    assert read == (more - 4 * packed_words(*down.shape, torch.bfloat16, True) if compact else 0)


def test_predict_given_cache_size_is_kept(cpu, available):
    plan = predict(CONFIG, cpu, kv_cache_memory=10 * BLOCK + 1, max_num_seqs=1000, block_size=16)
    assert (plan.num_blocks, plan.kv_cache, plan.max_model_len) == (10, 10 * BLOCK, 64)


def test_require_fit_lists_parts(cpu, available):
    available(1 << 20)
    plan = predict(CONFIG, cpu, kv_cache_memory=1 << 21)
    assert not plan.fits
    assert not predict(CONFIG, cpu).fits
    parts = r"needs [34]\.\d MiB of memory \(weights 0.2 MiB, kv_cache 2.0 MiB, .* 1.0 MiB is"
    with pytest.raises(ModelError, match=parts):
        plan.require_fit()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_model_len": 65}, ModelError,
         "max_model_len: 65 is beyond the model's context of 64 tokens; 0 takes all of them"),
        ({"kv_cache_memory": BLOCK - 1}, ModelError, "kv_cache_memory: .* holds 0 tokens; one block needs"),
        (
            {"kv_cache_memory": 3 * BLOCK, "max_model_len": 64, "block_size": 16},
            ModelError,
            "kv_cache_memory: .* holds 48 tokens; max_model_len 64 needs",
        ),
        ({"dtype": "float64"}, BackendError, "dtype: 'float64'"),
        ({"kv_cache_dtype": "int4"}, BackendError,
         "kv_cache_dtype: 'int4' is not possible on cpu; possible are auto, int8"),
        (
            {"kv_cache_dtype": "int8", "prefill": CpuBackend()},
            BackendError,
            "kv_cache_dtype: 'int8' is not possible where prompts are computed on another device",
        ),
    ],
)
def test_predict_contradictory_settings_are_refused(cpu, available, settings, error, message):
    with pytest.raises(error, match=message):
        predict(CONFIG, cpu, **settings)


def test_predict_unsupported_block_size_is_refused(cpu):
    assert predict(CONFIG, cpu, block_size=32).block_size == 32
    if cpu.capabilities.block_multiple == 1:
        assert predict(CONFIG, cpu, block_size=8).block_size == 8
        return
    with pytest.raises(ModelError, match="block_size: 8 is not possible here; possible are powers of two from 16"):
        predict(CONFIG, cpu, block_size=8)


PROCESS = """
import os, sys
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.load import load_runner
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from npuserve.npu.execution import memory_plan as memory, load as module

def run(folder, head):
    plans = []
    module.select = lambda *_: CpuBackend(native=sys.argv[1] == "cpu")
    module.predict = lambda *args, **settings: plans.append(memory.predict(*args, **settings)) or plans[0]
    runner = load_runner(folder, max_num_seqs=32, max_num_batched_tokens=256, threads=1, progress=lambda *_: None,
                         kv_cache_memory=100 << 20, lm_head_dtype=head)
    sampling = SamplingParams(temperature=0.7, top_p=0.9)
    blocks = list(range(64))
    for step in (Step([Row(0, [5] * 256, 512, blocks, True)], [NewRequest(0, [5] * 768, [], sampling)]),
                 Step([Row(i, [5], 3, [i], True) for i in range(32)],
                      [NewRequest(i, [5] * 4, [], sampling) for i in range(1, 32)])):
        runner.collect(runner.launch(step))
    peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(plans[0].peak, peak, flush=True)

for folder, head in zip(sys.argv[2:], ("auto", "int8")):
    if not os.fork():
        run(folder, head)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> dict[bool, Path]:
    """Folders of a model with 80 MB of weights, by whether it is quantized."""
    model = random_model("qwen3", vocab_size=20000, hidden_size=512, intermediate_size=4096, num_hidden_layers=3,
                         head_dim=64, max_position_embeddings=1024)
    return {False: saved(model, tmp_path_factory.mktemp("float")),
            True: saved_w8a8(model, tmp_path_factory.mktemp("int8"))}


@pytest.mark.slow
def test_predict_peak_is_near_the_measured(large: dict[bool, Path], cpu):
    """A process for each model loads the weights, prefills and decodes: a loader that held a tensor or a mapped page
    twice would exceed the limit."""
    command = [sys.executable, "-c", PROCESS, cpu.kernels, str(large[False]), str(large[True])]
    # Large blocks are the system's, not pieces of a heap whose size depends on the order in which they are freed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    plain, quantized = (tuple(map(int, line.split())) for line in run.stdout.splitlines())
    for predicted, measured in (plain, quantized):
        assert 0.9 * measured <= predicted <= 1.15 * measured, "the plan leaves room for pieces of the heap"
