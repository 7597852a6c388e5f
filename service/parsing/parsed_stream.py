"""Parser of the deltas of a detokenizer, which keeps the parts of an answer and its tokens together."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from npuserve.service.parsing.answer_parser import AnswerParser, Parts, Reasoning
from npuserve.service.parsing.parameter_types import CallTypes
from npuserve.service.text.answer_format import THINK_BEGIN, THINK_END, AnswerFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npuserve.service.text.detokenizer import Delta
    from npuserve.service.text.tokenizer import Tokenizer

PROMPT_END_TOKENS = 32
"""Tokens at the end of a prompt that are searched for the tags of reasoning. White space may follow a tag."""


class ParsedDelta(NamedTuple):
    """Next parts of an answer. num_tokens: tokens whose text they are."""

    parts: Parts
    num_tokens: int


class ParsedStream:
    """Parser of one answer by tokens. A delta ends after a token up to which the meaning of all text is known.

    prompt_ids: ids of the rendered chat.
    client_tokens: number of the answer's tokens that the client has. The parts that could have been sent with them are
        left out; their tokens are counted.
    types: as of `AnswerParser`.
    """

    def __init__(
        self,
        form: AnswerFormat,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        client_tokens: int,
        types: CallTypes | None = None,
    ):
        self._parser = AnswerParser(form, reasoning_state(tokenizer, prompt_ids), types)
        self._client_tokens = client_tokens
        self._pushed = 0  # tokens
        self._returned = 0

    def push(self, delta: Delta) -> ParsedDelta:
        """Parse the next delta. Its tokens that are not returned are returned later."""
        parts = Parts()
        known = self._returned
        start = 0
        for end, tokens in (*delta.boundaries, (len(delta.text), delta.num_tokens)):
            self._parser.feed(delta.text[start:end])
            start = end
            if self._parser.is_clean:
                known = self._pushed + tokens
                self._take(parts, known)
        self._pushed += delta.num_tokens
        return self._delta(parts, known)

    def finish(self) -> ParsedDelta:
        """Return the rest of the answer."""
        parts = Parts()
        self._parser.finish()
        self._take(parts, self._pushed)
        return self._delta(parts, self._pushed)

    def _take(self, parts: Parts, tokens: int) -> None:
        """Add the parser's new parts unless the client has them. tokens: number of tokens up to their end."""
        new_parts = self._parser.take()
        if tokens > self._client_tokens:
            parts.add(new_parts)

    def _delta(self, parts: Parts, known: int) -> ParsedDelta:
        count = known - self._returned
        self._returned = known
        return ParsedDelta(parts, count)


def reasoning_state(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Reasoning:
    """Return the state of the reasoning at the end of a rendered chat."""
    end = tokenizer.decode(list(prompt_ids[-PROMPT_END_TOKENS:])).rstrip()
    if end.endswith(THINK_BEGIN):
        return "begun"
    return "ended" if end.endswith(THINK_END) else "possible"
