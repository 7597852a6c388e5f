"""Positions of a prompt at which a model's fixed state is kept as a checkpoint (state_slots.py).

Positions are block boundaries, since prefixes are found by block. The next request may part from a prompt

    at its end                    the same prompt, or a longer one
    at the end of a message       the next turn of a chat, or another chat with the same system prompt. The end is known
                                  by a token that ends messages (`<|im_end|>`), so the engine needs no text
    where an earlier one parted   the end of the cached blocks that have no checkpoint: prompts with the same beginning
    anywhere else                 a checkpoint at some chunk ends bounds what is computed again

Each position but the last kind ends a row early, and costs a step. So positions are some tokens apart, and messages in
the middle of a prompt get one only at a longer distance (`Spacing`). The end of a prompt is left out shortly after its
last message, where the template opens the answer: the next turn often has other tokens there.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple


class Spacing(NamedTuple):
    """Least distances of checkpoints in tokens, also of the first one from the begin of a prompt.

    expected: of those that other requests are likely to continue.
    middle: of those in the middle of a prompt. A state of Qwen3.5 takes the memory of the keys and values of 1,600
        (0.8B) to 2,300 tokens (27B) in bfloat16.
    """

    expected: int = 32
    middle: int = 2048


DEFAULT_SPACING = Spacing()


def checkpoint_positions(
    prompt_ids: Sequence[int], start: int, parting: int, block_size: int, spacing: Spacing,
    message_end_ids: Set[int],
) -> list[int]:
    """Return the positions of an admitted prompt at which rows end for a checkpoint, ascending.

    start: first position that is computed; 0, or one with a checkpoint.
    parting: end of the cached blocks.
    """
    num_prompt = len(prompt_ids)
    end = (num_prompt - 1) // block_size * block_size
    messages = [
        boundary for position in range(start, num_prompt - 1)
        if prompt_ids[position] in message_end_ids and (boundary := (position + 1) // block_size * block_size) > start]
    expected = {parting, end, *messages[:1], *messages[-1:]}
    positions: list[int] = []
    last = start
    for position in sorted({*expected, *messages}):
        if position - last >= (spacing.expected if position in expected else spacing.middle):
            positions.append(position)
            last = position
    return positions
