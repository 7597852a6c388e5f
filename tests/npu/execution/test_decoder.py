"""Logits compared with transformers, which computes each sequence at once without a cache."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_next import modeling_qwen3_next

from npuserve.kernels.native import available
from npuserve.kernels.registry import GOLDEN, KERNELS, Implementation, KernelSet
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.batch import make_batch
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.state_store import StateStore, block_bytes
from npuserve.npu.model import families
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.families.qwen3 import QWEN3
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.rope import cos_sin_table
from npuserve.npu.step import Row
from tests.support.models import FAMILIES, random_model, saved

BACKENDS = [CpuBackend(native=False), *([CpuBackend()] if available() else [])]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.kernels)
def backend(request):
    return request.param


class Bench:
    """Decoder and its cache, without a runner."""

    def __init__(
        self, folder, backend: CpuBackend, block_size: int = 16, num_blocks: int = 64,
        dtype: torch.dtype = torch.float32,
    ):
        config = ModelConfig.from_folder(folder)
        weights = load_weights(folder, config, dtype, backend, lambda done, total: None)
        table = cos_sin_table(config.rope, config.attention.head_dim, config.context_length)
        self.model = Model(config, weights, table, KernelSet(backend.kernels))
        self.cache = StateStore.allocate(config, num_blocks, block_size, dtype, backend)
        self.backend = backend
        self.block_size = block_size

    @torch.inference_mode()
    def logits(self, rows: list[Row]) -> list[torch.Tensor]:
        """Return the logits of all tokens of each row, without the padding of the vocabulary."""
        batch = make_batch(rows, self.block_size, self.backend)
        logits = self.model.logits(self.model.hidden(batch, self.cache))[:, : self.model.config.vocab_size]
        return list(logits.split([len(row.token_ids) for row in rows]))


@torch.no_grad()
def oracle(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


def ids_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(100), k=length)


@pytest.mark.parametrize("kind", FAMILIES)
def test_decoder_whole_prompt_equals_transformers(tmp_path, kind, backend):
    model = random_model(kind)
    ids = ids_of(50)
    [logits] = Bench(saved(model, tmp_path), backend).logits([Row(0, ids, 0, list(range(13)), True)])
    torch.testing.assert_close(logits, oracle(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_fused_layers_golden_function_equals_the_layers(tmp_path, monkeypatch, kind, dtype):
    """The kernel `decoder_layers` has the order of the layers in its golden function once more."""
    folder = saved(random_model(kind), tmp_path)
    plain = Bench(folder, CpuBackend(native=False), dtype=dtype)
    monkeypatch.setitem(
        KERNELS["decoder_layers"].implementations, GOLDEN, Implementation(KERNELS["decoder_layers"].golden))
    fused = Bench(folder, CpuBackend(native=False), dtype=dtype)
    calls = []
    golden = fused.model.kernels.decoder_layers
    fused.model.kernels.decoder_layers = lambda *args: calls.append(args) or golden(*args)
    for step in range(3):
        rows = [Row(0, ids_of(1 if step else 5, step), 4 + step if step else 0, [0, 1], True),
                Row(1, ids_of(1 if step else 6, step), 5 + step if step else 0, [2, 3], True)]
        for one, other in zip(plain.logits(rows), fused.logits(rows), strict=True):
            assert torch.equal(one, other)
    assert len(calls) == 3
    for one, other in zip(plain.cache.tensors, fused.cache.tensors, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("head_dim", "factor"), [(16, 0.5), (256, 0.25)])
def test_decoder_partial_rotary_embeddings_equal_transformers(tmp_path, monkeypatch, head_dim, factor, backend):
    """Qwen3 whose modules rotate a part of a head, as Qwen3-Next's do: greedy tokens in chunks and one by one."""
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", modeling_qwen3_next.apply_rotary_pos_emb)
    model = random_model("qwen3", head_dim=head_dim)
    model.config.rope_parameters["partial_rotary_factor"] = factor
    model.model.rotary_emb = modeling_qwen3_next.Qwen3NextRotaryEmbedding(model.config)
    ids = ids_of(20)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=-1)[0].tolist()
    monkeypatch.setitem(families.FAMILIES, "Qwen3ForCausalLM", replace(QWEN3, rotates_part=True))
    bench = Bench(saved(model, tmp_path), backend)
    made, start = list(ids), 0
    for end in (7, 20, *range(21, 32)):
        [logits] = bench.logits([Row(0, made[start:end], start, list(range(4)), True)])
        torch.testing.assert_close(logits, oracle(model, made[:end])[start:], atol=1e-4, rtol=1e-4)
        start = end
        if end >= len(ids):
            made.append(int(logits[-1].argmax()))
    assert made == expected


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama-bias", "llama-yarn"])
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_decoder_mixed_step_with_scattered_blocks_equals_transformers(tmp_path, kind, block_size, backend):
    if block_size % backend.capabilities.block_multiple:
        return
    model = random_model(kind)
    bench = Bench(saved(model, tmp_path), backend, block_size, num_blocks=256)
    prompts = {request: ids_of(length, request) for request, length in enumerate((40, 17, 33, 1, 26))}
    blocks = random.Random(7).sample(range(256), 5 * -(-40 // block_size))
    tables = {request: blocks[request :: len(prompts)] for request in prompts}
    done = dict.fromkeys(prompts, 0)
    parts: dict[int, list[torch.Tensor]] = {request: [] for request in prompts}
    r = random.Random(3)
    while any(done[request] < len(ids) for request, ids in prompts.items()):
        rows = []
        for request, ids in prompts.items():
            end = min(len(ids), done[request] + r.choice([0, 1, 1, 5, 19]))
            if end > done[request]:
                rows.append(Row(request, ids[done[request] : end], done[request], tables[request], end == len(ids)))
        r.shuffle(rows)
        if rows:
            for row, logits in zip(rows, bench.logits(rows), strict=True):
                parts[row.request_id].append(logits)
                done[row.request_id] += len(row.token_ids)
    for request, ids in prompts.items():
        torch.testing.assert_close(torch.cat(parts[request]), oracle(model, ids), atol=1e-4, rtol=1e-4)


def test_decoder_shared_prefix_blocks(tmp_path, backend):
    model = random_model("qwen3")
    bench = Bench(saved(model, tmp_path), backend)
    shared, first, second = ids_of(32, 1), ids_of(5, 2), ids_of(9, 3)
    bench.logits([Row(0, shared + first, 0, [5, 3, 8], True)])
    rows = [Row(1, second, 32, [5, 3, 20], True), Row(0, [42], 37, [5, 3, 8], True)]
    of_second, of_first = bench.logits(rows)
    torch.testing.assert_close(of_second, oracle(model, shared + second)[32:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(of_first, oracle(model, [*shared, *first, 42])[37:], atol=1e-4, rtol=1e-4)


def test_decoder_bfloat16_logits_close_in_any_batch(tmp_path, backend):
    model = random_model("qwen3").to(torch.bfloat16)
    bench = Bench(saved(model, tmp_path), backend, dtype=torch.bfloat16)
    ids = ids_of(30)
    [logits] = bench.logits([Row(0, ids, 0, list(range(8)), True)])
    reference = oracle(random_model("qwen3"), ids)
    theirs = (oracle(model, ids).float() - reference).abs().mean()
    assert (logits.float() - reference).abs().mean() < 1.5 * theirs  # error of transformers' bfloat16 to float32


def test_kv_cache_bytes_equal_block_bytes(tmp_path, backend):
    bench = Bench(saved(random_model("qwen3"), tmp_path), backend, block_size=32, num_blocks=5)
    taken = sum(tensor.nbytes for tensor in bench.cache.tensors)
    assert taken == 5 * block_bytes(bench.model.config, 32, torch.float32, backend)
    assert not any(tensor.any() for tensor in bench.cache.tensors)
