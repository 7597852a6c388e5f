"""Families of other layers and states than those of published models, served and compared with plain torch."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.allocation import allocate_meta
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.step import SamplingParams
from npuserve.service import metrics
from tests.npu.execution.test_runner import load
from tests.support import constrained, toy_families
from tests.support.loop import Ask, serve

GREEDY = SamplingParams(temperature=0.0)
CONFIG = {"vocab_size": constrained.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
          "tie_word_embeddings": False, "dtype": "float32"}
ARCHITECTURES = "GappedForCausalLM", "SummingForCausalLM"
BLOCK = 16


def save(folder: Path, architecture: str, seed: int = 0) -> dict[str, Tensor]:
    """Write a model of random weights. Return its tensors."""
    data = {**CONFIG, "architectures": [architecture]}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, target in allocate_meta(ModelConfig.from_dict(data), torch.float32).targets.items():
        numbers = torch.randn(target.shapes[0], generator=generator)
        tensors[name] = numbers * 0.2 + 1 if numbers.dim() == 1 else numbers * 2 * numbers.shape[1] ** -0.5
    (folder / "config.json").write_text(json.dumps(data))
    save_file(tensors, folder / "model.safetensors")
    return tensors


class Oracle:
    """The models in plain torch, one whole sequence at a time."""

    def __init__(self, architecture: str, tensors: dict[str, Tensor]):
        self._architecture, self._tensors = architecture, tensors
        self.answer = functools.cache(self._answer)

    def _answer(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """Return the greedy tokens after a prompt."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self._logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def _logits(self, ids: list[int]) -> Tensor:
        of = self._tensors
        x = of["model.embed_tokens.weight"][ids]
        for index in range(4):
            prefix = f"model.layers.{index}."
            if self._architecture == "SummingForCausalLM" and index % 2:
                x = x + self._sums(prefix, self._norm(f"{prefix}input_layernorm", x))
            elif self._architecture == "SummingForCausalLM" or index != 2:
                x = x + self._attention(prefix, self._norm(f"{prefix}input_layernorm", x))
            y = self._norm(f"{prefix}post_attention_layernorm", x)
            gate, up = (F.linear(y, of[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, of[f"{prefix}mlp.down_proj.weight"])
        return F.linear(self._norm("model.norm", x), of["lm_head.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (32,), self._tensors[f"{name}.weight"], 1e-6)

    def _sums(self, prefix: str, x: Tensor) -> Tensor:
        total, outputs = torch.zeros(32), []
        for token in x:
            total = toy_families.DECAY * total + self._tensors[f"{prefix}mixer.gain"] * token
            outputs.append(total)
        return F.linear(torch.stack(outputs), self._tensors[f"{prefix}mixer.out_proj.weight"])

    def _attention(self, prefix: str, x: Tensor) -> Tensor:
        weights = [self._tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
        q, k, v = (F.linear(x, weight).view(len(x), -1, 8).transpose(0, 1) for weight in weights)
        angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (heads * cos + torch.cat([-heads[..., 4:], heads[..., :4]], dim=-1) * sin for heads in (q, k))
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        return F.linear(out.transpose(0, 1).flatten(1), self._tensors[f"{prefix}self_attn.o_proj.weight"])


@pytest.fixture(scope="module", params=ARCHITECTURES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Oracle]:
    folder = tmp_path_factory.mktemp("model")
    oracle = Oracle(request.param, save(folder, request.param))
    return load(folder, dtype="float32", max_num_batched_tokens=48), oracle


def ask(prompt: list[int], count: int, tick: int = 0, cancel: int | None = None, **fields: object) -> Ask:
    return Ask(tick, cancel, {"prompt_ids": prompt, "max_tokens": count, "sampling": GREEDY, **fields})


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of which a part begins with the same 40 tokens."""
    draw = random.Random(seed)
    shared = draw.choices(range(3, 250), k=40)
    return [[*(shared if draw.random() < 0.5 else ()), *draw.choices(range(3, 250), k=draw.randint(1, 60))]
            for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("pool", "seats", "budget"), [(64, 8, 48), (64, 3, 5), (9, 8, 16), (8, 2, 1)])
def test_tokens_equal_plain_torch(
    served: tuple[Runner, Oracle], depth: int, pool: int, seats: int, budget: int
) -> None:
    """Requests come and go, in chunks, with prefix hits, and with preemption where blocks are few."""
    runner, oracle = served
    chosen = prompts(14)
    asks = [ask(prompt, 24, index // 2, 30 if index == 5 else None) for index, prompt in enumerate(chosen)]
    answers, scheduler = serve(runner, asks, depth, pool, seats, budget)
    for index, (prompt, answer) in enumerate(zip(chosen, answers, strict=True)):
        expected = oracle.answer(tuple(prompt), 24)
        assert answer.tokens == expected[: len(answer.tokens)]
        assert len(answer.tokens) == 24 or index == 5
    assert scheduler.memory.prefix_hits > 0
    assert (scheduler.preemptions > 0) == (pool == 9)


def test_samples_of_a_call_share_the_prompt(served: tuple[Runner, Oracle]) -> None:
    runner, oracle = served
    (prompt,) = prompts(1, seed=5)
    asks = [ask(prompt * 2, 8, request_id="call", index=index, samples=3) for index in range(3)]
    answers, scheduler = serve(runner, asks, 2, 64, 8, 48)
    assert [answer.tokens for answer in answers] == [oracle.answer(tuple(prompt * 2), 8)] * 3
    assert scheduler.slots is None or scheduler.slots.num_checkpoints


def test_request_of_a_dead_engine_continues(served: tuple[Runner, Oracle]) -> None:
    runner, oracle = served
    (prompt,) = prompts(1, seed=6)
    expected = oracle.answer(tuple(prompt), 16)
    (answer,), _ = serve(runner, [ask(prompt, 16, output_ids=expected[:7])], 2, 64, 8, 16)
    assert expected[:7] + answer.tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("mask_seconds", [0.0, 0.0005])
@pytest.mark.parametrize("pool", [64, 6])
def test_deferred_rows_advance_no_state_twice(
    served: tuple[Runner, Oracle], mask_seconds: float, pool: int
) -> None:
    runner, _ = served
    alone = constrained.expected_by(runner, 64)
    cases = constrained.cases(BLOCK)
    deferred = metrics.deferred_rows_total._value.get()
    found, _ = constrained.answered(
        runner, cases, alone, depth=2, pool=pool, seats=8, budget=48, mask_seconds=mask_seconds)
    assert found == [alone(case) for case in cases]
    assert mask_seconds or metrics.deferred_rows_total._value.get() > deferred
