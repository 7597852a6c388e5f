"""One request's answer in the making: the engine's outputs in, response messages out. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from npuserve.npu.step import TokenLogprobs
from npuserve.service.ipc import messages
from npuserve.service.ipc.messages import Output
from npuserve.service.requests.validation import Ask
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
"""Time after which tokens without text are sent. With MAX_INTERVAL_SECONDS of engine_stream.py, a stream whose tokens
are at most 1 s apart has a message in every second."""


MAX_PROMPT_LOGPROBS_BYTES = 256 << 10
"""Of one message's prompt_logprobs: a few milliseconds of work, and far below the 4 MiB that most clients take."""


class Answer:
    """`add` what came, then take `prompt_messages` and `message`s; after `add` said that it is over, `last` once.

    Tokens wait here until their text is known to be whole and no beginning of a stop string; a message carries the ids
    and logprobs of exactly the tokens whose text it carries.

        tokens of the answer: [0, sent) sent | [sent, ready) text in `text` | the rest held by the detokenizer

    An end-of-text or stop token leaves text only under include_stop, and then as any other token does.

    While tokens come whose text is empty or must wait, a message without text goes after PROGRESS_SECONDS, so that the
    client sees progress. It carries the tokens whose text is known to be empty, and none of those whose text must wait.

    held: tokens that the client has of a call before this one. The first outputs to be added have at least these, and
    what is sent follows on them: of the text, what is beyond the last message that could have ended there.
    """

    def __init__(self, ask: Ask, tokenizer: Tokenizer | None, held: int = 0):
        self.matched_stop: str | None = None
        self.keep: int | None = None
        self._ask = ask
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer:
            from npuserve.service.text.detokenizer import Detokenizer

            self._detokenizer = Detokenizer(
                tokenizer, skip_special_tokens=ask.skip_special_tokens, stop=ask.stop, include_stop=ask.include_stop,
                min_tokens=ask.request.sampling.min_tokens, prompt_ids=ask.request.prompt_ids, held_tokens=held)
        self._wants_tokens = ask.return_token_ids or ask.request.sampling.logprobs is not None
        self._text = ""
        self._ready = 0
        self._sent = self._held = held
        self._surplus = 0  # characters of the text to come that the client has
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        # None once sent, as they were with the first token, or never asked for.
        self._prompt_logprobs: list[TokenLogprobs] | None = (
            None if ask.request.sampling.prompt_logprobs is None or held else [])
        self._prompt_part = pb.StreamGenerateResponse()  # has the positions that are converted and not yet sent
        self._prompt_part_bytes = 0
        self._last_id: int | None = None
        self._last_message: float | None = None  # time; of the first token until there was a message

    def add(self, outputs: Sequence[Output]) -> messages.Finish | None:
        """What the engine made. Its finish, if this was the last of it; if a stop string was found, `keep` is set,
        and what the engine makes after that token is not to be added."""
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
            self._leave_out(0)
            return finish
        silent = finish is not None and finish.reason in ("eos", "stop_token") and not self._ask.include_stop
        self._push(self._detokenizer.push(ids[:-1] if silent else ids))
        if finish and self.keep is None:
            self._push(self._detokenizer.finish())
        self._leave_out(self._detokenizer.held_characters)
        return finish

    def prompt_messages(self) -> Iterator[pb.StreamGenerateResponse]:
        """Yield messages of prompt_logprobs alone, until what is left fits the message of the first token."""
        if self._prompt_logprobs is None:
            return
        if not self._prompt_part.prompt_logprobs:  # a prompt's first token has no probability
            first = self._ask.request.prompt_ids[0]
            token = pb.TokenLogprob(token_id=first, text=self._text_of(first))
            self._prompt_part.prompt_logprobs.add().chosen.MergeFrom(token)
        reports, self._prompt_logprobs = self._prompt_logprobs, []
        for report in reports:
            position = self._position(report)
            size = position.ByteSize()
            if self._prompt_part_bytes + size > MAX_PROMPT_LOGPROBS_BYTES:
                full, self._prompt_part, self._prompt_part_bytes = self._prompt_part, pb.StreamGenerateResponse(), 0
                yield full
            self._prompt_part.prompt_logprobs.append(position)
            self._prompt_part_bytes += size

    def message(self, now: float) -> pb.StreamGenerateResponse | None:
        """Return the next message: text, tokens without text if they are asked for, or progress. now: time.monotonic()
        seconds."""
        if self._text or (self._ready > self._sent and self._wants_tokens) or self._is_progress_due(now):
            self._last_message = now
            return self._take()
        return None

    def last(self, finish: messages.Finish, now: float) -> pb.StreamGenerateResponse:
        """The rest, and how it ended. finish: the engine's. now: time.monotonic() seconds."""
        generated = self._sent + len(self._ids) if self.keep is None else self.keep
        self._ready = generated
        message = self._take()
        made = message.finish
        if self.matched_stop is not None:
            made.reason = pb.FINISH_REASON_STOP_STRING
            made.matched_stop = self.matched_stop
        else:
            made.reason = REASONS[finish.reason]
            if finish.reason in ("eos", "stop_token") and self._last_id is not None:
                made.matched_stop_token_id = self._last_id
                if self._tokenizer:
                    made.matched_stop = self._tokenizer.token_text(self._last_id)
        made.usage.prompt_tokens = finish.prompt_tokens
        made.usage.cached_tokens = finish.cached_tokens
        made.usage.generated_tokens = generated
        _write_timing(made.timing, finish.timing, now, self._ask.request.arrival)
        return message

    def _is_progress_due(self, now: float) -> bool:
        """Return whether tokens have waited for PROGRESS_SECONDS since the last message, or since the first token."""
        if not self._ids:
            return False
        if self._last_message is None:
            self._last_message = now
        return now - self._last_message >= PROGRESS_SECONDS

    def _push(self, delta: Delta | None) -> None:
        if delta is None:
            return
        self._text += delta.text[self._surplus :]
        self._surplus = max(0, self._surplus - len(delta.text))
        self._ready += delta.num_tokens
        if delta.matched_stop is not None:
            self.matched_stop, self.keep = delta.matched_stop, delta.keep

    def _leave_out(self, characters: int) -> None:
        """Of what was added first, the client has so many characters, and the tokens that it holds."""
        if not self._held:
            return
        held, self._held = self._held, 0
        self._surplus = max(0, characters - len(self._text))
        self._text = self._text[characters:]
        del self._ids[:held], self._logprobs[:held]

    def _take(self) -> pb.StreamGenerateResponse:
        count = max(0, self._ready - self._sent)
        ids = self._ids[:count] if self._ask.return_token_ids else None
        message = pb.StreamGenerateResponse(text=self._text, offset=self._sent, token_ids=ids, num_tokens=count)
        if self._logprobs:
            message.logprobs.extend(map(self._position, self._logprobs[:count]))
        if self._prompt_logprobs is not None:
            parts = [*self.prompt_messages(), self._prompt_part]
            message.prompt_logprobs.extend(position for part in parts for position in part.prompt_logprobs)
            self._prompt_logprobs = None
        del self._ids[:count], self._logprobs[:count]
        self._sent += count
        self._text = ""
        return message

    def _position(self, report: TokenLogprobs) -> pb.PositionLogprobs:
        top = zip(report.top_ids, report.top_logprobs, strict=True)
        return pb.PositionLogprobs(
            chosen=self._token(report.token_id, report.logprob, report.rank),
            top=[self._token(token, logprob, rank) for rank, (token, logprob) in enumerate(top, 1)])

    def _token(self, token: int, logprob: float, rank: int) -> pb.TokenLogprob:
        return pb.TokenLogprob(token_id=token, logprob=logprob, rank=rank, text=self._text_of(token))

    def _text_of(self, token: int) -> str:
        return self._tokenizer.token_text(token) if self._tokenizer else ""


def _write_timing(made: pb.Timing, timing: messages.Timing, now: float, arrival: float) -> None:
    made.queue.FromNanoseconds(_ns(timing.queue))
    for seconds in timing.prefill_chunks:
        made.prefill_chunks.add().FromNanoseconds(_ns(seconds))
    made.decode.FromNanoseconds(_ns(timing.decode))
    made.finish.FromNanoseconds(_ns(now - timing.last_step_end))
    made.total.FromNanoseconds(_ns(now - arrival))
    made.of_which_device.FromNanoseconds(_ns(timing.device))
    made.of_which_host.FromNanoseconds(_ns(timing.host))


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
