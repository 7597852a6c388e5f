"""What the commands share: waiting for a server, and errors as sentences."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
import pytest

from npuserve.service import client
from tests.service.fake_server import serving


def test_waits_until_the_server_is_ready() -> None:
    with serving() as server, client.connect(server.target) as channel:
        server.set_ready(False)
        threading.Timer(0.2, server.set_ready, [True]).start()
        client.wait_ready(channel, server.target, 20)
        server.set_ready(False)
        with pytest.raises(client.CallFailed, match=r"^127.0.0.1:\d+: not ready within 0.2 s$"):
            client.wait_ready(channel, server.target, 0.2)


def test_waits_for_a_server_that_is_not_there_yet(free_port: Callable[[], int]) -> None:
    target = f"127.0.0.1:{free_port()}"
    with client.connect(target) as channel, pytest.raises(client.CallFailed, match=r"not ready within 0\.3 s"):
        client.wait_ready(channel, target, 0.3)


def test_big_messages_pass() -> None:
    assert dict(client.OPTIONS)["grpc.max_receive_message_length"] == 64 << 20


@pytest.mark.parametrize(("code", "details", "sentence"), [
    (grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p: too big", "h:1: sampling.top_p: too big (INVALID_ARGUMENT)"),
    (grpc.StatusCode.UNAVAILABLE, "draining", "h:1: draining (UNAVAILABLE)"),
    (grpc.StatusCode.INTERNAL, None, "h:1: no details (INTERNAL)"),
    (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: ...",
     "h:1: no server answers there (UNAVAILABLE); start one with: npuserve serve"),
])
def test_errors_are_sentences(code: grpc.StatusCode, details: str | None, sentence: str) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    assert client.explain(error, "h:1") == sentence
