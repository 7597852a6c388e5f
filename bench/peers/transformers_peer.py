"""transformers' generate in bfloat16. See harness.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import harness
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria


class Tick(StoppingCriteria):
    """Criterion that never stops and calls `tick` after each token."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.tick = tick

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.tick()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers(harness.Generator):
    name, version = "transformers", transformers.__version__

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
        self.model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    def run(self, prompts: list[list[int]], steps: int, tick: Callable[[], None]) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1 + steps,
                                stopping_criteria=[Tick(tick)])


if __name__ == "__main__":
    harness.main(Transformers)
