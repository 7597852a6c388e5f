"""Small random model and requests to it, for tests that cannot import transformers."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from npuserve.npu.execution.runner import Runner
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.step import PENDING, NewRequest, Row, SamplingParams, Step, StepResult

GREEDY = SamplingParams(temperature=0.0)


def saved(
    folder: Path | str, *, head_dim: int = 32, layers: int = 2, vocabulary: int = 100, inner: int = 96, seed: int = 0
) -> Path:
    """Save a float32 Qwen3 with 2 KV heads."""
    sizes = {"hidden_size": 64, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": head_dim, "vocab_size": vocabulary, "max_position_embeddings": 512}
    config = {**sizes, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "torch_dtype": "float32"}
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5

    def norm(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * 0.3 + 1

    hidden, heads, kv = 64, 4 * head_dim, 2 * head_dim
    tensors = {"model.embed_tokens.weight": normal(vocabulary, hidden), "model.norm.weight": norm(hidden)}
    for layer in range(layers):
        own = {
            "input_layernorm": norm(hidden), "post_attention_layernorm": norm(hidden),
            "self_attn.q_proj": normal(heads, hidden), "self_attn.k_proj": normal(kv, hidden),
            "self_attn.v_proj": normal(kv, hidden), "self_attn.o_proj": normal(hidden, heads),
            "self_attn.q_norm": norm(head_dim), "self_attn.k_norm": norm(head_dim),
            "mlp.gate_proj": normal(inner, hidden), "mlp.up_proj": normal(inner, hidden),
            "mlp.down_proj": normal(hidden, inner),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in own.items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def saved_w8a8(folder: Path, **sizes: Any) -> Path:
    """Save the same model in W8A8, quantized as by `npuserve quantize`."""
    quantize_checkpoint(saved(folder / "floats", **sizes), folder / "w8a8")
    return folder / "w8a8"


def ids_of(length: int, seed: int = 0, vocabulary: int = 100) -> list[int]:
    return random.Random(seed).choices(range(vocabulary), k=length)


Mask = Callable[[list[int]], "np.ndarray[Any, Any]"]
"""Function from a request's generated ids to the mask of its next token."""


@dataclass
class Ask:
    """Request for `count` tokens after `prompt`, added at step `at`. mask: constrains its tokens."""

    prompt: list[int]
    count: int
    sampling: SamplingParams = GREEDY
    at: int = 0
    mask: Mask | None = None
    tokens: list[int] = field(default_factory=list)
    done: int = 0
    sampled: int = 0


def asks(number: int, count: int, **sampling: Any) -> list[Ask]:
    """Return requests with prompts of different lengths, added one after the other."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(number):
        prompt = torch.randint(100, (3 + 11 * index,), generator=generator).tolist()
        made.append(Ask(prompt, count + index, SamplingParams(seed=index, **({"temperature": 0.0} | sampling)), index))
    return made


def bits_of(ids: Iterable[int], vocabulary: int = 100) -> np.ndarray[Any, Any]:
    """Return the mask that allows `ids`."""
    allowed = np.zeros(-(-vocabulary // 32), np.uint32)
    for i in ids:
        allowed[i // 32] |= np.uint32(1 << i % 32)
    return allowed.view(np.int32)


def masked(seed: int, vocabulary: int = 100) -> Mask:
    """Return masks of a few ids, which depend on all generated ids; every fourth allows one id."""

    def ids(generated: list[int]) -> np.ndarray[Any, Any]:
        chosen = random.Random(repr((seed, generated)))
        return bits_of(chosen.sample(range(vocabulary), chosen.choice((1, 5, 20, 60))), vocabulary)

    return ids


def sampled_asks(number: int, count: int) -> list[Ask]:
    """Return requests as `asks`, of which every second is sampled and every third has masks."""
    made = asks(number, count)
    for index, ask in enumerate(made):
        if index % 2 == 0:
            ask.sampling = SamplingParams(seed=index, temperature=0.9, top_k=20, repetition_penalty=1.2)
        if index % 3 == 2:
            ask.mask = masked(index)
    return made


def answers(
    runner: Runner, requests: list[Ask], *, chunk: int = 9, in_flight: int = 2
) -> tuple[list[list[int]], list[StepResult]]:
    """Return the ids of each request and the results of all steps.

    As in the engine, a step is launched while the previous one is in flight, with PENDING tokens. Then the previous one
    is collected, and the launched one gets its masks.
    """
    blocks = min(-(-512 // runner.block_size), runner.num_blocks // len(requests))
    assert all(len(ask.prompt) + ask.count <= blocks * runner.block_size for ask in requests)
    flying: deque[tuple[Any, list[int]]] = deque()
    results: list[StepResult] = []

    def collect() -> None:
        launched, expected = flying.popleft()
        results.append(runner.collect(launched))
        assert sorted(results[-1].token_ids) == sorted(expected)
        for key, sampled in results[-1].token_ids.items():
            requests[key].tokens += sampled

    step = 0
    while True:
        rows, new = [], []
        for key, ask in enumerate(requests):
            if step < ask.at or ask.sampled == ask.count:
                continue
            if step == ask.at:
                ask.tokens = list(ask.prompt)
                new.append(NewRequest(key, ask.prompt, [], ask.sampling))
            length = len(ask.prompt) + ask.sampled
            end = min(length, ask.done + chunk)
            ids = ask.tokens[ask.done : end]
            ids += [PENDING] * (end - ask.done - len(ids))
            own = list(range(key * blocks, (key + 1) * blocks))
            rows.append(Row(key, ids, ask.done, own, end == length,
                            is_constrained=end == length and ask.mask is not None,
                            state_slot=key if runner.num_slots else -1))
            ask.done, ask.sampled = end, ask.sampled + (end == length)
        step += 1
        if rows:
            flying.append((runner.launch(Step(rows, new)), [row.request_id for row in rows if row.samples]))
        if not flying:
            return [ask.tokens[len(ask.prompt) :] for ask in requests], results
        if len(flying) == 2 or not rows:
            collect()
        if masks := {row.request_id: mask(requests[row.request_id].tokens[len(requests[row.request_id].prompt) :])
                     for row in rows if row.is_constrained and (mask := requests[row.request_id].mask)}:
            assert not runner.ready(flying[-1][0])
            runner.sample(flying[-1][0], masks)
        if in_flight == 1 and flying:
            collect()
