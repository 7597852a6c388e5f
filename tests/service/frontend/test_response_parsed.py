"""Messages of parsed answers: tokens stay with their parts, also in streams that are resumed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.npu.step import SamplingParams, TokenLogprobs
from npuserve.service.frontend import response_options
from npuserve.service.frontend.response import ResponseBuilder
from npuserve.service.ipc.messages import Finish, Output, Request, Timing
from npuserve.service.parsing.answer_parser import AnswerParser
from npuserve.service.parsing.parameter_types import FunctionTypes
from npuserve.service.requests.validation import CheckedRequest
from npuserve.service.text.answer_format import PLAIN, TAGS, AnswerFormat
from npuserve.service.text.fast_tokenizer import FastTokenizer
from npuserve.service.text.tokenizer import Tokenizer
from npuserve.v1 import generate_pb2 as pb
from tests.service.parsing.test_answer_parser import CUT, call, found
from tests.service.text.test_detokenizer import tokenizer
from tests.support.tokenizers import train

BOTH = AnswerFormat(True, True)
KINDS = ["byte level", "byte fallback"]
CALL_TYPES = {"f": FunctionTypes({"a": ("null", "string")}, ("integer",))}
TIMING = Timing(0.0, [], 0.0, 0.0, 0.0, 0.0)
texts = st.lists(st.sampled_from([
    "<think>\n", "\n</think>\n\n", "a", "é", "\n", "<", call(), call("g", '{"b": "é\\n"}'), "\n" + call(), CUT,
    "</tool_call>",
    '<tool_call>{"arguments": {"x": 1}, "name": "late"}</tool_call>']), min_size=1, max_size=7).map("".join)


def checked(ids: Sequence[int], stop: Sequence[str] = (), include_stop: bool = False) -> CheckedRequest:
    made = CheckedRequest(
        Request("r", [5, 6, 7], len(ids) + 1, 0.0, SamplingParams(logprobs=0)), tuple(stop), include_stop, True, True,
        answer_format=BOTH, call_id="x", call_types=CALL_TYPES)
    request = msgspec.structs.replace(made.request, options=response_options.pack(made))
    assert response_options.unpack(request) == CheckedRequest(
        request, made.stop, include_stop, True, True, answer_format=BOTH, call_id="x", call_types=CALL_TYPES)
    return response_options.unpack(request)


def read(
    ask: CheckedRequest, kind: str, ids: Sequence[int], cuts: Sequence[int], offset: int = 0
) -> list[pb.StreamGenerateResponse]:
    """Return the messages of a call that gets the ids in parts which end at the cuts, from a token offset on."""
    builder, messages, at = ResponseBuilder(ask, tokenizer(kind), offset), [], 0
    for end in sorted({cut for cut in cuts if offset <= cut <= len(ids)} | {len(ids)}):
        finish = Finish("length", 3, 0, len(ids), TIMING) if end == len(ids) else None
        reports = [TokenLogprobs(i, -1.0, 1, [], []) for i in ids[at:end]]
        given_finish = builder.add([Output(1, list(ids[at:end]), finish, None, reports, None)])
        at = end
        if builder.keep is not None or given_finish:
            last = given_finish or Finish("stop_string", 3, 0, builder.keep or 0, TIMING)
            return [*messages, builder.last_message(last, 1.0)]
        message = builder.next_message(0.0)
        if message:
            messages.append(message)
    raise AssertionError("the answer has no end")


Parts = tuple[str, str, list[tuple[str, str, str]]]


def parts(messages: Sequence[pb.StreamGenerateResponse]) -> Parts:
    """Return text, reasoning, and (id, name, arguments) of the calls. Check the ids, logprobs and offsets."""
    calls: list[tuple[str, str, str]] = []
    for message in messages:
        assert message.num_tokens == len(message.token_ids) == len(message.logprobs)
        assert list(message.token_ids) == [position.chosen.token_id for position in message.logprobs]
        for part in message.tool_calls:
            if part.index == len(calls):
                calls.append((part.id, part.name, part.arguments))
            else:
                assert (part.index, part.id, part.name) == (len(calls) - 1, "", "")
                calls[-1] = *calls[-1][:2], calls[-1][2] + part.arguments
    assert [name for name, _, _ in calls] == [f"call_x_0_{i}" for i in range(len(calls))]
    for before, after in itertools.pairwise(messages):
        assert after.offset == before.offset + before.num_tokens
    return "".join(m.text for m in messages), "".join(m.reasoning for m in messages), calls


def written(kind: str, ids: Sequence[int]) -> str:
    """Return the text of an answer that is not parsed."""
    ask = CheckedRequest(checked(ids).request, (), False, True, True)
    return "".join(message.text for message in read(ask, kind, ids, []))


def reference(text: str) -> Parts:
    parser = AnswerParser(BOTH, "possible")
    parser.feed(text)
    parser.finish()
    content, reasoning, calls = found(parser.take())
    return content, reasoning, [(f"call_x_0_{i}", *one) for i, one in enumerate(calls)]


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, data=st.data())
def test_messages_joined_equal_the_parsed_text(kind: str, text: str, data: st.DataObject) -> None:
    ids = tokenizer(kind).encode(text, False)
    whole = written(kind, ids)
    cuts = data.draw(st.lists(st.integers(1, len(ids)), max_size=20))
    messages = read(checked(ids), kind, ids, cuts)
    assert parts(messages) == reference(whole)
    assert [i for message in messages for i in message.token_ids] == ids


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, data=st.data())
def test_stream_resumed_after_any_message_is_whole(kind: str, text: str, data: st.DataObject) -> None:
    ids = tokenizer(kind).encode(text, False)
    ask, cuts = checked(ids), st.lists(st.integers(1, len(ids)), max_size=20)
    messages = read(ask, kind, ids, data.draw(cuts))
    kept = messages[: data.draw(st.integers(0, len(messages) - 1))]
    offset = sum(message.num_tokens for message in kept)
    rest = read(ask, kind, ids, data.draw(cuts), offset)
    assert rest[0].offset == offset
    assert parts([*kept, *rest]) == parts(messages)
    assert [i for message in (*kept, *rest) for i in message.token_ids] == ids


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, data=st.data())
def test_stop_string_ends_the_written_text(kind: str, text: str, data: st.DataObject) -> None:
    ids = tokenizer(kind).encode(text, False)
    whole = written(kind, ids)
    stop = data.draw(st.sampled_from(["a", "\n", "<", "_call>", "name", '": ']))
    include = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(1, len(ids)), max_size=20))
    messages = read(checked(ids, [stop], include), kind, ids, cuts)
    at = whole.find(stop)
    expected = whole if at < 0 else whole[: at + len(stop) * include]
    assert parts(messages) == reference(expected)
    assert messages[-1].finish.matched_stop == (stop if at >= 0 else "")
    assert messages[-1].finish.usage.generated_tokens == sum(message.num_tokens for message in messages)


@given(text=texts)
def test_a_part_is_sent_with_the_token_that_ends_it(text: str) -> None:
    """A message carries all tokens up to the last one of its parts: the parser holds nothing of them back."""
    ids = tokenizer("byte level").encode(text, False)
    made = tokenizer("byte level")
    at = 0
    for message in read(checked(ids), "byte level", ids, range(1, len(ids)))[:-1]:
        at += message.num_tokens
        parser = AnswerParser(BOTH, "possible")
        parser.feed(made.decode(ids[:at]))
        assert parser.is_clean


@pytest.mark.parametrize("answer_format", [BOTH, PLAIN])
def test_tags_that_are_special_tokens_are_skipped_only_if_the_answer_is_not_parsed(answer_format: AnswerFormat) -> None:
    with_tags = train()
    with_tags.add_special_tokens([*TAGS])
    special = Tokenizer(FastTokenizer(with_tags))
    ids = special.encode("<think>\nb\n</think>\n\na\n" + call(), False)
    builder = ResponseBuilder(
        CheckedRequest(Request("r", [5], 99, 0.0), (), False, True, False, answer_format=answer_format), special)
    finish = Finish("length", 1, 0, len(ids), TIMING)
    assert builder.add([Output(1, ids, finish)]) is finish
    message = builder.last_message(finish, 0.0)
    assert (message.reasoning, len(message.tool_calls)) == (("b", 1) if answer_format else ("", 0))
    assert message.text.startswith("a" if answer_format else "\nb\n\n\na\n")


@pytest.mark.parametrize("text", ["a", "<think>\na", call()])
def test_a_part_of_any_kind_is_sent_at_once(text: str) -> None:
    """Also if the client requests neither ids nor logprobs."""
    ids = tokenizer("byte level").encode(text, False)
    request = Request("r", [5], 99, 0.0, SamplingParams())
    builder = ResponseBuilder(
        CheckedRequest(request, (), False, True, False, answer_format=BOTH, call_id="x"), tokenizer("byte level"))
    assert builder.add([Output(1, ids)]) is None
    message = builder.next_message(0.0)
    assert message
    assert message.text or message.reasoning or message.tool_calls
