"""Invalid requests: each gets one status that names the field, and the server continues to serve."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf import struct_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from npuserve.service.ipc.messages import Submit
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import prompt_pb2, tokenize_pb2
from tests.support.fake_engine import make_folder
from tests.support.front_end import Running, ask, running

NAN, INF = float("nan"), float("inf")


def chat(*turns: tuple[str, str], **fields: object) -> pb.GenerateRequest:
    messages = [prompt_pb2.Message(role=role, content=content) for role, content in turns]
    return pb.GenerateRequest(chat=prompt_pb2.Chat(messages=messages, **fields))  # type: ignore[arg-type]


def struct(**values: object) -> struct_pb2.Struct:
    made = struct_pb2.Struct()
    for name, value in values.items():
        if isinstance(value, float):
            made.fields[name].number_value = value
        else:
            made[name] = value
    return made


INVALID = {
    "no prompt": (pb.GenerateRequest(), "prompt: one of text, token_ids and chat"),
    "empty text": (ask(""), "text: must be at least one token"),
    "empty ids": (pb.GenerateRequest(token_ids=prompt_pb2.TokenIds()), "token_ids: must be at least one token"),
    "id beyond": (ask([1, 300]), "token_ids.ids[1]: token id must be in [0, 299], got 300"),
    "id far beyond": (ask([2**32 - 1]), "token_ids.ids[0]: token id must be in [0, 299], got 4294967295"),
    "too many ids": (ask([1] * 64), "token_ids: 64 tokens of prompt are too many; max_model_len 64 leaves room for a"),
    "too long a text": (ask("a" * 100), "text: 100 tokens of prompt are too many"),
    "far too long a text": (ask("a" * 20_000), "text: 20000 bytes of text cannot fit; max_model_len is 64"),
    "huge text": (ask("a" * (1 << 20)), "text: 1048576 bytes of text cannot fit"),
    "chat without turns": (chat(), "chat.messages: must be at least one message"),
    "chat without a role": (chat(("user", "a"), ("", "b")), "chat.messages[1].role: must not be empty"),
    "chat with an unknown role": (
        chat(("user", "a"), ("usr", "b")),
        "chat.messages[1].role: must be one of assistant, system, tool, user; got 'usr'"),
    "surrogate in a tool": (
        chat(("user", "a"), tools=["{}", '{"name": "\\ud800"}']),
        "chat.tools[1]: must be valid Unicode, got the lone surrogate U+D800"),
    "surrogate as a tool's key": (chat(("user", "a"), tools=['{"\\uDFFF": 1}']), "chat.tools[0]: must be valid Uni"),
    "surrogate in a tool call": (
        pb.GenerateRequest(chat=prompt_pb2.Chat(messages=[
            prompt_pb2.Message(role="assistant", tool_calls=["{}", '{"a": [{"b": "x\\udc00\\ud83d"}]}'])])),
        "chat.messages[0].tool_calls[1]: must be valid Unicode, got the lone surrogate U+DC00"),
    "far too long a chat": (
        chat(("user", "a" * 20_000)), "chat.messages: must have at most 704 characters of content, as max_model_len"),
    "chat too long": (chat(("user", "a" * 70)), "chat: 77 tokens of prompt are too many"),
    "template argument taken": (chat(("user", "a"), template_args=struct(messages=[])), "chat.template_args.messages"),
    "template argument NaN": (chat(("user", "a"), template_args=struct(x=NAN)), "chat.template_args.x: must be a fin"),
    "too many turns": (chat(*[("user", "")] * 10_001), "chat.messages: must be at most 10000, got more"),
    "too many tools": (chat(("user", "a"), tools=["{}"] * 1025), "chat.tools: must be at most 1024, got 1025"),
    "too large a regex": (ask(regex="a" * 65537), "regex: must be at most 65536 bytes, got 65537"),
    "too large a schema": (ask(json_schema="ü" * 32769), "json_schema: must be at most 65536 bytes, got 65538"),
    "too large a grammar": (ask(grammar="a" * 99999), "grammar: must be at most 65536 bytes, got 99999"),
    "too large choices": (
        pb.GenerateRequest(text="a", choices=pb.Choices(choices=["x"] * 40_000)), "choices: must be at most 65536 by"),
    "too many choices": (
        pb.GenerateRequest(text="a", choices=pb.Choices(choices=map(str, range(1025)))),
        "choices.choices: must be 1 to 1024 strings, got 1025"),
    "no choices": (pb.GenerateRequest(text="a", choices=pb.Choices()), "choices.choices: must be 1 to 1024 strings"),
    "choice twice": (
        pb.GenerateRequest(text="a", choices=pb.Choices(choices=["x", "x"])),
        "choices.choices[1]: must differ from the others; string 0 is 'x' too"),
    "schema that is no JSON": (ask(json_schema="{"), "json_schema: must be the text of a JSON object or a boolean: E"),
    "schema that is a list": (ask(json_schema="[]"), "json_schema: must be the text of a JSON object or a boolean, go"),
    "surrogate in a schema": (ask(json_schema='{"a": "\\ud800"}'), "json_schema: must be valid Unicode, got the lone"),
    "tag that is no object": (ask(structural_tag="[1]"), "structural_tag: must be the text of a JSON object, got list"),
    "empty regex": (ask(regex=""), "regex: must not be empty"),
    "empty grammar": (ask(grammar=""), "grammar: must not be empty"),
    "constraint beside allowed ids": (
        ask(regex="a", allowed_token_ids=[1]), "sampling.allowed_token_ids: must be empty if regex is set"),
    "tool with a huge number": (
        chat(("user", "a"), tools=['{"a": ' + "9" * 5000 + "}"]),
        "chat.tools[0]: must be the text of a JSON object: '" + "9" * 61 + "...' has more than 4000 digits"),
    "tool that is no object": (chat(("user", "a"), tools=["{}", "[1]"]), "chat.tools[1]: must be the text of a JSON"),
    "tool call that is no JSON": (
        pb.GenerateRequest(chat=prompt_pb2.Chat(messages=[
            prompt_pb2.Message(role="assistant", tool_calls=["{'a': 1}"])])),
        "chat.messages[0].tool_calls[0]: must be the text of a JSON"),
    "temperature below": (ask(temperature=-0.1), "sampling.temperature: must be in [0, 100], got -0.1"),
    "temperature above": (ask(temperature=101), "sampling.temperature: must be in [0, 100], got 101"),
    "temperature NaN": (ask(temperature=NAN), "sampling.temperature: must be in [0, 100], got nan"),
    "temperature inf": (ask(temperature=INF), "sampling.temperature: must be in [0, 100], got inf"),
    "top_p 0": (ask(top_p=0), "sampling.top_p: must be in (0, 1], got 0"),
    "top_p above": (ask(top_p=1.5), "sampling.top_p: must be in (0, 1], got 1.5"),
    "top_p NaN": (ask(top_p=NAN), "sampling.top_p: must be in (0, 1], got nan"),
    "top_p just above": (ask(top_p=1.0000001), "sampling.top_p: must be in (0, 1], got 1.00000012"),
    "top_k below": (ask(top_k=-2), "sampling.top_k: must be in [-1, 2147483647], got -2"),
    "min_p below": (ask(min_p=-1), "sampling.min_p: must be in [0, 1], got -1"),
    "min_p above": (ask(min_p=1.01), "sampling.min_p: must be in [0, 1], got 1.01"),
    "min_p NaN": (ask(min_p=NAN), "sampling.min_p: must be in [0, 1], got nan"),
    "repetition_penalty 0": (ask(repetition_penalty=0), "sampling.repetition_penalty: must be in (0, 100], got 0"),
    "repetition_penalty inf": (ask(repetition_penalty=INF), "sampling.repetition_penalty: must be in (0, 100], got i"),
    "presence_penalty": (ask(presence_penalty=2.5), "sampling.presence_penalty: must be in [-2, 2], got 2.5"),
    "frequency_penalty": (ask(frequency_penalty=-3), "sampling.frequency_penalty: must be in [-2, 2], got -3"),
    "frequency_penalty NaN": (ask(frequency_penalty=NAN), "sampling.frequency_penalty: must be in [-2, 2], got nan"),
    "bias of no token": (ask(logit_bias={300: 1}), "sampling.logit_bias[300]: token id must be in [0, 299], got 300"),
    "bias too large": (ask(logit_bias={7: 101}), "sampling.logit_bias[7]: must be in [-100, 100], got 101"),
    "bias just above": (ask(logit_bias={7: 100.00001}), "sampling.logit_bias[7]: must be in [-100, 100], got 100.000"),
    "bias -inf": (ask(logit_bias={7: -INF}), "sampling.logit_bias[7]: must be in [-100, 100], got -inf"),
    "too many biases": (ask(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias: must have at most 1024"),
    "allowed beyond": (ask(allowed_token_ids=[0, 999]), "sampling.allowed_token_ids[1]: token id must be in [0, 299]"),
    "only ends allowed": (
        ask(allowed_token_ids=[297], min_tokens=1), "sampling.allowed_token_ids: must hold a token that does not end"),
    "max_tokens 0": (ask(max_tokens=0), "stopping.max_tokens: must be in [1, 63], as max_model_len is 64"),
    "max_tokens above": (ask("abc", 62), "stopping.max_tokens: must be in [1, 61], as max_model_len is 64 and the pr"),
    "max_tokens far above": (ask(max_tokens=2**32 - 1), "stopping.max_tokens: must be in [1, 63]"),
    "min_tokens above": (ask(max_tokens=5, min_tokens=6), "stopping.min_tokens: must be in [0, 5], got 6"),
    "min_tokens above the room": (ask(max_tokens=None, min_tokens=64), "stopping.min_tokens: must be in [0, 63], got"),
    "empty stop": (ask(stop=["a", ""]), "stopping.stop[1]: must be 1 to 1024 characters, got 0"),
    "long stop": (ask(stop=["a" * 1025]), "stopping.stop[0]: must be 1 to 1024 characters, got 1025"),
    "many stops": (ask(stop=[str(i) for i in range(17)]), "stopping.stop: must be at most 16 strings, got 17"),
    "many stop ids": (ask(stop_token_ids=list(range(129))),
                      "stopping.stop_token_ids: must be at most 128 ids, got 129"),
    "stop id beyond": (ask(stop_token_ids=[300]), "stopping.stop_token_ids[0]: token id must be in [0, 299], got 300"),
    "logprobs above": (ask(logprobs=21), "output.logprobs: must be in [0, 20], got 21"),
    "prompt_logprobs above": (ask(prompt_logprobs=21), "output.prompt_logprobs: must be in [0, 20], got 21"),
    "priority above": (ask(priority=101), "scheduling.priority: must be in [0, 100], got 101"),
    "priority below": (ask(priority=-1), "scheduling.priority: must be in [0, 100], got -1"),
    "parse_special_tokens of ids": (ask([1, 2], parse_special_tokens=True),
                                    "parse_special_tokens: is for text and chat; token_ids has no text to parse"),
    "long salt": (ask(cache_salt="s" * 129), "scheduling.cache_salt: must be at most 128 characters, got 129"),
    "empty id": (ask(request_id=""), "request_id: must be 1 to 128 printable ASCII characters"),
    "long id": (ask(request_id="x" * 129), "request_id: must be 1 to 128 printable ASCII characters"),
    "id with a newline": (ask(request_id="a\nb"), "request_id: must be 1 to 128 printable ASCII characters"),
    "id not ASCII": (ask(request_id="né"), "request_id: must be 1 to 128 printable ASCII characters"),
    "n 0": (ask(n=0), "n: must be in [1, 8], since a sample is a request, and at most 8 may be live at a time, got 0"),
    "n 9": (ask(n=9), "n: must be in [1, 8], since a sample is a request, and at most 8 may be live at a time, got 9"),
    "n far above": (ask(n=2**32 - 1), "n: must be in [1, 8], since"),
}
OTHERS = {
    "other model": (ask(model="gpt-5"), grpc.StatusCode.NOT_FOUND, "model: 'gpt-5' is not served here"),
    "empty model": (ask(model=""), grpc.StatusCode.NOT_FOUND, "model: '' is not served here"),
}
TOKENIZE = {
    "surrogate in a tool": (
        tokenize_pb2.TokenizeRequest(chat=chat(("user", "a"), tools=['{"a": "\\ud800"}']).chat),
        "chat.tools[0]: must be valid Unicode"),
    "unknown role": (
        tokenize_pb2.TokenizeRequest(chat=chat(("human", "a")).chat), "chat.messages[0].role: must be one of "),
    "nothing": (tokenize_pb2.TokenizeRequest(), "prompt: one of text and chat is needed"),
    "no turns": (tokenize_pb2.TokenizeRequest(chat=prompt_pb2.Chat()), "chat.messages: must be at least one message"),
}
DETOKENIZE = {
    "beyond": (tokenize_pb2.DetokenizeRequest(token_ids=[0, 300]), "token_ids[1]: token id must be in [0, 299], got "),
}


async def refused(call: grpc.aio.Call, code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    reply = call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await reply
    assert failed.value.code() == code, failed.value.details()
    assert details in failed.value.details()
    return failed.value


async def good(server: Running) -> None:
    assert (await server.inference.Generate(ask("ab", 3))).text == "cde"


@pytest.mark.slow
async def test_request_with_a_bad_field_is_refused_and_the_next_is_served(tmp_path: Path) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    cases = {name: (message, invalid, details) for name, (message, details) in INVALID.items()}
    assert len(cases | OTHERS) >= 45
    async with running(make_folder(tmp_path / "m", chat=True)) as server:
        for name, (message, code, details) in (cases | OTHERS).items():
            error = await refused(server.inference.Generate(message), code, details)
            if len(message.text) < 1 << 20:
                await refused(server.inference.StreamGenerate(message), code, details)
            if code is grpc.StatusCode.INVALID_ARGUMENT:
                bad = error_details_pb2.BadRequest()
                assert any(detail.Unpack(bad) for detail in rpc_status.from_call(error).details), name
                assert details.startswith(bad.field_violations[0].field), name
            await good(server)
        for message, details in TOKENIZE.values():
            await refused(server.inference.Tokenize(message), grpc.StatusCode.INVALID_ARGUMENT, details)
        for message, details in DETOKENIZE.values():
            await refused(server.inference.Detokenize(message), grpc.StatusCode.INVALID_ARGUMENT, details)
        await good(server)
        assert len(server.engine.got(Submit)) == len(cases | OTHERS) + 1  # only the valid ones


@pytest.mark.slow
async def test_call_with_malformed_or_oversized_bytes_is_refused(tmp_path: Path) -> None:
    """Bytes that are not protobuf, and messages above the size limit."""
    async with running(make_folder(tmp_path / "m", chat=True)) as server:
        raw = server.channel.unary_unary("/npuserve.v1.InferenceService/Generate")
        for data, details in (
            (b"\xff\xff\xff", "malformed protobuf"), (b"\x1a\xff\xff\xff\x7fabc", "malformed protobuf"),
            (b"\x1a\x02\xc3\x28", "text: must be valid UTF-8"),
            (b"\x1a\x01a\x52\x01\xff", "regex: must be valid UTF-8"),
            (b"\x1a\x01a\x62\x06\x0a\x01b\x0a\x01\xff", "choices.choices[1]: must be valid UTF-8"),
        ):
            await refused(raw(data), grpc.StatusCode.INVALID_ARGUMENT, details)
            await good(server)
        too_large = server.inference.Generate(ask("a" * (65 << 20)))
        await refused(too_large, grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than")
        await good(server)
        too_large = server.inference.Generate(ask("a" * (2 << 20)))
        error = await refused(too_large, grpc.StatusCode.RESOURCE_EXHAUSTED, "max_message_size is 1049880 bytes")
        assert not any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR)
                       for detail in rpc_status.from_call(error).details)
        await good(server)


async def test_request_with_several_bad_fields_names_all(tmp_path: Path) -> None:
    message = pb.GenerateRequest(
        text="a" * 64, request_id="a b", sampling=pb.SamplingParams(temperature=-1, top_p=2, allowed_token_ids=[300]),
        stopping=pb.StoppingParams(max_tokens=0, stop=[""]), scheduling=pb.SchedulingParams(priority=101))
    async with running(make_folder(tmp_path / "m", chat=True)) as server:
        error = await refused(server.inference.Generate(message), grpc.StatusCode.INVALID_ARGUMENT, "; ")
        bad = error_details_pb2.BadRequest()
        assert any(detail.Unpack(bad) for detail in rpc_status.from_call(error).details)
        found = {violation.field: violation.description for violation in bad.field_violations}
        assert list(found) == [
            "request_id", "stopping.stop[0]", "sampling.temperature", "sampling.top_p", "sampling.allowed_token_ids[0]",
            "scheduling.priority", "text", "stopping.max_tokens"]
        assert not any(field in description for field, description in found.items())
        assert error.details() == "; ".join(f"{field}: {description}" for field, description in found.items())
        message.sampling.min_p, message.scheduling.cache_salt, message.n = 2, "s" * 129, 0
        error = await refused(server.inference.Generate(message), grpc.StatusCode.INVALID_ARGUMENT, "sampling.min_p: ")
        assert any(detail.Unpack(bad) for detail in rpc_status.from_call(error).details)
        assert len(bad.field_violations) == 11
        message.stopping.stop_token_ids.extend([300] * 100)
        await refused(server.inference.Generate(message), grpc.StatusCode.INVALID_ARGUMENT, " more")
        turns = chat(("x", ""), ("y", ""), tools=["[]", "{"])
        details = "chat.messages[1].role: must be one of assistant, system, tool, user; got 'y'; chat.tools[0]: must be"
        await refused(server.inference.Generate(turns), grpc.StatusCode.INVALID_ARGUMENT, details)


async def test_request_with_long_bad_names_gets_a_status_within_8_kib(tmp_path: Path) -> None:
    """The paths contain the client's names; gRPC drops a status above 8 KiB."""
    for name in ("x" * 100_000, "中" * 100_000):
        message = chat(*[("\u00e9" * 100_000, "")] * 20, template_args=struct(**{name: NAN}))
        async with running(make_folder(tmp_path / "m", chat=True), max_message_size=8 << 20) as server:
            await refused(server.inference.Generate(message), grpc.StatusCode.INVALID_ARGUMENT, "chat.messages[0].role")
            message = chat(("user", ""), template_args=struct(**{name: NAN}))
            await refused(server.inference.Generate(message), grpc.StatusCode.INVALID_ARGUMENT, f"_args.{name[:10]}")


async def test_model_without_a_tokenizer_accepts_ids_only(tmp_path: Path) -> None:
    code = grpc.StatusCode.FAILED_PRECONDITION
    async with running(make_folder(tmp_path / "m", tokenizer=False)) as server:
        await refused(server.inference.Generate(ask("a")), code, "text: the served model has no tokenizer")
        await refused(server.inference.Generate(chat(("user", "a"))), code, "chat: the served model has no tokenizer")
        await refused(server.inference.Generate(ask([1], stop=["a"])), code, "stopping.stop: the served model has no")
        await refused(server.inference.Generate(ask([1], regex="a")), code, "regex: the served model has no tokenizer")
        await refused(server.inference.Tokenize(tokenize_pb2.TokenizeRequest(text="a")), code, "text: the served")
        await refused(server.inference.Detokenize(tokenize_pb2.DetokenizeRequest(token_ids=[1])), code, "token_ids")
        answer = await server.inference.Generate(ask([1], 3, return_token_ids=True, logprobs=1))
        assert (answer.text, list(answer.token_ids)) == ("", [2, 3, 4])
        assert [p.chosen.text for p in answer.logprobs] == ["", "", ""]


async def test_chat_with_a_template_that_writes_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", chat=True)
    (folder / "chat_template.jinja").write_text(r"{% if messages[0].role == 'developer' %}{{ '\ud800' }}{% endif %}a")
    async with running(folder) as server:
        call = server.inference.Generate(chat(("developer", "b")))
        await refused(call, grpc.StatusCode.INVALID_ARGUMENT, "chat: must be valid Unicode, got the lone surrogate")
        assert (await server.inference.Generate(chat(("user", "b")))).text  # another role is served


async def test_model_without_a_chat_template_accepts_text_only(tmp_path: Path) -> None:
    async with running(make_folder(tmp_path / "m", chat=False)) as server:
        call = server.inference.Generate(chat(("user", "a")))
        await refused(call, grpc.StatusCode.FAILED_PRECONDITION, "chat: the served model has no chat template")
        await good(server)
