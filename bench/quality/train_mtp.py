"""Train a small hybrid (Qwen3.5) with a head for multi-token prediction (MTP) on stories of the built-in model.

    python -m bench.quality.train_mtp sample --out stories.jsonl --stories 6000
    python -m bench.quality.train_mtp fit    --stories stories.jsonl --out FOLDER --minutes 35
    python bench/engine/speculation.py FOLDER --workloads story --modes off mtp auto --temperature 0.8

The first two commands take 40 minutes of two cores with these numbers; `fit --minutes 1` on 300 stories is a trial.
Model and head are trained with transformers. The last command measures acceptance by depth and tokens a second.

`fit` trains the model and the head together. The head learns two depths: its own output takes the place of the model's
hidden state for the second one, as when it drafts. The weight of its loss is HEAD_WEIGHT.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.quality.train_storyteller import HELD_OUT, VOCABULARY, loops, pack, read_stories
from npuserve import LLM, SamplingParams
from npuserve.npu import storyteller

CONTEXT = 2048
DEPTHS = 2
HEAD_WEIGHT = 0.3
NAMES = {"layers.0.enorm.": "pre_fc_norm_embedding.", "layers.0.hnorm.": "pre_fc_norm_hidden.",
         "layers.0.eh_proj.": "fc.", "layers.0.post_norm.": "norm.", "layers.0.mtp_block.": "layers.0."}
"""Beginning of the name of a head's tensor in transformers -> in a checkpoint, after `mtp.`."""


def checkpoint_tensors(head: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a head of transformers by their names in a checkpoint."""
    return {f"mtp.{of_checkpoint}{name.removeprefix(begin)}": tensor
            for name, tensor in head.state_dict().items()
            for begin, of_checkpoint in NAMES.items() if name.startswith(begin)}


def command_sample(args: argparse.Namespace) -> None:
    """Write stories that the built-in model samples at temperature 0.8."""
    began = time.time()
    with args.out.open("w") as out, LLM(threads=args.threads) as llm:
        for first in range(0, args.stories, args.batch):
            seeds = range(first, min(first + args.batch, args.stories))
            outputs = llm.generate(
                [{"prompt_token_ids": [0]}] * len(seeds),
                [SamplingParams(temperature=0.8, max_tokens=args.length, seed=seed) for seed in seeds])
            for output in outputs:
                story = output.outputs[0]
                if (text := story.text.strip()) and not loops(text):
                    out.write(json.dumps({"text": text, "ended": story.finish_reason == "stop"}) + "\n")
            print(f"{seeds.stop} stories, {time.time() - began:.0f} s", flush=True)


def make_models() -> tuple[Any, Any]:
    """Return a hybrid with random weights, and a head for it."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.modeling_layers import MtpModel

    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, full_attention_interval=4, linear_num_key_heads=4,
        linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64, linear_conv_kernel_dim=4,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                         "mrope_section": [4, 2, 2], "mrope_interleaved": True})
    config.num_mtp_layers = 1
    config.mtp_layer_types = ["full_attention"]
    model = Qwen3_5ForCausalLM(config)
    return model, MtpModel(model, 1)


def losses(model: Any, head: Any, batch: torch.Tensor) -> list[torch.Tensor]:
    """Return the loss of the model, and of the head at each depth. batch: [rows, tokens] of ids."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(batch, use_cache=False).last_hidden_state
        result = [_loss(model.lm_head(hidden[:, :-1]), batch[:, 1:])]
        for depth in range(1, DEPTHS + 1):
            hidden = hidden[:, :-1]
            positions = torch.arange(depth, batch.shape[1])[None].expand(len(batch), -1)
            hidden = head.forward_layer(0, hidden, positions, None, input_ids=batch[:, depth:])
            result.append(_loss(model.lm_head(hidden[:, :-1]), batch[:, depth + 1 :]))
    return result


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def command_fit(args: argparse.Namespace) -> None:
    """Train for a fixed number of minutes: Muon for the matrices, AdamW for the rest, warm-up and linear decay."""
    from tokenizers import Tokenizer

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(storyteller.FOLDER / "tokenizer.json"))
    stories = read_stories(args.stories, tokenizer)
    held_out = stories[: min(HELD_OUT, len(stories) // 10)]
    model, head = make_models()
    shared = {id(parameter) for parameter in model.parameters()}
    named = [*model.named_parameters(), *((name, parameter) for name, parameter in head.named_parameters()
                                          if id(parameter) not in shared)]
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    others = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    optimizers = [torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01),
                  torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)]
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    windows = pack(lambda: stories[len(held_out) :], args.length, 0)
    validation = pack(lambda: held_out, args.length, 0)
    check = torch.tensor([next(validation) for _ in range(8)])
    began = time.time()
    step = 0
    while (done := (time.time() - began) / (60 * args.minutes)) < 1:
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 50, 2 * (1 - done))
        batch = torch.tensor([next(windows) for _ in range(args.rows)])
        of_model, *of_head = losses(model, head, batch)
        (of_model + HEAD_WEIGHT * sum(of_head)).backward()
        torch.nn.utils.clip_grad_norm_([parameter for _, parameter in named], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % args.report == 0:
            with torch.no_grad():
                said = "  ".join(f"{loss.item():.3f}" for loss in losses(model, head, check))
            print(f"step {step}  {step * batch.numel() / 1e6:.2f} M tokens  {time.time() - began:.0f} s  "
                  f"held out, model and head by depth: {said}", flush=True)
    save(model, head, args.out)


def save(model: Any, head: Any, out: Path) -> None:
    """Write model and head in bfloat16, with the tokenizer of the built-in model."""
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in checkpoint_tensors(head).items()}
    model.to(torch.bfloat16).save_pretrained(out)
    file = out / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(storyteller.FOLDER / name, out / name)
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    sample = commands.add_parser("sample", help="sample stories from the built-in model")
    sample.add_argument("--out", type=Path, required=True)
    sample.add_argument("--stories", type=int, default=6000)
    sample.add_argument("--batch", type=int, default=256)
    sample.add_argument("--length", type=int, default=250, help="most tokens of a story")
    sample.add_argument("--threads", type=int, default=2)
    sample.set_defaults(run=command_sample)
    fit = commands.add_parser("fit", help="train model and head on sampled stories")
    fit.add_argument("--stories", required=True)
    fit.add_argument("--out", type=Path, required=True)
    fit.add_argument("--minutes", type=float, default=35)
    fit.add_argument("--rows", type=int, default=8, help="windows per step")
    fit.add_argument("--length", type=int, default=256, help="tokens per window")
    fit.add_argument("--report", type=int, default=50, help="steps between two lines")
    fit.add_argument("--threads", type=int, default=2)
    fit.set_defaults(run=command_fit)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
