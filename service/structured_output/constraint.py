"""Constraint of a request, on the wire between front ends and the engine, and what the engine reads beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from npuserve.npu.step import SamplingParams


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """Rule that the text of an answer follows.

    text: JSON schema, regular expression, grammar, or structural tag; for choices a JSON list of strings; for
        json_object "".
    source: path of the client's field that the constraint was made from; "" for the field of its kind.
    """

    kind: Literal["json_schema", "regex", "grammar", "choices", "json_object", "structural_tag"]
    text: str
    source: str = ""

    @property
    def field(self) -> str:
        """Return the path of the client's field, for errors."""
        return self.source or self.kind


class ConstrainedRequest(Protocol):
    """Fields of ipc/messages.py's Request that structured output reads.

    client: whose turn it is when constraints wait to be compiled.
    output_ids: tokens that an earlier engine computed, which the matcher replays.
    stop_token_ids: tokens that are never forced. Neither are the tokens in `sampling.logit_bias`.
    """

    @property
    def constraint(self) -> Constraint | None: ...

    @property
    def client(self) -> str: ...

    @property
    def arrival(self) -> float: ...

    @property
    def output_ids(self) -> Sequence[int]: ...

    @property
    def stop_token_ids(self) -> frozenset[int]: ...

    @property
    def sampling(self) -> SamplingParams: ...
