"""A short run of the fuzzer, and tests of single fields at its server; the long run is `python -m tests.e2e.fuzz`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npuserve.client import Client
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import model_pb2, prompt_pb2, tokenize_pb2
from tests.e2e.fuzz.__main__ import burst
from tests.e2e.fuzz.fields import requests
from tests.e2e.fuzz.target import CODES, Target, bodies, target
from tests.e2e.fuzz.wire import KEY, PREFACE, SETTINGS, Noise, call, frame, send

METHODS = requests()
STREAMING = {name: method.server_streaming for name, (method, _) in METHODS.items()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with target(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


def asked(server: Target, name: str, message: Any) -> str:
    """Send a message and return the status of the call."""
    method = METHODS[name][0]
    kind = server.server.channel.unary_stream if method.server_streaming else server.server.channel.unary_unary
    call = kind(name, request_serializer=type(message).SerializeToString)
    try:
        answer = call(message, timeout=60)
        list(answer) if method.server_streaming else None
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_any_fields_at_all(server: Target, name: str) -> None:
    """Each status is a documented one; INTERNAL and UNKNOWN are bugs."""

    @given(message=METHODS[name][1])
    @settings(max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.too_slow])
    def each(message: Any) -> None:
        code = asked(server, name, message)
        assert code in CODES, (code, server.server.log[-2000:])

    each()
    server.settle()


@pytest.mark.slow
def test_broken_protobuf_and_broken_http(server: Target, pytestconfig: pytest.Config) -> None:
    messages = 3000 if pytestconfig.getoption("--full") else 800
    noise = Noise(20, sorted(METHODS), bodies())
    server.check()
    _, codes = burst(server, noise, STREAMING, messages)
    assert not codes.keys() - CODES - {"UNREAD"}
    assert codes["UNREAD"] > 100
    assert codes["OK"] > 10
    server.settle()
    before = server.resident()
    burst(server, noise, STREAMING, messages // 3)
    server.settle()
    after = server.resident()
    for name, (size, files) in before.items():
        assert after[name][0] - size < 32 << 20, name
        assert after[name][1] - files <= 8, name


@pytest.mark.parametrize("path", [b"/\xff", b"\xe9", b"", b"/" + b"a" * 8000])
def test_invalid_path_ends_no_stream(server: Target, path: bytes) -> None:
    """grpc.aio's own server would end at a path that is not UTF-8: see service/rpc/aio_server.py."""
    with Client(server.server.target, patience=0, api_key=KEY) as client:
        whole = client.generate("Once upon a time", max_tokens=50, temperature=0, ignore_eos=True)
        stream = client.stream("Once upon a time", max_tokens=50, temperature=0, ignore_eos=True)
        text = next(stream).text
        send(server.port, [PREFACE + frame(SETTINGS), call(b"POST", path)], linger=True)
        assert text + "".join(delta.text for delta in stream) == whole.text
    server.settle()


@given(seed=st.integers(0, 2**32), count=st.integers(1, 4))
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_then_a_good_request(server: Target, seed: int, count: int) -> None:
    noise = Noise(seed, sorted(METHODS), bodies())
    for _ in range(count):
        send(server.port, noise.connection(), linger=False)
        server.check()


def test_lone_surrogates_in_a_chats_json_are_invalid_argument_by_field(server: Target) -> None:
    ask = pb.GenerateRequest(stopping=pb.StoppingParams(max_tokens=2))
    ask.chat.messages.add(role="user", content="hi")
    message = ask.chat.messages.add(role="assistant")
    calls = "chat.messages[1].tool_calls[0]"
    for field, strings in (("chat.tools[0]", ask.chat.tools), (calls, message.tool_calls)):
        strings.append(r'{"function": {"name": "\ud800"}}')
        with pytest.raises(grpc.RpcError) as refused:
            server.server.stub.Generate(ask, timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == f"{field}: must be valid Unicode, got the lone surrogate U+D800"
        strings[0] = r'{"function": {"name": "\ud83d\ude00"}}'
        assert server.server.stub.Generate(ask, timeout=60).finish.usage.generated_tokens
        del strings[:]
    message.role = "bot"
    with pytest.raises(grpc.RpcError) as refused:
        server.server.stub.Generate(ask, timeout=60)
    assert refused.value.details() == (
        "chat.messages[1].role: must be one of assistant, system, tool, user; got 'bot'")
    server.settle()


def test_special_tokens_of_a_message_are_text(server: Target) -> None:
    """A user's message cannot end its turn: the prompt has as many special tokens as the template writes."""
    stub, info = server.server.stub, server.server.stub.GetModelInfo(model_pb2.GetModelInfoRequest())
    (end,) = info.eos_token_ids
    text = stub.Detokenize(tokenize_pb2.DetokenizeRequest(token_ids=[end])).text
    assert text
    chat = prompt_pb2.Chat(messages=[prompt_pb2.Message(role="user", content=f"a{text} b")])
    found = [
        list(stub.Tokenize(tokenize_pb2.TokenizeRequest(chat=chat, **choice)).token_ids).count(end)
        for choice in ({}, {"parse_special_tokens": False}, {"parse_special_tokens": True})]
    assert found == [0, 0, 1]
    ask = pb.GenerateRequest(chat=chat, stopping=pb.StoppingParams(max_tokens=1))
    lengths = []
    for parse in (False, True):
        ask.parse_special_tokens = parse
        lengths.append(stub.Generate(ask, timeout=60).finish.usage.prompt_tokens)
    assert lengths[0] > lengths[1]
