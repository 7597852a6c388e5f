"""Codes of cancelled calls, and names of peers. The tests of the servicers cover the rest of call.py."""

from __future__ import annotations

import asyncio
import logging
import urllib.parse

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from npuserve.service.errors import MalformedRequest
from npuserve.service.rpc.call import call, cancel_code, peer_name


class LiveContext:
    """Context of a call of whose cancel gRPC has not told yet."""

    def time_remaining(self) -> None:
        return None


@pytest.mark.parametrize("error", [asyncio.CancelledError(), cygrpc.ExecuteBatchError("Failed")])
async def test_call_of_a_client_that_left_is_cancelled_and_no_bug(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC reports the failed write of a lost connection before the cancel."""
    caplog.set_level(logging.INFO, "npuserve")
    with pytest.raises(asyncio.CancelledError):
        async with call(LiveContext(), "StreamGenerate", logging.INFO):  # type: ignore[arg-type]
            raise error
    (record,) = caplog.records
    assert (record.message, record.fields["code"]) == ("request", "CANCELLED")  # type: ignore[attr-defined]


async def test_call_without_memory_is_unavailable_and_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "npuserve")
    aborted: list[object] = []

    class Context(LiveContext):
        def trailing_metadata(self) -> None:
            return None

        async def abort(self, *status: object) -> None:
            aborted.extend(status)

    async with call(Context(), "Generate", logging.INFO):  # type: ignore[arg-type]
        raise MemoryError
    assert aborted[:2] == [grpc.StatusCode.UNAVAILABLE, "the front end has no memory for the request"]
    (record,) = caplog.records
    assert (record.message, record.fields["code"]) == ("request", "UNAVAILABLE")  # type: ignore[attr-defined]


async def test_call_that_ended_before_its_error_was_sent_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC may report the end of the messages of a call before its cancel: the call seems to have no message."""
    caplog.set_level(logging.INFO, "npuserve")

    class Context(LiveContext):
        def trailing_metadata(self) -> None:
            return None

        async def abort(self, *status: object) -> None:
            raise cygrpc.ExecuteBatchError("Failed")

    with pytest.raises(cygrpc.ExecuteBatchError):
        async with call(Context(), "Generate", logging.INFO):  # type: ignore[arg-type]
            raise MalformedRequest("the call has no message")
    (record,) = caplog.records
    assert (record.message, record.fields["code"]) == ("request", "CANCELLED")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("left", "allowed", "code"), [
    (None, None, "CANCELLED"),
    (5.0, 10.0, "CANCELLED"),
    (0.5, 10.0, "CANCELLED"),
    (-0.001, 10.0, "DEADLINE_EXCEEDED"),
    (0.0, 0.3, "DEADLINE_EXCEEDED"),
    (0.005, 0.3, "DEADLINE_EXCEEDED"),
    (0.9, 120.0, "DEADLINE_EXCEEDED"),
])
def test_cancel_code_near_deadline_is_deadline_exceeded(left: float | None, allowed: float | None, code: str) -> None:
    assert cancel_code(left, allowed) == code


@pytest.mark.parametrize(("peer", "name"), [
    ("ipv4:10.0.0.7:51234", "ipv4:10.0.0.7"),
    ("ipv6:[2001:db8::1]:51234", "ipv6:[2001:db8::1]"),
    ("ipv6:%5B::1%5D:51234", "ipv6:[::1]"),
    (f"ipv6:{urllib.parse.quote('[fe80::1%eth0]', safe=':')}:1", "ipv6:[fe80::1%25eth0]"),
    ("unix:", "local"),
    ("unix:/run/x.sock", "local"),
    ("", "local"),
])
def test_peer_name_is_address_without_port(peer: str, name: str) -> None:
    assert peer_name(peer) == name
