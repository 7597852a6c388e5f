"""Resumed streams: from any token offset on, the client gets the whole answer once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.npu.step import SamplingParams, TokenLogprobs
from npuserve.service.frontend import response_options
from npuserve.service.frontend.response import ResponseBuilder
from npuserve.service.ipc.messages import Finish, Output, Request, Timing
from npuserve.service.requests.validation import CheckedRequest
from npuserve.service.text.tokenizer import Tokenizer
from npuserve.v1 import generate_pb2 as pb
from tests.service.text.test_detokenizer import KINDS, STOPS, tokenizer

TIMING = Timing(0.0, [], 0.0, 0.0, 0.0, 0.0)


def report(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, 1, [], [])


class Call:
    """One call that reads the answer `ids` from a token offset on.

    reason: finish reason of the answer.
    pause: seconds between two reads.
    parts: messages sent to the call.
    over: the last message was sent.
    """

    def __init__(
        self, ask: CheckedRequest, made: Tokenizer | None, ids: Sequence[int], reason: str, offset: int = 0,
        pause: float = 0.0,
    ):
        self.builder = ResponseBuilder(ask, made, offset)
        self.parts: list[pb.StreamGenerateResponse] = []
        self.over = False
        self._ids, self._reason, self._at = ids, reason, 0
        self._now, self._pause = 0.0, pause

    def read(self, until: int) -> None:
        """Add the tokens up to number `until`, and take a message if one is due."""
        ids, first = list(self._ids[self._at : until]), not self._at
        self._at = until
        finish = None
        if until == len(self._ids):
            finish = Finish(self._reason, 3, 0, len(self._ids), TIMING)  # type: ignore[arg-type]
        prompt = [report(7), report(8)] if first else None
        given = self.builder.add([Output(1, ids, finish, None, [report(i) for i in ids], prompt)])
        if self.builder.keep is not None or given:
            finish = given or Finish("stop_string", 3, 0, self.builder.keep or 0, TIMING)
            self.parts.append(self.builder.last_message(finish, 1.0))
            self.over = True
        else:
            self._now += self._pause
            part = self.builder.next_message(self._now)
            if part:
                self.parts.append(part)


def asked(draw: st.DrawFn, ids: int) -> CheckedRequest:
    sampling = SamplingParams(
        logprobs=draw(st.sampled_from([None, 0])), prompt_logprobs=draw(st.sampled_from([None, 0])),
        min_tokens=draw(st.integers(0, 3)))
    ask = CheckedRequest(
        Request("r", [5, 6, 7], max(ids, 1), 0.0, sampling),
        stop=tuple(draw(st.lists(st.sampled_from(STOPS), unique=True, max_size=3))),
        include_stop=draw(st.booleans()), skip_special_tokens=draw(st.booleans()), return_token_ids=draw(st.booleans()))
    packed = response_options.pack(ask)
    carried = Request("r", ask.request.prompt_ids, ask.request.max_tokens, 0.0, sampling, options=packed)
    assert response_options.unpack(carried) == CheckedRequest(carried, *(getattr(ask, name) for name in (
        "stop", "include_stop", "skip_special_tokens", "return_token_ids")))
    return ask


@st.composite
def answers(draw: st.DrawFn, kind: str) -> tuple[CheckedRequest, list[int], str, list[int]]:
    """Draw (ask, ids, finish reason, numbers of tokens at which the outputs end)."""
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    size = {"byte level": 700, "byte fallback": 300}.get(kind, 9)
    common = [chance.randrange(size) for _ in range(6)]
    ids = [chance.choice(common) if chance.random() < 0.6 else chance.randrange(size)
           for _ in range(draw(st.integers(1, 40)))]
    if kind.startswith("byte"):
        text = draw(st.sampled_from(["ab 你好, bab 👩‍👧 aaaa there was", "", "天气 e up\n"]))
        ids += tokenizer(kind).encode(text)
    cuts = sorted({*draw(st.lists(st.integers(1, len(ids)), max_size=30)), len(ids)})
    return asked(draw, len(ids)), ids, draw(st.sampled_from(["length", "eos", "stop_token"])), cuts


def joined(parts: Sequence[pb.StreamGenerateResponse]) -> tuple[str, list[int], list[int], list[int]]:
    """Return text, ids, tokens with logprobs and prompt tokens with logprobs. Check the offsets."""
    at = parts[0].offset if parts else 0
    for part in parts:
        assert part.offset == at
        at += part.num_tokens
    return ("".join(part.text for part in parts), [i for part in parts for i in part.token_ids],
            [p.chosen.token_id for part in parts for p in part.logprobs],
            [p.chosen.token_id for part in parts for p in part.prompt_logprobs])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "none"])
@given(data=st.data())
def test_response_resumed_after_any_message_is_whole(kind: str, data: st.DataObject) -> None:
    """For any progress of the engine at the resume, and any number of disconnects."""
    ask, ids, reason, cuts = data.draw(answers("words" if kind == "none" else kind))
    made = None if kind == "none" else tokenizer(kind)
    if made is None:
        ask = CheckedRequest(ask.request, (), False, True, ask.return_token_ids)
    alone = Call(ask, made, ids, reason)
    for cut in cuts:
        if not alone.over:
            alone.read(cut)
    whole, last = joined(alone.parts), alone.parts[-1]

    got: list[pb.StreamGenerateResponse] = []
    made_so_far = calls = prompt_positions = 0
    while not (got and got[-1].HasField("finish")):
        held = got[-1].offset + got[-1].num_tokens if got else 0
        call = Call(ask, made, ids, reason, held, data.draw(st.sampled_from([0.0, 1.0])))
        for _ in range(data.draw(st.integers(1, 4)) if calls < 6 else len(cuts) + 1):
            made_so_far = data.draw(st.sampled_from([cut for cut in cuts if cut >= max(made_so_far, 1)]))
            if not call.over and (call._at < made_so_far or not call._at or made_so_far == len(ids)):
                call.read(made_so_far)
        calls += 1
        call_positions = 0
        for part in call.parts[: data.draw(st.integers(0, len(call.parts))) if calls < 6 else None]:
            assert not (held and part.prompt_logprobs)
            repeated = max(0, prompt_positions - call_positions)  # a stream resumed at token 0 repeats them
            call_positions += len(part.prompt_logprobs)
            prompt_positions = max(prompt_positions, call_positions)
            del part.prompt_logprobs[:repeated]
            got.append(part)
        if calls >= 6:
            made_so_far = len(ids)
    assert joined(got) == whole
    assert got[-1].finish == last.finish


def test_response_resumed_at_the_end_of_a_stop_string_has_no_text() -> None:
    made = tokenizer("byte level")
    ids = made.encode("once upon")
    ask = CheckedRequest(Request("r", [5], 9, 0.0, SamplingParams()), ("pon",), False, True, False)
    call = Call(ask, made, ids, "length", offset=len(ids))
    call.read(len(ids))
    [part] = call.parts
    assert (part.text, part.offset, part.num_tokens, part.finish.matched_stop) == ("", len(ids), 0, "pon")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_response_resumed_at_any_token_is_whole(kind: str, data: st.DataObject) -> None:
    """Also inside a character or a stop string.

    Ids continue at the offset. The text continues with the first character that the client's tokens do not complete.
    """
    ask, ids, reason, _ = data.draw(answers(kind))
    ask = CheckedRequest(ask.request, (), False, ask.skip_special_tokens, True)
    whole = Call(ask, tokenizer(kind), ids, reason)
    whole.read(len(ids))
    text, all_ids, *_ = joined(whole.parts)
    held = data.draw(st.integers(1, len(ids)))
    call = Call(ask, tokenizer(kind), ids, reason, held)
    call.read(len(ids))
    assert call.parts[0].offset == held
    rest, rest_ids, *_ = joined(call.parts)
    assert rest_ids == all_ids[held:]
    assert text.endswith(rest)
    # At most the text after the messages that end at or before the offset; at least the text after the next message.
    step = Call(ask, tokenizer(kind), ids, reason)
    for until in range(1, len(ids) + 1):
        if not step.over:
            step.read(until)
    before = "".join(part.text for part in step.parts if part.offset + part.num_tokens <= held)
    if held == len(all_ids):  # the whole answer
        assert rest == ""
    after = "".join(part.text for part in step.parts if part.offset < held)
    assert len(text) - len(after) <= len(rest) <= len(text) - len(before)
