"""Ceiling of the machine: tokens per second of a model that only reads and multiplies at the machine's current limits.

A step takes the longer of two times. Moving: all weights, the keys and values of all rows and the states of gated delta
net are read once, and the states are written once; nothing of an embedding that is separate from the LM head is read.
Of the experts of a mixture those are read that as many random tokens are expected to choose.
Multiplying: the linear layers, causal attention, and the LM head for rows that sample in bfloat16, and the recurrence
of gated delta net in float32. States are float32, all other numbers bfloat16. Needs npuserve. See harness.py.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import harness

from npuserve.cli.bench.kernels import set_threads
from npuserve.kernels.bench.ceilings import Ceilings
from npuserve.kernels.routing import distinct_experts

ITEM, STATE_ITEM = 2, 4  # bytes of a bfloat16, and of a float32
PASSES = 5
OPERATIONS_OF_STATE = 7
"""Operations of a token for each number of a state: decay, two products with a vector, sum with an outer product."""


@dataclass(frozen=True)
class Work:
    """Work of a step. moved: bytes. products, recurrence: operations in bfloat16 and in float32."""

    moved: float
    products: float
    recurrence: float


def work(config: dict[str, Any], measure: harness.Measure) -> Work:
    """Return the work of a step of the measure; a multiply-add is two operations."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    attentions = config["layer_types"].count("full_attention") if "layer_types" in config else layers
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    gates = queries if config.get("attn_output_gate") else 0
    tokens = measure.rows if measure.decode else measure.rows * measure.context
    linear = attentions * hidden * (2 * (queries + keys) + gates)
    if experts := config.get("num_experts"):
        chosen = config["num_experts_per_tok"]
        of_expert = layers * 3 * hidden * config["moe_intermediate_size"]
        linear += layers * hidden * experts
        multiplied, read = chosen * of_expert, distinct_experts(tokens, chosen, experts, experts) * of_expert
    else:
        multiplied = read = layers * 3 * hidden * config["intermediate_size"]
    state = 0
    if attentions < layers:
        value_heads, key_dim = config["linear_num_value_heads"], config["linear_key_head_dim"]
        values = value_heads * config["linear_value_head_dim"]
        state = (layers - attentions) * values * key_dim
        projected = 2 * config["linear_num_key_heads"] * key_dim + 3 * values + 2 * value_heads
        linear += (layers - attentions) * hidden * projected
    table = hidden * config["vocab_size"]
    context = measure.rows * measure.context
    pairs = context if measure.decode else context * (measure.context + 1) / 2
    moved = ITEM * (linear + read + table + 2 * attentions * keys * context)
    # A prompt's states begin with zeros and are only written.
    moved += STATE_ITEM * state * measure.rows * (2 if measure.decode else 1)
    return Work(moved, 2 * (linear + multiplied) * tokens + 2 * table * measure.rows + 4 * attentions * queries * pairs,
                OPERATIONS_OF_STATE * state * tokens)


class Ceiling(harness.Contestant):
    name, version = "ceiling", ""

    def __init__(self, args: argparse.Namespace) -> None:
        set_threads(args.threads)
        self.config = json.loads((args.model / "config.json").read_text())
        self.ceilings = Ceilings()

    def sample(self, measure: harness.Measure, prompts: list[list[int]], tokens: int) -> harness.Sample:
        clock = harness.Clock(-1)
        read = max(self.ceilings.read() for _ in range(PASSES))
        multiply, recur = (max(self.ceilings.peak(kind) for _ in range(PASSES)) for kind in ("bf16", "fp32"))
        clock.tick()
        step = work(self.config, measure)
        computing = step.products / multiply + step.recurrence / recur
        tokens = measure.rows if measure.decode else measure.context
        return {"value": tokens / max(step.moved / read, computing), "others": clock.end()[1],
                "read_gbs": read / 1e9, "bf16_gflops": multiply / 1e9, "fp32_gflops": recur / 1e9}


if __name__ == "__main__":
    harness.main(Ceiling)
