"""Greedy answers in float32 through the runner compared with transformers on the same device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gpu_parts.driver import BenchRequest, Driver, blocks_of, reopened, runner_of
from gpu_parts.worker import Context, Units
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.loader import load_weights
from npuserve.npu.storyteller import FOLDER

PROMPTS = ("Once upon a time", "The little dog was sad because", "Lily and Tom went to the park. They saw a big",
           "One day a girl found a key under the old tree and wanted to know what it was for. She", "A bird",
           "In the morning the sun", "Mom said to the boy that he", "There was a cat who liked to sleep all day")
BUDGET = 48
"""Tokens per step, so that prompts run in chunks beside decode rows."""


def units(context: Context) -> Units:
    for folder in (FOLDER, *context.args.model):
        name = "built-in storyteller" if folder == FOLDER else folder.resolve().name
        yield name, _unit(context, folder, name)


def _unit(context: Context, folder: Path, name: str) -> Callable[[], Iterator[dict[str, Any]]]:
    def run() -> Iterator[dict[str, Any]]:
        count = 16 if context.quick else 64
        config = ModelConfig.from_folder(folder)
        prompts = _prompts(folder, config.vocab_size, random.Random(context.args.seed))
        if context.toy:  # the interpreter takes seconds per step
            prompts, count = [prompt[:6] for prompt in prompts[:2]], 5
        ours, captured = _ours(context, folder, config, prompts, count)
        theirs, gaps = _theirs(context, folder, prompts, count)
        differ = [(row, next(i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b))
                  for row, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y]
        yield {"table": "Tokens: greedy in float32 beside transformers on the device", "model": name,
               "prompts": len(prompts), "tokens each": count, "equal answers": len(prompts) - len(differ),
               "captured decodes": captured, "ok": not differ,
               "first difference": "; ".join(f"prompt {r} token {t}, gap of their logits {gaps[r][t]:.1e}"
                                             for r, t in differ[:3])}

    return run


def _prompts(folder: Path, vocabulary: int, chance: random.Random) -> list[list[int]]:
    """Return prompts of text if there is a tokenizer, and random ids for the rest."""
    found: list[list[int]] = []
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        found = [made.ids for made in Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(list(PROMPTS))]
    return [ids or [chance.randrange(3, vocabulary) for _ in range(5 + 7 * i)]
            for i, ids in enumerate(found or [[] for _ in PROMPTS])]


def _ours(context: Context, folder: Path, config: ModelConfig, prompts: list[list[int]], count: int
          ) -> tuple[list[list[int]], int]:
    """Return the answers, and the number of captured decode tokens."""
    backend = context.backend
    weights = load_weights(folder, config, torch.float32, backend, lambda *_: None)
    length = max(map(len, prompts)) + count
    blocks = blocks_of(len(prompts), length, backend.capabilities.block_size)
    budget = 8 if context.toy else BUDGET
    backend = reopened(backend, decode_buckets=(1, len(prompts)))
    runner = runner_of(backend, weights, config, len(prompts), length, budget)
    requests = [BenchRequest(prompt, count, own, number=number)
                for number, (prompt, own) in enumerate(zip(prompts, blocks, strict=True))]
    steps = [step.result for step in Driver(runner, requests, budget).run()]
    captured = sum(result.captured_decodes + result.decoder_decodes for result in steps)
    return [request.answer for request in requests], captured


@torch.inference_mode()
def _theirs(context: Context, folder: Path, prompts: list[list[int]], count: int
            ) -> tuple[list[list[int]], list[list[float]]]:
    """Return the answers, and the gap of each token's logit to the second largest."""
    from transformers import AutoModelForCausalLM

    device = context.backend.device
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.to(device).eval()
    answers: list[list[int]] = []
    gaps: list[list[float]] = []
    for prompt in prompts:
        past, ids = None, torch.tensor([prompt], device=device)
        answer, gap = [], []
        for _ in range(count):
            out = model(ids, past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, out.logits[0, -1].float()
            best = logits.topk(2)
            answer.append(int(logits.argmax()))
            gap.append(float(best.values[0] - best.values[1]))
            ids = torch.tensor([answer[-1:]], device=device)
        answers.append(answer)
        gaps.append(gap)
    return answers, gaps
