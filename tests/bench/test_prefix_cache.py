"""bench/engine/prefix_cache.py: what a hybrid finds beside an attention model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.benches import bench


def shares(trace: Path, num_slots: int, tokens: int = 1 << 20) -> tuple[int, dict[str, int]]:
    share = bench("engine.prefix_cache").simulate(trace, 0, tokens, num_slots)
    return share.hits, dict(share.misses)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four chats of five turns. Each turn has two more blocks, and the last one of a prompt is not full."""
    lines = []
    for turn in range(5):
        for chat in range(4):
            ids = [0, *range(100 * chat + 1, 100 * chat + 4 + 2 * turn), 1000 + 10 * turn + chat]
            lines.append({"timestamp": 60_000 * len(lines), "input_length": 512 * len(ids) - 200, "output_length": 100,
                          "hash_ids": ids})
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_hybrid_with_enough_slots_finds_the_chats_as_an_attention_model_does(trace: Path) -> None:
    attention, _ = shares(trace, 0)
    hybrid, misses = shares(trace, 64)
    first_of_a_system_prompt = 16  # its end has a checkpoint from the third chat on
    assert attention > 1000
    assert attention - hybrid == first_of_a_system_prompt
    assert misses == {"no_block": 1, "no_state": 1}


def test_hybrid_with_few_slots_misses_for_want_of_states(trace: Path) -> None:
    hybrid, misses = shares(trace, 3)
    assert hybrid < shares(trace, 64)[0]
    assert misses["no_state"] > 1
