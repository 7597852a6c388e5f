"""Sampling state of requests, and the sampling parameters that are inputs of a captured step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from npuserve.npu.backends.base import Backend
from npuserve.npu.execution.masks import Array
from npuserve.npu.step import NewRequest, SamplingParams

GREEDY_TEMPERATURE = 2.0**-100
"""Temperature at which any two different logits differ by more than the range of exp."""


@dataclass(slots=True)
class RequestState:
    """Sampling state of one request.

    allowed_ids, bias, ending_ids: restricted to the vocabulary; empty if the request does not use them.
    biased: its logits are edited by more than masks: by a bias or penalties.
    next_position: position after the tokens counted so far, for a request with penalties. If drafts were sampled
        after, it may be higher, up to `last_position`: the device counts those that it accepts.
    slot: its slot of `Penalties`; 0 for none.

    on_device: tensors, created when first needed.
    masks: `mask_of` the allowed ids and of all ids that are not ending ids, created when first needed.
    """

    request: NewRequest
    allowed_ids: list[int]
    bias: dict[int, float]
    ending_ids: list[int]
    biased: bool
    next_position: int
    last_position: int = 0
    slot: int = 0
    on_device: RequestTensors | None = None
    masks: tuple[Array | None, Array | None] | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    def withholds_ending(self, position: int) -> bool:
        """Return True if min_tokens forbids the ending ids at `position`, counted in prompt + output."""
        return bool(self.ending_ids) and position - len(self.request.prompt_ids) < self.sampling.min_tokens

    def edits(self, position: int, constrained: bool) -> bool:
        """Return True if the logits at `position` are edited on the device.

        constrained: the row has a mask, from which allowed_ids and ending_ids are removed on the host.
        """
        if constrained:
            return self.biased
        return self.biased or bool(self.allowed_ids) or self.withholds_ending(position)

    def is_capturable(self, position: int) -> bool:
        """Return True if a captured step can sample the request at `position`: only its penalties edit the logits."""
        sampling = self.sampling
        return not (self.allowed_ids or self.bias or self.withholds_ending(position) or sampling.logprobs is not None
                    or (sampling.penalized and not self.slot))


@dataclass(frozen=True, slots=True)
class RequestTensors:
    """Tensors of a request on the device, None if it does not use them.

    bias: (ids [n] int64, values [n] float32).
    counts: (in_prompt [vocabulary] bool, output_counts [vocabulary] int32). The steps queued so far are counted.
    sources: host buffers of the tensors.
    """

    allowed_ids: Tensor | None
    bias: tuple[Tensor, Tensor] | None
    ending_ids: Tensor | None
    counts: tuple[Tensor, Tensor] | None
    sources: list[Tensor]


class Penalties:
    """Tokens of the requests with penalties, one slot each, where captured steps read and count them.

    in_prompt: [slots + 1, vocabulary] bool.
    output_counts: [slots + 1, vocabulary] int32.
    one: [1] int32, the increment of a count.

    Slot 0 belongs to no request: rows without penalties read and count there, without an effect.
    """

    def __init__(self, slots: int, vocabulary: int, backend: Backend):
        self.in_prompt = backend.empty((slots + 1, vocabulary), torch.bool).zero_()
        self.output_counts = backend.empty((slots + 1, vocabulary), torch.int32).zero_()
        self.one = backend.empty((1,), torch.int32).fill_(1)
        self._free = list(range(slots, 0, -1))

    def take(self) -> int:
        """Return a free slot; 0 if there is none."""
        return self._free.pop() if self._free else 0

    def give_back(self, slot: int) -> None:
        """Free a slot; 0 is ignored."""
        if slot:
            self._free.append(slot)


def penalties_bytes(slots: int, vocabulary: int) -> int:
    """Return the bytes of `Penalties`."""
    return (slots + 1) * vocabulary * (torch.bool.itemsize + torch.int32.itemsize)


def upload(state: RequestState, vocabulary: int, backend: Backend, penalties: Penalties | None) -> RequestTensors:
    """Create the tensors of a request. Call it within enqueued work, before the first step that uses them."""
    sources: list[Tensor] = []

    def load(values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        source = backend.host_buffer(len(values), dtype=dtype)
        source.copy_(torch.tensor(values, dtype=dtype))
        sources.append(source)  # the copy may run after this returns
        return source.to(backend.device, non_blocking=True)

    def count(token_ids: list[int]) -> Tensor:
        """Return how often each id occurs: [vocabulary] int32."""
        counts = torch.zeros(vocabulary, dtype=torch.int32, device=backend.device)
        ids = load(token_ids)
        return counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def counted() -> tuple[Tensor, Tensor]:
        counts = count(state.request.prompt_ids) > 0, count(state.request.output_ids)
        if not (penalties and state.slot):
            return counts
        slots = penalties.in_prompt[state.slot], penalties.output_counts[state.slot]
        for to, values in zip(slots, counts, strict=True):
            to.copy_(values)
        return slots

    return RequestTensors(
        allowed_ids=load(state.allowed_ids) if state.allowed_ids else None,
        bias=(load(list(state.bias)), load(list(state.bias.values()), torch.float32)) if state.bias else None,
        ending_ids=load(state.ending_ids) if state.ending_ids else None,
        counts=counted() if state.sampling.penalized else None,
        sources=sources,
    )


class SamplingInputs(NamedTuple):
    """Parameters of R rows that a captured step samples, as the kernels `penalize` and `sample` take them.

    Rows with argmax sampling have `GREEDY_TEMPERATURE`, no filters and the number 0: all mass is on the likeliest
    tokens, and the first of them is taken.

    slots: [R] int64, of `Penalties`. top_k: [R] int32; the vocabulary's size if it is off. The others: [R] float32.
    """

    slots: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


NUM_FLOATS = 7
"""Number of the fields of `SamplingInputs` in float32."""


class HostSampling(NamedTuple):
    """`SamplingInputs` on the host, to be uploaded with the step's inputs.

    slots, top_k: [R].
    floats: [NUM_FLOATS, R].
    """

    slots: Array
    top_k: Array
    floats: Array
    vocabulary: int

    def clear(self) -> None:
        """Make all rows take their argmax without penalties."""
        self.slots[:] = 0
        self.top_k[:] = self.vocabulary
        self.floats[...] = [[GREEDY_TEMPERATURE], [1.0], [0.0], [0.0], [1.0], [0.0], [0.0]]

    def set_chance(
        self, row: int, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
    ) -> None:
        """Set a row's parameters of `sample`. `uniform` is rounded to a float32 below 1."""
        if 0 < top_k < self.vocabulary:
            self.top_k[row] = top_k
        self.floats[:4, row] = temperature, top_p, min_p, min(uniform, 1 - 2**-24)

    def set_penalties(
        self, row: int, slot: int, repetition: float, presence: float, frequency: float
    ) -> None:
        """Set a row's parameters of `penalize`, and its slot of `Penalties`."""
        self.slots[row] = slot
        self.floats[4:, row] = repetition, presence, frequency
