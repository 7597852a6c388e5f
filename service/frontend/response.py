"""Response messages, built from the engine's outputs of one request. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from npuserve.npu.step import TokenLogprobs
from npuserve.service.errors import InvalidField
from npuserve.service.ipc import messages
from npuserve.service.ipc.messages import Output
from npuserve.service.parsing.answer_parser import Parts
from npuserve.service.parsing.parsed_stream import ParsedDelta, ParsedStream
from npuserve.service.requests.validation import CheckedRequest
from npuserve.v1 import generate_pb2 as pb

if TYPE_CHECKING:
    from npuserve.service.text.detokenizer import Delta
    from npuserve.service.text.tokenizer import Tokenizer

REASONS = {
    "eos": pb.FINISH_REASON_EOS,
    "stop_token": pb.FINISH_REASON_STOP_TOKEN,
    "stop_string": pb.FINISH_REASON_STOP_STRING,
    "length": pb.FINISH_REASON_LENGTH,
    "deadline": pb.FINISH_REASON_DEADLINE,
    "aborted": pb.FINISH_REASON_ABORTED,
}
PROGRESS_SECONDS = 0.5
"""Time after which tokens without text are sent. With MAX_INTERVAL_SECONDS of stream.py, a stream whose tokens
are at most 1 s apart sends a message every second."""

MAX_PROMPT_LOGPROBS_BYTES = 256 << 10
"""Maximum prompt_logprobs of a message: a few milliseconds of work, far below the 4 MiB that most clients accept."""


class ResponseBuilder:
    """Builder of the messages of one answer, or of one sample of it.

    Call `add` with the outputs that have arrived, then send `prompt_messages` and `next_message`. After `add` returned
    a finish, send `last_message`, once.

    A token waits here until its text is complete and cannot be the beginning of a stop string. A message carries the
    ids and logprobs of exactly the tokens whose text it carries:

        tokens of the answer: [0, sent) sent | [sent, ready) text in `text` | the rest in the detokenizer

    An end-of-text or stop token adds text only with include_stop, and then like any other token.

    With an answer format the text is parsed. Then a token also waits while it may belong to a tag, and "text" here
    means the parts of all kinds: content, reasoning and tool calls.

    If tokens arrive whose text is empty or must wait, a message without text follows after PROGRESS_SECONDS, so that
    the client sees progress. It carries tokens with empty text, and no token whose text must wait.

    checked: the request.
    tokenizer: None: the model has none, and messages carry ids without text.
    token_offset: number of tokens that the client already has, from an earlier call. The first outputs must include
        them. Messages begin after them: with the text after the last message that could have ended at this offset.

    matched_stop: the stop string that was found; None: none yet.
    keep: number of tokens up to the end of the matched stop string; None: no match yet.
    """

    def __init__(self, checked: CheckedRequest, tokenizer: Tokenizer | None, token_offset: int = 0):
        self.matched_stop: str | None = None
        self.keep: int | None = None
        self._checked = checked
        self._tokenizer = tokenizer
        self._detokenizer = None
        self._parser: ParsedStream | None = None
        if tokenizer:
            from npuserve.service.text.detokenizer import Detokenizer

            if checked.answer_format:
                self._parser = ParsedStream(
                    checked.answer_format, tokenizer, checked.request.prompt_ids, token_offset, checked.call_types)

            self._detokenizer = Detokenizer(
                tokenizer, skip_special_tokens=checked.skip_special_tokens, stop=checked.stop,
                include_stop=checked.include_stop, min_tokens=checked.request.sampling.min_tokens,
                prompt_ids=checked.request.prompt_ids, client_tokens=token_offset,
                kept_ids=tokenizer.tag_ids if self._parser else frozenset())
        sampling = checked.request.sampling
        self._wants_tokens = checked.return_token_ids or sampling.logprobs is not None
        self._text = ""
        self._parts = Parts()  # reasoning and tool calls of the next message
        self._ready = 0
        self._sent = self._skip_tokens = token_offset
        self._skip_characters = 0  # of the next text, which the client has
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        # None: not requested, or sent. They are sent with the first token at the latest.
        self._prompt_logprobs: list[TokenLogprobs] | None = (
            None if sampling.prompt_logprobs is None or token_offset else [])
        self._prompt_part = pb.StreamGenerateResponse()  # positions that are converted and not sent yet
        self._prompt_part_bytes = 0
        self._last_id: int | None = None
        self._last_message: float | None = None  # time of the last message; before one, of the first token

    def add(self, outputs: Sequence[Output]) -> messages.Finish | None:
        """Add outputs of the engine, at least one. Return the engine's finish if it is among them.

        Sets `keep` if a stop string is found. Do not add later outputs then. Raises InvalidField if the answer ends
        before `token_offset`: the engine may have computed tokens after a stop string.
        """
        ids = outputs[0].token_ids if len(outputs) == 1 else [token for output in outputs for token in output.token_ids]
        for output in outputs:
            if output.logprobs:
                self._logprobs += output.logprobs
            if output.prompt_logprobs and self._prompt_logprobs is not None:
                self._prompt_logprobs += output.prompt_logprobs
        finish = outputs[-1].finish
        self._ids += ids
        if ids:
            self._last_id = ids[-1]
        if self._detokenizer is None:
            self._ready += len(ids)
        else:
            is_silent = finish is not None and finish.reason in ("eos", "stop_token") and not self._checked.include_stop
            self._push(self._detokenizer.push(ids[:-1] if is_silent else ids))
            if finish:
                self._push(self._detokenizer.finish())
            if self._parser and (finish or self.keep is not None):
                self._add_parsed(self._parser.finish())
        if self._skip_tokens:
            self._skip_sent()
        return finish

    def prompt_messages(self) -> Iterator[pb.StreamGenerateResponse]:
        """Yield messages that carry only prompt_logprobs, until the rest fits the message of the first token."""
        if self._prompt_logprobs is None:
            return
        if not self._prompt_part.prompt_logprobs:  # a prompt's first token has no probability
            first = self._checked.request.prompt_ids[0]
            token = pb.TokenLogprob(token_id=first, text=self._text_of(first))
            self._prompt_part.prompt_logprobs.add().chosen.MergeFrom(token)
        reports = self._prompt_logprobs
        self._prompt_logprobs = []
        for report in reports:
            position = self._position(report)
            size = position.ByteSize()
            if self._prompt_part_bytes + size > MAX_PROMPT_LOGPROBS_BYTES:
                full = self._prompt_part
                self._prompt_part = pb.StreamGenerateResponse()
                self._prompt_part_bytes = 0
                yield full
            self._prompt_part.prompt_logprobs.append(position)
            self._prompt_part_bytes += size

    def next_message(self, now: float) -> pb.StreamGenerateResponse | None:
        """Return a message of text, of tokens without text if they are requested, or of progress; None: none is due.

        now: time.monotonic() seconds.
        """
        has_text = self._text or self._parts.reasoning or self._parts.calls
        if has_text or (self._ready > self._sent and self._wants_tokens) or self._is_progress_due(now):
            self._last_message = now
            return self._take()
        return None

    def last_message(self, finish: messages.Finish, now: float) -> pb.StreamGenerateResponse:
        """Return the message of the remaining tokens, with finish reason, usage and timing.

        finish: the engine's finish.
        now: time.monotonic() seconds.
        """
        generated = self._sent + len(self._ids) if self.keep is None else self.keep
        self._ready = generated
        message = self._take()
        end = message.finish
        if self.matched_stop is not None:
            end.reason = pb.FINISH_REASON_STOP_STRING
            end.matched_stop = self.matched_stop
        else:
            end.reason = REASONS[finish.reason]
            # Not with a stop string: the engine may have completed the answer before it received the cut.
            end.grammar_completed = finish.grammar_completed
            if finish.reason in ("eos", "stop_token") and self._last_id is not None:
                end.matched_stop_token_id = self._last_id
                if self._tokenizer:
                    end.matched_stop = self._tokenizer.token_text(self._last_id)
        end.usage.prompt_tokens = finish.prompt_tokens
        end.usage.cached_tokens = finish.cached_tokens
        end.usage.generated_tokens = generated
        end.usage.drafted_tokens = finish.drafted_tokens
        end.usage.accepted_draft_tokens = finish.accepted_drafts
        _write_timing(end.timing, finish.timing, now, self._checked.request.arrival)
        return message

    def _is_progress_due(self, now: float) -> bool:
        """Return whether tokens have waited for PROGRESS_SECONDS since the last message, or since the first token."""
        if not self._ids:
            return False
        if self._last_message is None:
            self._last_message = now
        return now - self._last_message >= PROGRESS_SECONDS

    def _push(self, delta: Delta | None) -> None:
        """Add the detokenizer's text to the next message."""
        if delta is None:
            return
        if delta.matched_stop is not None:
            self.matched_stop = delta.matched_stop
            self.keep = delta.keep
        if self._parser:
            self._add_parsed(self._parser.push(delta))
            return
        self._text += delta.text[self._skip_characters :]
        self._skip_characters = max(0, self._skip_characters - len(delta.text))
        self._ready += delta.num_tokens

    def _add_parsed(self, delta: ParsedDelta) -> None:
        """Add the parser's parts to the next message."""
        self._text += delta.parts.content
        delta.parts.content = ""
        self._parts.add(delta.parts)
        self._ready += delta.num_tokens

    def _skip_sent(self) -> None:
        """Remove from the first outputs the tokens that the client has, and their text unless it is parsed."""
        tokens = self._skip_tokens
        if self.keep is not None and tokens > self.keep:
            raise InvalidField("token_offset", f"must be in [0, {self.keep}], got {tokens}")
        self._skip_tokens = 0
        if self._detokenizer and self._parser is None:
            characters = self._detokenizer.client_characters
            self._skip_characters = max(0, characters - len(self._text))
            self._text = self._text[characters:]
        del self._ids[:tokens], self._logprobs[:tokens]

    def _take(self) -> pb.StreamGenerateResponse:
        """Return a message of all tokens whose text is ready, and remove them."""
        count = max(0, self._ready - self._sent)
        ids = self._ids[:count] if self._checked.return_token_ids else None
        message = pb.StreamGenerateResponse(
            text=self._text, offset=self._sent, token_ids=ids, num_tokens=count, index=self._checked.request.index,
            reasoning=self._parts.reasoning)
        for call in self._parts.calls:
            call_id = f"call_{self._checked.call_id}_{message.index}_{call.index}" if call.name else ""
            message.tool_calls.add(index=call.index, id=call_id, name=call.name, arguments=call.arguments)
        if self._logprobs:
            message.logprobs.extend(map(self._position, self._logprobs[:count]))
        if self._prompt_logprobs is not None:
            parts = [*self.prompt_messages(), self._prompt_part]
            message.prompt_logprobs.extend(position for part in parts for position in part.prompt_logprobs)
            self._prompt_logprobs = None
        del self._ids[:count], self._logprobs[:count]
        self._sent += count
        self._text = ""
        if self._parser:
            self._parts = Parts()
        return message

    def _position(self, report: TokenLogprobs) -> pb.PositionLogprobs:
        top = zip(report.top_ids, report.top_logprobs, _ranks(report), strict=True)
        return pb.PositionLogprobs(
            chosen=self._token(report.token_id, report.logprob, report.rank),
            top=[self._token(token, logprob, rank) for token, logprob, rank in top])

    def _token(self, token: int, logprob: float, rank: int) -> pb.TokenLogprob:
        return pb.TokenLogprob(token_id=token, logprob=logprob, rank=rank, text=self._text_of(token))

    def _text_of(self, token: int) -> str:
        return self._tokenizer.token_text(token) if self._tokenizer else ""


def _ranks(report: TokenLogprobs) -> list[int]:
    """Return the rank of each of the most likely tokens: 1 + the number of more likely tokens."""
    ranks: list[int] = []
    for place, (token, logprob) in enumerate(zip(report.top_ids, report.top_logprobs, strict=True)):
        is_tied = place > 0 and logprob == report.top_logprobs[place - 1]
        # The rank of the sampled token counts logits. Different logits may round to equal logprobs.
        ranks.append(report.rank if token == report.token_id else ranks[-1] if is_tied else place + 1)
    return ranks


def _write_timing(target: pb.Timing, timing: messages.Timing, now: float, arrival: float) -> None:
    """Write the phases of a request. now, arrival: time.monotonic() seconds."""
    target.queue.FromNanoseconds(_ns(timing.queue))
    for seconds in timing.prefill_chunks:
        target.prefill_chunks.add().FromNanoseconds(_ns(seconds))
    target.decode.FromNanoseconds(_ns(timing.decode))
    target.finish.FromNanoseconds(_ns(now - timing.last_step_end))
    target.total.FromNanoseconds(_ns(now - arrival))
    target.of_which_device.FromNanoseconds(_ns(timing.device))
    target.of_which_host.FromNanoseconds(_ns(timing.host))


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
