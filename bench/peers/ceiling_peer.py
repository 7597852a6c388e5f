"""Ceiling of the machine: tokens per second of a model that only reads and multiplies at the machine's current limits.

A step takes the longer of two times. Reading: all weights once, the keys and values of all rows, and nothing of an
embedding that is separate from the LM head. Multiplying: the linear layers, causal attention, and the LM head for rows
that sample. Both in bfloat16. Needs npuserve. See harness.py.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import harness

from npuserve.cli.bench.kernels import set_threads
from npuserve.kernels.bench.ceilings import Ceilings

ITEM = 2  # bytes of a bfloat16
PASSES = 5


def work(config: dict[str, Any], measure: harness.Measure) -> tuple[float, float]:
    """Return bytes and operations of a step of the measure; a multiply-add is two operations."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    linear = layers * (2 * hidden * (queries + keys) + 3 * hidden * config["intermediate_size"])
    table = hidden * config["vocab_size"]
    context = measure.rows * measure.context
    pairs = context if measure.decode else context * (measure.context + 1) / 2
    tokens = measure.rows if measure.decode else context
    return (ITEM * (linear + table + 2 * layers * keys * context),
            2 * linear * tokens + 2 * table * measure.rows + 4 * layers * queries * pairs)


class Ceiling(harness.Contestant):
    name, version = "ceiling", ""

    def __init__(self, args: argparse.Namespace) -> None:
        set_threads(args.threads)
        self.config = json.loads((args.model / "config.json").read_text())
        self.ceilings = Ceilings()

    def sample(self, measure: harness.Measure, prompts: list[list[int]], tokens: int) -> harness.Sample:
        clock = harness.Clock(-1)
        read = max(self.ceilings.read() for _ in range(PASSES))
        multiply = max(self.ceilings.peak("bf16") for _ in range(PASSES))
        clock.tick()
        data, operations = work(self.config, measure)
        done = measure.rows if measure.decode else measure.context
        return {"value": done / max(data / read, operations / multiply), "others": clock.end()[1],
                "read_gbs": read / 1e9, "bf16_gflops": multiply / 1e9}


if __name__ == "__main__":
    harness.main(Ceiling)
