"""Types of one step: the work for the device, and its result. Plain values, no tensors.

The scheduler fills a `Step`, the runner executes it. Nothing here imports torch, so that the front end and the
scheduler can use these types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:  # front ends do not import it
    import numpy as np
    import numpy.typing as npt

Phase = Literal["prefill", "decode", "mixed"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters of a request. The servicer has checked them against the ranges in the proto.

    seed: 64 bits. The front end draws a seed if the client sent none, so that the request can be continued.
    ending_ids: tokens that may not be sampled before `min_tokens` tokens were generated.
    logprobs, prompt_logprobs: number of most likely tokens to report beside the sampled one; None for no report.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ending_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def penalized(self) -> bool:
        """True if sampling depends on the earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that is new to the runner.

    prompt_ids: tokens of the prompt.
    output_ids: tokens generated before, by an earlier engine. Penalties and min_tokens count them.
    """

    request_id: int
    prompt_ids: list[int]
    output_ids: list[int]
    sampling: SamplingParams


PENDING = -1
"""Stands for a token that the step before samples: it is on the device, and not yet on the host."""


class Row(msgspec.Struct, frozen=True):
    """One request in a step: compute `token_ids` at positions [start, start + len(token_ids)).

    token_ids: [PENDING] alone stands for the token that the request's row of the previous step samples.
    block_ids: the KV-cache blocks of positions [0, `num_positions`), in order. The list may grow later.
    samples: number of last positions of the row after each of which the step samples a token; 0 for none. With n
        samples, the last n - 1 tokens are drafts, which follow the request's last token so far.
    pools: the step returns the hidden state of the row's last token. The row does not sample.
    next_id: token after the row's last one if the row does not sample. A model's head for drafts needs it.
    predicts: number of tokens to draft after the row's last valid token, by the model's head or a smaller model. There
        must be blocks for them after the row.
    head_start: first position, at the beginning of a block, of which the model's head for drafts has keys and values;
        it reads no earlier ones. -1: the head does not compute the row. All rows of a step are computed with the head,
        or none is.
    is_constrained: the tokens are sampled under masks, which `Runner.sample` gets.
    state_slot: slot of the request's fixed state; -1 if the model has none. A row that starts at 0 begins with a state
        of zeros. Other rows continue the state in the slot, so a position may not be computed twice.
    state_source: slot of the state that the row continues instead; it stays as it is. -1: `state_slot`.
    block_version: version of block_ids; 0 if unknown. Rows with the same version differ only in the length of
        block_ids. A runner may reuse the block ids that it has copied.
    """

    request_id: int
    token_ids: list[int]
    start: int
    block_ids: list[int]
    samples: int
    block_version: int = 0
    is_constrained: bool = False
    state_slot: int = -1
    state_source: int = -1
    pools: bool = False
    next_id: int = 0
    predicts: int = 0
    head_start: int = 0

    @property
    def drafts(self) -> list[int]:
        """Drafts that the row computes, its last tokens."""
        return self.token_ids[len(self.token_ids) - self.samples + 1 :] if self.samples else []

    @property
    def num_positions(self) -> int:
        """Number of positions from 0 on that the row may write, those of drafts after it among them."""
        return self.start + len(self.token_ids) + self.predicts

    @property
    def is_decode(self) -> bool:
        """True if the row samples after its only token, which is not the first of the request."""
        return len(self.token_ids) == 1 and self.samples > 0 and self.start > 0


class HostSlots(NamedTuple):
    """Slots of host memory for evicted blocks and fixed states (execution/host_blocks.py).

    num_slots: number of slots.
    block_bytes: bytes of a slot.
    state_parts: number of slots that a fixed state takes; 0 for a model without.
    max_saves: maximum number of slots that a step saves to; None for no limit.
    num_early: number of blocks, free or next to be evicted, of which nearly all need no save at their eviction.
    max_early_saves: maximum number of slots that a step saves to before an eviction; one state may exceed it.
    """

    num_slots: int
    block_bytes: int
    state_parts: int = 0
    max_saves: int | None = None
    num_early: int = 0
    max_early_saves: int = 1


STATE_SLOTS_PER_REQUEST = 2
"""Slots of fixed state with which a request can run and continue a checkpoint: one for its state, and that of the
checkpoint."""
WHOLE_BLOCK = -1
"""`HostCopy.part` of a block of the KV cache."""


class HostCopy(NamedTuple):
    """Copy between the device and a slot of host memory, which has the size of a block of the KV cache.

    device_index: block of the KV cache; for a fixed state its slot on the device.
    slot: of host memory.
    part: number of the part of the fixed state that is copied, of which each takes a slot of host memory; WHOLE_BLOCK
        for a block.
    """

    device_index: int
    slot: int
    part: int = WHOLE_BLOCK

    @property
    def is_block(self) -> bool:
        """True for a block of the KV cache, False for a part of a fixed state."""
        return self.part == WHOLE_BLOCK


class HostLoad(msgspec.Struct, frozen=True):
    """Copies from host memory to the device that end together: blocks, then the parts of a fixed state.

    id: of this load, for `EndedLoad`.
    """

    id: int
    copies: list[HostCopy]


class EndedLoad(NamedTuple):
    """End of a load.

    id: of the load.
    num_intact: number of its first copies that are on the device. The checksum of the next one differs.
    """

    id: int
    num_intact: int


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration. The runner forgets the `ended` requests, adds the `new` ones, and computes the rows.

    Steps are computed in the order of their launch, so a step may be launched while the one before it runs.

    saves: blocks and fixed states to copy to host memory before the rows of this step or a load write them.
    loads: loads that begin with this step, after its saves. They run beside this step and later ones, and no row may
        use their blocks and slots before the runner reports their end.
    """

    rows: list[Row]
    new: list[NewRequest] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    saves: list[HostCopy] = field(default_factory=list)
    loads: list[HostLoad] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute, of all rows."""
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def num_decodes(self) -> int:
        """Number of decode rows."""
        return [row.is_decode for row in self.rows].count(True)

    @property
    def phase(self) -> Phase:
        """"decode" if all rows are decode rows, "prefill" if none is."""
        decodes = self.num_decodes
        return "decode" if decodes == len(self.rows) else "mixed" if decodes else "prefill"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the token there, its log-probability and rank (1 is the most likely), and the
    most likely tokens, best first. Natural logarithms of the model's distribution, before penalties, bias and
    temperature."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step.

    token_ids: sampled tokens by request_id, one for each position of a row that samples. The token after a position is
        valid only if the row's tokens up to this position are the request's.
    logprobs: reports of the sampled tokens by request_id, if requested.
    prompt_logprobs: reports of the prompt tokens that this step's chunk predicted, in order, by request_id.
    hidden: [H] float32, hidden state after the final norm by request_id, for every row that pools.
    drafts: tokens that the model's head or a smaller model drafted by request_id, for every row that predicts. They
        follow the sample after the row's last draft that equals its sample.
    device_seconds: compute time of the step on the device.
    head_seconds: part of this time in which the model's head or a smaller model drafted; None if it was not measured.

    captured: at least one part was computed in a captured dispatch.
    captured_decodes: decode rows that were computed and sampled in one captured dispatch.
    decoder_decodes: decode rows whose decoder was a captured dispatch, and LM head and sampler were not.
    timed: each kernel was timed, and its latency observed.

    A chunk at positions [a, b) predicts the prompt tokens [a + 1, min(b + 1, prompt length)).
    """

    token_ids: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprobs]]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    device_seconds: float
    captured: bool = False
    captured_decodes: int = 0
    decoder_decodes: int = 0
    timed: bool = False
    hidden: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    head_seconds: float | None = None

    def drafts_after(self, row: Row, count: int) -> list[int]:
        """Return the drafts that follow the first `count` samples of a row; [] if they follow other ones."""
        drafts = self.drafts.get(row.request_id)
        if not drafts:
            return []
        return drafts if count == 1 + num_right(row.drafts, self.token_ids[row.request_id]) else []


class LostStep(RuntimeError):
    """The device dropped a step without an error, so that its results are missing. The engine must start again."""


def num_right(drafts: Sequence[int], samples: Sequence[int]) -> int:
    """Return the number of drafts before the first that differs from its sample."""
    for number, (draft, sample) in enumerate(zip(drafts, samples, strict=False)):
        if draft != sample:
            return number
    return len(drafts)
