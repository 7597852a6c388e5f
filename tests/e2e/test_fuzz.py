"""Fuzzing in short; the long run is `python -m tests.e2e.fuzz`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npuserve.client import Client
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
    """The code that it ended with."""
    method = METHODS[name][0]
    kind = server.server.channel.unary_stream if method.server_streaming else server.server.channel.unary_unary
    call = kind(name, request_serializer=type(message).SerializeToString)
    try:
        answer = call(message, timeout=30)
        list(answer) if method.server_streaming else None
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_any_fields_at_all(server: Target, name: str) -> None:
    """Each answer is one of the documented codes; INTERNAL and UNKNOWN are bugs."""

    @given(message=METHODS[name][1])
    @settings(suppress_health_check=[HealthCheck.too_slow])
    def each(message: Any) -> None:
        code = asked(server, name, message)
        assert code in CODES, (code, server.server.log[-2000:])

    each()
    server.settle()


def test_broken_protobuf_and_broken_http(server: Target) -> None:
    noise = Noise(20, sorted(METHODS), bodies())
    server.check()
    _, codes = burst(server, noise, STREAMING, 3000)
    assert not codes.keys() - CODES - {"UNREAD"}
    assert codes["UNREAD"] > 100
    assert codes["OK"] > 10
    server.settle()
    before = server.resident()
    burst(server, noise, STREAMING, 1000)
    server.settle()
    after = server.resident()
    for name, (size, files) in before.items():
        assert after[name][0] - size < 32 << 20, name
        assert after[name][1] - files <= 8, name


@pytest.mark.parametrize("path", [b"/\xff", b"\xe9", b"", b"/" + b"a" * 8000])
def test_a_path_that_is_none_ends_no_stream(server: Target, path: bytes) -> None:
    """grpc.aio's own server would end over a path that is no UTF-8: service/rpc/aio_server.py."""
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
