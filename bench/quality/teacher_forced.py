"""Teacher-forced agreement of a model in bfloat16 with transformers in float32 and in bfloat16.

    python bench/quality/teacher_forced.py MODEL [--texts FILE.jsonl] [--limit 40] [--tokens 160] [--budget 512]

The texts are the `turns` of a MT-Bench file if given, otherwise built-in ones. Each is formatted by the chat template
if the model has one, and continued greedily by transformers in float32. Then all three predict every position of prompt
and continuation. Prints the share of positions with float32's argmax, and the largest and mean logit difference.
npuserve runs as in the server: chunks of --budget tokens, several texts per step, a paged cache. Needs
`pip install npuserve[transformers]`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from npuserve.cli.acceptance.reference import forced_logits
from npuserve.kernels.registry import KernelSet
from npuserve.npu.backends import select
from npuserve.npu.execution.decoder import Model
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.rope import cos_sin_table

TEXTS = ["Write a function that reverses a string in Python.", "What is the capital of France?",
         "Explain why the sky is blue.", "def quicksort(items):", "请介绍一下长城。"]
BLOCK = 16


def texts_of(file: str | None, limit: int) -> list[str]:
    if file is None:
        return TEXTS[:limit]
    return [json.loads(line)["turns"][0] for line in Path(file).read_text().splitlines()][:limit]


def served_logits(folder: Path, sequences: list[list[int]], dtype: str, budget: int) -> list[torch.Tensor]:
    """Return [tokens, vocabulary] float32 logits of each sequence, computed as in the engine."""
    backend, config = select("cpu"), ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, getattr(torch, dtype), backend, lambda *_: None)
    cos_sin = cos_sin_table(config.rope, config.attention.head_dim, max(map(len, sequences)), backend.device)
    model = Model(config, weights, cos_sin, KernelSet(backend.kernels))
    return list(forced_logits(model, backend, sequences, budget, BLOCK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--budget", type=int, default=512)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    exact = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    sequences, golden = [], []
    with torch.inference_mode():
        for text in texts_of(args.texts, args.limit):
            if tokenizer.chat_template:
                text = tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, return_tensors="pt").input_ids
            made = exact.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.tokens,
                                  do_sample=False, repetition_penalty=1.0, pad_token_id=0)
            sequences.append(made[0].tolist())
            golden.append(exact(made).logits[0])
    del exact
    rough = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        theirs = [rough(torch.tensor([ids])).logits[0].float() for ids in sequences]
    del rough
    ours = served_logits(args.model, sequences, "bfloat16", args.budget)
    report: dict[str, object] = {"model": args.model.name, "positions": sum(map(len, sequences)), "budget": args.budget}
    for name, logits in (("transformers_bfloat16", theirs), ("npuserve_bfloat16", ours)):
        same = sum(int((a.argmax(-1) == g.argmax(-1)).sum()) for a, g in zip(logits, golden, strict=True))
        gaps = [(a - g).abs() for a, g in zip(logits, golden, strict=True)]
        report[name] = {
            "equal_argmax": round(same / sum(map(len, sequences)), 5),
            "largest_logit_difference": round(max(float(gap.max()) for gap in gaps), 4),
            "mean_logit_difference": round(sum(float(gap.sum()) for gap in gaps) / sum(g.numel() for g in gaps), 5)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
