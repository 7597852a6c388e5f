"""Messages that are refused before they are parsed."""

from __future__ import annotations

import gzip
import zlib

import pytest

from npuserve.service.requests.intake import _is_compressed
from npuserve.v1 import generate_pb2

TEXT = b"a message of some length " * 4


@pytest.mark.parametrize("data", [
    gzip.compress(TEXT, mtime=0), gzip.compress(b"", mtime=0), *(zlib.compress(TEXT, level) for level in range(2, 10))])
def test_compressed_message_is_recognized(data: bytes) -> None:
    assert _is_compressed(data)


@pytest.mark.parametrize("request_", [
    generate_pb2.GenerateRequest(), generate_pb2.GenerateRequest(text="x"), generate_pb2.GenerateRequest(n=1),
    generate_pb2.GenerateRequest(n=127), generate_pb2.GenerateRequest(text="x" * 31, n=3)])
def test_message_is_not_taken_for_a_compressed_one(request_: generate_pb2.GenerateRequest) -> None:
    assert not _is_compressed(request_.SerializeToString())
