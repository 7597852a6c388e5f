"""`npuserve embed` and `npuserve rank` against the fake server."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import grpc
import pytest

from npuserve.cli.main import main
from npuserve.v1 import pooling_pb2
from tests.support.fake_server import Server, serving

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def run(command: str, server: Server, *arguments: str) -> int:
    return main([command, "--target", server.target, *arguments])


def give_input(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_embed_prints_an_array_for_each_text(server: Server, capsys: Capture) -> None:
    assert run("embed", server, "a", "abc") == 0
    assert capsys.readouterr() == ("[1.0, 0.5]\n[3.0, 0.5]\n", "")
    assert sorted(request.text for request in server.echo.pooled) == ["a", "abc"]


def test_embed_flags_set_request_fields(server: Server) -> None:
    assert run("embed", server, "a", "--prompt-name", "query", "--dimensions", "8", "--truncate") == 0
    assert server.echo.pooled == [
        pooling_pb2.EmbedRequest(text="a", prompt_name="query", dimensions=8, truncate=True)]


def test_embed_reads_lines(server: Server, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    give_input(monkeypatch, "".join(f"{'x' * n}\n" for n in range(1, 101)).encode())
    assert run("embed", server, "-") == 0
    assert [json.loads(line)[0] for line in capsys.readouterr().out.splitlines()] == list(range(1, 101))


@pytest.mark.parametrize(("data", "error"), [(b"\xff", "stdin: is not UTF-8"), (b"", "stdin: is empty")])
def test_embed_unusable_input_is_refused(
    server: Server, capsys: Capture, monkeypatch: pytest.MonkeyPatch, data: bytes, error: str
) -> None:
    give_input(monkeypatch, data)
    assert run("embed", server, "-") == 2
    assert capsys.readouterr().err == f"npuserve: {error}\n"


def test_embed_error_is_one_sentence(server: Server, capsys: Capture) -> None:
    server.echo.fail = grpc.StatusCode.FAILED_PRECONDITION, "Embed: the served model 'm' generates text"
    assert run("embed", server, "a", "b") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"npuserve: {server.target}: Embed: the served model 'm' generates text (FAILED_PRECONDITION)\n"


def test_rank_prints_the_most_relevant_first(server: Server, capsys: Capture) -> None:
    assert run("rank", server, "query", "abb", "aab", "b") == 0
    assert capsys.readouterr().out == "0.666667  aab\n0.333333  abb\n0.000000  b\n"
    assert server.echo.pooled == [pooling_pb2.RankRequest(query="query", documents=["abb", "aab", "b"])]


def test_rank_flags_and_lines(server: Server, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    give_input(monkeypatch, b"b\na\n")
    assert run("rank", server, "q", "-", "--instruction", "code", "--truncate", "--json") == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"index": 1, "score": 1.0, "document": "a"}, {"index": 0, "score": 0.0, "document": "b"}]
    assert server.echo.pooled == [
        pooling_pb2.RankRequest(query="q", documents=["b", "a"], instruction="code", truncate=True)]
