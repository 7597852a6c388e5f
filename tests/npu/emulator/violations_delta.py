"""Calls that violate the documented constraints of the operators of linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.npu.emulator.arguments import F32, FP, on, ops, strided, whole

HEADS = {"key_heads": 1, "value_heads": 2, "key_dim": 128, "value_dim": 128}


def _arguments(tokens: int, states: int, changed: dict[str, Any]) -> dict[str, Any]:
    """Return query, key, value, state, beta and g of these tokens and sizes, except for `changed`."""
    sizes = HEADS | {name: changed.pop(name) for name in HEADS if name in changed}
    query = on(tokens, sizes["key_heads"], sizes["key_dim"])
    heads = sizes["value_heads"]
    return {"query": query, "key": query, "value": on(tokens, heads, sizes["value_dim"]),
            "state": on(states, heads, sizes["value_dim"], sizes["key_dim"]), "beta": on(tokens, heads),
            "g": on(tokens, heads, dtype=F32), **changed}


def recur(**changed: Any) -> Any:
    """Advance two rows of one token in 3 slots, with valid arguments except `changed`."""
    tokens = changed.pop("tokens", 2)
    given = _arguments(tokens, changed.pop("slots", max(3, tokens)), changed)
    rest = {"scale": 1.0, "actual_seq_lengths": whole(*[1] * tokens), "ssm_state_indices": whole(*range(tokens)),
            "num_accepted_tokens": whole(*[1] * tokens)}
    state: Tensor = given.pop("state")
    return ops().npu_recurrent_gated_delta_rule(
        given.pop("query"), given.pop("key"), given.pop("value"), state, **{**rest, **given})


def chunk(**changed: Any) -> Any:
    """Advance rows of 3 and 2 tokens, with valid arguments except `changed`."""
    given = _arguments(5, 2, changed)
    rest = {"scale": 1.0, "initial_state": given.pop("state"), "actual_seq_lengths": whole(3, 2)}
    return ops().npu_chunk_gated_delta_rule(
        given.pop("query"), given.pop("key"), given.pop("value"), **{**rest, **given})


DELTA: dict[str, list[Callable[[], Any]]] = {
    "recurrent.dtype": [
        lambda: recur(query=on(2, 1, 128, dtype=FP)), lambda: recur(state=on(3, 2, 128, 128, dtype=F32)),
        lambda: recur(g=on(2, 2)), lambda: recur(ssm_state_indices=whole(0, 1, dtype=torch.int64)),
        lambda: recur(beta=on(2, 2, dtype=F32))],
    "recurrent.shape": [
        lambda: recur(key=on(2, 2, 128)), lambda: recur(state=on(3, 1, 128, 128)), lambda: recur(beta=on(2, 1)),
        lambda: recur(ssm_state_indices=whole(0)), lambda: recur(state=on(3, 2, 128, 64))],
    "recurrent.heads": [lambda: recur(value_heads=257), lambda: recur(key_heads=2, value_heads=3)],
    "recurrent.dims": [lambda: recur(key_dim=513), lambda: recur(value_dim=1024)],
    "recurrent.slots": [lambda: recur(tokens=4, slots=3)],
    "recurrent.contiguous": [lambda: recur(state=strided(3, 2, 128, 128))],
    "recurrent.lengths": [lambda: (recur(actual_seq_lengths=whole(1, 0)), torch.npu.synchronize())],
    "recurrent.range": [lambda: (recur(ssm_state_indices=whole(0, 3)), torch.npu.synchronize())],
    "recurrent.more": [lambda: recur(gk=on(2, 2, 128, dtype=F32))],
    "chunk.dtype": [
        lambda: chunk(value=on(5, 2, 128, dtype=FP)), lambda: chunk(state=on(2, 2, 128, 128, dtype=F32)),
        lambda: chunk(g=on(5, 2)), lambda: chunk(actual_seq_lengths=whole(3, 2, dtype=torch.int64))],
    "chunk.shape": [
        lambda: chunk(key=on(5, 2, 128)), lambda: chunk(state=on(3, 2, 128, 128)), lambda: chunk(beta=on(4, 2)),
        lambda: chunk(actual_seq_lengths=whole(5))],
    "chunk.heads": [lambda: chunk(value_heads=65), lambda: chunk(key_heads=2, value_heads=3)],
    "chunk.dims": [lambda: chunk(key_dim=64), lambda: chunk(value_dim=256)],
    "chunk.lengths": [lambda: (chunk(actual_seq_lengths=whole(3, 3)), torch.npu.synchronize())],
}
