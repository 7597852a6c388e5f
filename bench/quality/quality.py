"""Loss of quality by int8 and 4 bits: formats of a model compared with float32, on texts not used for calibration.

    python bench/quality/quality.py MODEL [--rounded FOLDER] [--balanced FOLDER] [--int4-rounded FOLDER] [--int4 FOLDER]
        [--checkpoint NAME FOLDER ...] [--tokens 8192] [--json]

The texts are every other topic of Python's help, which `npuserve quantize` does not use, and sources of Python's
standard library. Both are cut into sequences of --length tokens; the runner predicts each position on the CPU. Prints
for each format the perplexity, also in float32, and the share of positions with float32's argmax. Also prints the mean
KL divergence from float32 in nats, and the largest logit difference. --rounded and --balanced are checkpoints of
`npuserve quantize` with and without --calibration none, --int4-rounded and --int4 those of --scheme w4a16 with groups
of 32; they are made where not given. --checkpoint adds another one, such as of from_gguf.py or from_openvino.py; it
has the model's ids.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npuserve.cli.acceptance.reference import forced_logits
from npuserve.cli.quantize import SAMPLE_TOKENS, SAMPLES, calibration_ids, topics
from npuserve.kernels.registry import KernelSet
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.decoder import Model
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.rope import cos_sin_table
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.quantize.rounding import Int4Rounding, Int8Rounding
from npuserve.service.text.tokenizer_loader import load_tokenizer

MODULES = ("argparse", "ast", "dataclasses", "difflib", "enum", "functools", "inspect", "logging", "textwrap", "typing")


@dataclass(frozen=True)
class Format:
    """Types of weights, KV cache and LM head to measure. checkpoint: its name. dtype: of activations."""

    name: str
    checkpoint: str
    dtype: str = "bfloat16"
    kv_cache: str = "auto"
    lm_head: str = "auto"


FORMATS = (
    Format("bf16", "model"),
    Format("bf16, int8 KV", "model", kv_cache="int8"),
    Format("bf16, int8 LM head", "model", lm_head="int8"),
    Format("W8A8 rounded", "rounded"),
    Format("W8A8", "balanced"),
    Format("W8A8, int8 KV", "balanced", kv_cache="int8"),
    Format("W8A8, int8 LM head", "balanced", lm_head="int8"),
    Format("W8A8, int8 KV and LM head", "balanced", kv_cache="int8", lm_head="int8"),
    Format("W4A16 rounded", "int4_rounded"),
    Format("W4A16", "int4"),
    Format("W4A16, int8 LM head", "int4", lm_head="int8"),
)


@dataclass
class Sums:
    """Sums over the positions of one text."""

    loss: float = 0.0
    divergence: float = 0.0
    largest: float = 0.0
    equal: int = 0
    predicted: int = 0
    positions: int = 0

    def add(self, logits: Tensor, exact: Tensor, ids: Sequence[int]) -> None:
        """Add positions. logits, exact: [T, V] float32, of the format and of float32."""
        target = torch.tensor(ids[1:])
        logs, exact_logs = logits.log_softmax(-1), exact.log_softmax(-1)
        self.loss -= float(logs[:-1].gather(1, target[:, None]).sum())
        self.divergence += float((exact_logs.exp() * (exact_logs - logs)).sum())
        self.largest = max(self.largest, float((logits - exact).abs().max()))
        self.equal += int((logits.argmax(-1) == exact.argmax(-1)).sum())
        self.predicted += len(target)
        self.positions += len(ids)

    def report(self, exact: Sums) -> dict[str, float]:
        return {"perplexity": round(math.exp(self.loss / self.predicted), 4),
                "beside_float32": round(math.exp((self.loss - exact.loss) / self.predicted), 5),
                "equal_argmax": round(self.equal / self.positions, 4),
                "divergence": round(self.divergence / self.positions, 5),
                "largest_logit_difference": round(self.largest, 3)}


@dataclass
class Bench:
    folders: dict[str, Path]
    texts: dict[str, list[list[int]]]
    budget: int
    scratch: Path
    exact: dict[str, Sums] = field(default_factory=dict)

    def logits(self, format: Format, sequences: list[list[int]]) -> Iterator[Tensor]:
        backend = CpuBackend()
        config = ModelConfig.from_folder(self.folders[format.checkpoint], format.lm_head)  # type: ignore[arg-type]
        weights = load_weights(self.folders[format.checkpoint], config, getattr(torch, format.dtype), backend,
                               lambda *_: None)
        cos_sin = cos_sin_table(config.rope, config.attention.head_dim, max(map(len, sequences)), backend.device)
        model = Model(config, weights, cos_sin, KernelSet(backend.kernels))
        cache = torch.int8 if format.kv_cache == "int8" else None
        yield from forced_logits(model, backend, sequences, self.budget, cache_dtype=cache)

    def keep_exact(self) -> None:
        """Write float32's logits to files, since they may be larger than memory."""
        for text, sequences in self.texts.items():
            sums = self.exact[text] = Sums()
            for index, logits in enumerate(self.logits(Format("float32", "model", "float32"), sequences)):
                sums.add(logits, logits, sequences[index])
                torch.save(logits, self.scratch / f"{text}-{index}.pt")

    def run(self, format: Format) -> dict[str, Any]:
        report: dict[str, Any] = {"format": format.name}
        for text, sequences in self.texts.items():
            sums = Sums()
            for index, logits in enumerate(self.logits(format, sequences)):
                sums.add(logits, torch.load(self.scratch / f"{text}-{index}.pt"), sequences[index])
            report[text] = sums.report(self.exact[text])
        return report


def held_out(folder: Path, tokens: int, length: int) -> dict[str, list[list[int]]]:
    """Return text name -> sequences of `length` ids, `tokens` ids in total."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer, "the model must have a tokenizer"
    sources = [inspect.getsource(__import__(name)) for name in MODULES]
    found = {}
    for name, texts in (("help", topics()[1::2]), ("code", sources)):
        ids = tokenizer.encode("\n\n".join(texts), add_special_tokens=False)
        pieces = [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
        count = min(len(pieces), max(1, tokens // length // 2))
        found[name] = [pieces[place * len(pieces) // count] for place in range(count)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounded", type=Path)
    parser.add_argument("--balanced", type=Path)
    parser.add_argument("--int4-rounded", type=Path)
    parser.add_argument("--int4", type=Path)
    parser.add_argument("--checkpoint", nargs=2, action="append", default=[], metavar=("NAME", "FOLDER"))
    names = [format.name for format in FORMATS]
    parser.add_argument("--formats", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folders = {"model": args.model, "rounded": args.rounded, "balanced": args.balanced,
                   "int4_rounded": args.int4_rounded, "int4": args.int4,
                   **{name: Path(folder) for name, folder in args.checkpoint}}
        for kind in {format.checkpoint for format in FORMATS if format.name in args.formats}:
            if folders[kind] is None:
                folders[kind] = scratch / kind
                sequences = [] if "rounded" in kind else calibration_ids(args.model, "", SAMPLES, SAMPLE_TOKENS)
                quantize_checkpoint(args.model, folders[kind], sequences,
                                    rounding=Int4Rounding(32) if "int4" in kind else Int8Rounding())
        bench = Bench(folders, held_out(args.model, args.tokens, args.length), args.budget, scratch)
        bench.keep_exact()
        exact = {text: sums.report(sums) for text, sums in bench.exact.items()}
        show({"format": "float32"} | exact, args.json)
        others = [Format(name, name) for name, _ in args.checkpoint]
        for format in (*(each for each in FORMATS if each.name in args.formats), *others):
            show(bench.run(format), args.json)


def show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report), flush=True)
        return
    print(report["format"])
    for text, found in report.items():
        if text != "format":
            parts = (f"{key.replace('_', ' ')} {value}" for key, value in found.items())
            print(f"  {text:5}", *parts, sep="  ", flush=True)


if __name__ == "__main__":
    main()
