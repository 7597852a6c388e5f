from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npuserve.kernels.native.packed import PackedWeight
from npuserve.npu.backends import BackendError
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.kv_cache import KVCache, block_bytes
from npuserve.npu.loader import load_weights
from npuserve.npu.memory import predict
from npuserve.npu.model_config import ModelConfig, ModelError
from npuserve.npu.rope import cos_sin_table
from tests.npu.models import FAMILIES, SIZES, random_model, saved

CONFIG = ModelConfig.from_dict({**SIZES, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16})
BLOCK = block_bytes(CONFIG, 16, torch.float32, CpuBackend())


@pytest.fixture
def available(monkeypatch, cpu):
    def set_to(count: int) -> None:
        monkeypatch.setattr(cpu, "memory_available", lambda: count)

    set_to(1 << 30)
    return set_to


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_cache_take_what_is_predicted(tmp_path, kind, dtype, cpu):
    folder = saved(random_model(kind), tmp_path)
    config = ModelConfig.from_folder(folder)
    plan = predict(config, cpu, dtype=dtype, kv_cache_memory=1 << 20, max_num_seqs=3)
    made = getattr(torch, plan.dtype)
    weights = load_weights(folder, config, made, cpu, lambda done, total: None)
    table = cos_sin_table(config.rope, config.head_dim, plan.max_model_len)
    stored = [table, weights.embedding, weights.norm]
    if weights.lm_head.weight is not weights.embedding:
        stored.append(weights.lm_head.weight)
    for layer in weights.layers:
        stored += [layer.input_norm, layer.post_norm, *(t for t in (layer.q_norm, layer.k_norm) if t is not None)]
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            stored += [t for t in (linear.weight, linear.bias) if t is not None]
    tensors = [weight.words if isinstance(weight, PackedWeight) else weight for weight in stored]
    assert plan.weights == sum(tensor.nbytes for tensor in tensors)
    cache = KVCache.allocate(config, plan.num_blocks, plan.block_size, made, cpu)
    assert plan.kv_cache == sum(t.nbytes for layer in cache.layers for t in layer)


def test_the_default_cache_holds_all_requests_at_full_length(cpu, available):
    plan = predict(CONFIG, cpu, max_num_seqs=5)
    assert (plan.block_size, plan.max_model_len, plan.num_blocks) == (cpu.block_size, 64, 5)
    assert plan.fits
    assert predict(CONFIG, cpu, max_num_seqs=5, block_size=16).num_blocks == 5 * 4


def test_or_a_share_of_what_is_free(cpu, available):
    plan = predict(CONFIG, cpu, max_num_seqs=5, block_size=16)
    beside = plan.activations + plan.logits + plan.weights - 4 * plan.max_model_len * CONFIG.head_dim
    available(beside + 4 * 7 * BLOCK)
    assert predict(CONFIG, cpu, max_num_seqs=5, block_size=16).num_blocks == 7
    available(beside + 4 * 3 * BLOCK)
    short = predict(CONFIG, cpu, max_num_seqs=5, block_size=16)
    assert (short.num_blocks, short.max_model_len) == (3, 48)  # the context follows what the cache holds
    asked = predict(CONFIG, cpu, max_num_seqs=5, block_size=16, max_model_len=64)
    assert (asked.num_blocks, asked.max_model_len) == (4, 64)  # unless it was asked for
    assert asked.fits


def test_a_given_cache_is_taken_as_it_is(cpu, available):
    plan = predict(CONFIG, cpu, kv_cache_memory=10 * BLOCK + 1, max_num_seqs=1000, block_size=16)
    assert (plan.num_blocks, plan.kv_cache, plan.max_model_len) == (10, 10 * BLOCK, 64)


def test_what_does_not_fit_says_so_with_its_parts(cpu, available):
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
        ({"max_model_len": 65}, ModelError, "max_model_len: 65 is beyond the model's context of 64 tokens"),
        ({"kv_cache_memory": BLOCK - 1}, ModelError, "kv_cache_memory: .* holds 0 tokens; one block needs"),
        (
            {"kv_cache_memory": 3 * BLOCK, "max_model_len": 64, "block_size": 16},
            ModelError,
            "kv_cache_memory: .* holds 48 tokens; max_model_len 64 needs",
        ),
        ({"dtype": "float64"}, BackendError, "dtype: 'float64'"),
    ],
)
def test_settings_that_contradict_the_model(cpu, available, settings, error, message):
    with pytest.raises(error, match=message):
        predict(CONFIG, cpu, **settings)


def test_a_block_size_that_the_kernels_cannot_have(cpu):
    assert predict(CONFIG, cpu, block_size=32).block_size == 32
    if cpu.block_multiple == 1:
        assert predict(CONFIG, cpu, block_size=8).block_size == 8
        return
    with pytest.raises(ModelError, match="block_size: 8 is not possible here; possible are multiples of 16"):
        predict(CONFIG, cpu, block_size=8)


PROCESS = """
import sys
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.runner import load_runner
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from npuserve.npu import memory, runner as module

plans = []
module.select = lambda *_: CpuBackend(native=sys.argv[2] == "cpu")
module.predict = lambda *args, **settings: plans.append(memory.predict(*args, **settings)) or plans[0]
runner = load_runner(sys.argv[1], max_num_seqs=32, max_num_batched_tokens=256, threads=1, progress=lambda *_: None,
                     kv_cache_memory=100 << 20)
sampling = SamplingParams(temperature=0.7, top_p=0.9)
blocks = list(range(64))
for step in (Step([Row(0, [5] * 256, 512, blocks, True)], [NewRequest(0, [5] * 768, [], sampling)]),
             Step([Row(i, [5], 3, [i], True) for i in range(32)],
                  [NewRequest(i, [5] * 4, [], sampling) for i in range(1, 32)])):
    runner.collect(runner.launch(step))
print(plans[0].peak, next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_the_predicted_peak_is_the_measured_one_within_a_tenth(tmp_path: Path, cpu):
    """Of a process that loads 80 MB of weights, prefills and decodes: a loader that held a tensor or a mapped page
    twice would show."""
    folder = saved(random_model("qwen3", vocab_size=20000, hidden_size=512, intermediate_size=4096, num_hidden_layers=3,
                                head_dim=64, max_position_embeddings=1024), tmp_path)
    command = [sys.executable, "-c", PROCESS, str(folder), cpu.kernels]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    predicted, measured = map(int, run.stdout.split())
    assert predicted == pytest.approx(measured, rel=0.1)
