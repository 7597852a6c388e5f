"""Memory of each rank and time to load, by the number of ranks (tensor parallelism).

    python bench/engine/ranks.py [MODEL] [--ranks 1,2] [-- npuserve serve flags]

Prints one JSON object per number of ranks N:

    ready_seconds       from the start of the server to readiness; compare it on an idle machine, in the second run
    predicted_bytes     weights of a rank by `npuserve check --tensor-parallel-size N`
    expected_bytes      1/N of the weights of one rank, and what each rank has whole: norms and the table of positions
    weights_bytes       resident weights of each rank, measured; null where they are not in a file in memory
    peak_bytes          peak of each rank's process, all included, beside check's prediction (predicted_peak_bytes)

Exits with 1 if a rank's predicted or measured weights exceed the expected by more than 2 %. Measured weights are in
pages of 2 MiB, so they may exceed it by two of them besides. If N exceeds the model's key and value heads, several
ranks have the same heads, and the bound is missed by their bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.footprint import measure
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.storage import array_bytes
from npuserve.npu.storyteller import FOLDER

LIMIT = 0.02
PAGES_BYTES = 2 * (2 << 20)


def expected_bytes(alone: int, replicated: int, ranks: int) -> int:
    """Return the weights of a rank in bytes. alone: of one rank. replicated: what each rank has whole."""
    return (alone - replicated) // ranks + replicated


def replicated_bytes(folder: Path, check: dict[str, Any]) -> int:
    """Return the bytes that each rank has whole. check: output of `npuserve check --json`, with its `model`."""
    config, plan = ModelConfig.from_folder(folder), check["model"]
    return array_bytes(config, getattr(torch, plan["dtype"])) + 4 * plan["max_model_len"] * config.rotary_dim


def row(ranks: int, found: dict[str, Any], expected: int) -> dict[str, Any]:
    """Return what is printed. found: from `measure`. `within`: whether no weights exceed the limit."""
    processes = [found["processes"][name] for name in ("engine", *(f"rank-{rank}" for rank in range(1, ranks)))]
    plan = found["check"]["model"]
    weights = [process["weights_bytes"] or None for process in processes]
    return {
        "ranks": ranks, "ready_seconds": found["ready_seconds"], "expected_bytes": expected,
        "predicted_bytes": plan["bytes"]["weights"], "weights_bytes": weights,
        "predicted_peak_bytes": plan["peak_bytes"], "peak_bytes": [process["peak_bytes"] for process in processes],
        "within": plan["bytes"]["weights"] <= expected * (1 + LIMIT)
        and all(size is None or size <= expected * (1 + LIMIT) + PAGES_BYTES for size in weights)}


def main() -> int:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("model", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, the first 1")
    parser.add_argument("flags", nargs="*", help="of npuserve serve, after --")
    args = parser.parse_args()
    numbers = [int(number) for number in args.ranks.split(",")]
    if numbers[0] != 1:
        parser.error("--ranks: must begin with 1, to which the others are compared")
    rows: list[dict[str, Any]] = []
    for ranks in numbers:
        # The form of the weights is fixed, since each server would choose by its own measurement.
        flags = ["--tensor-parallel-size", str(ranks), "--cpu-weights", "plain", *args.flags]
        found = measure([str(args.model), *flags])
        whole = replicated_bytes(args.model, found["check"])
        alone = rows[0]["predicted_bytes"] if rows else found["check"]["model"]["bytes"]["weights"]
        rows.append(row(ranks, found, expected_bytes(alone, whole, ranks)))
        print(json.dumps(rows[-1]), flush=True)
    return 0 if all(made["within"] for made in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
