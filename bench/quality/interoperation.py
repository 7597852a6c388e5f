"""W8A8 checkpoints computed by npuserve and by transformers with compressed-tensors, both in float32.

    python bench/quality/interoperation.py MODEL QUANTIZED [--tokens 1024]

QUANTIZED is made from MODEL by `npuserve quantize`. A second checkpoint is made from MODEL by compressed-tensors,
rounded to nearest. Prints for each the largest and mean logit difference and the share of equal argmax: npuserve
against transformers, and, for comparison, transformers against MODEL unquantized. Needs `pip install npuserve[test]`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.quality.quality import Bench, Format, held_out
from tests.support.quantized import save_quantized, scheme


@torch.inference_mode()
def transformers_logits(folder: Path, sequences: list[list[int]]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return torch.cat([model(torch.tensor([ids])).logits[0] for ids in sequences])


def gap(a: Tensor, b: Tensor) -> dict[str, float]:
    difference = (a - b).abs()
    return {"largest": round(float(difference.max()), 5), "mean": round(float(difference.mean()), 6),
            "equal_argmax": round(float((a.argmax(-1) == b.argmax(-1)).float().mean()), 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("quantized", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    texts = held_out(args.model, args.tokens, 128)
    sequences = [ids for text in texts.values() for ids in text]
    whole = transformers_logits(args.model, sequences)
    with tempfile.TemporaryDirectory() as name:
        made = save_quantized(AutoModelForCausalLM.from_pretrained(args.model), Path(name) / "made", scheme("dynamic"))
        for folder, by in ((args.quantized, "npuserve quantize"), (made, "compressed-tensors")):
            bench = Bench({"model": folder}, {}, 512, Path(name))
            ours = torch.cat(list(bench.logits(Format("", "model", "float32"), sequences)))
            theirs = transformers_logits(folder, sequences)
            print(json.dumps({"made_by": by, "positions": len(ours), "ours_theirs": gap(ours, theirs),
                              "theirs_unquantized": gap(theirs, whole)}), flush=True)


if __name__ == "__main__":
    main()
