"""`npuserve chat` against a server that says the last message again in capitals (fake_server.py)."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator

import grpc
import pytest

from npuserve.service.cli.main import main
from tests.support.command import npuserve
from tests.support.fake_server import Server, serving

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def talk(server: Server, monkeypatch: pytest.MonkeyPatch, said: list[str | type[BaseException]], *flags: str) -> int:
    """What the user types, a line each; Ctrl-D at the end."""
    lines = iter([*said, EOFError])

    def typed(prompt: str = "") -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", typed)
    return main(["chat", "--target", server.target, *flags])


def messages(server: Server, index: int) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in server.echo.requests[index].chat.messages]


def test_the_conversation_grows_until_it_is_reset(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    said: list[str | type[BaseException]] = ["hi there", "", "and now", "/reset", "anew", KeyboardInterrupt, "/exit"]
    assert talk(server, monkeypatch, said, "--system", "s", "--max-tokens", "9") == 0
    first = [("system", "s"), ("user", "hi there")]
    assert messages(server, 0) == first
    assert messages(server, 1) == [*first, ("assistant", "HI THERE "), ("user", "and now")]
    assert messages(server, 2) == [("system", "s"), ("user", "anew")]
    assert all(request.stopping.max_tokens == 9 for request in server.echo.requests)
    assert "HI THERE \nAND NOW \n" in capsys.readouterr().out


def test_ctrl_c_cancels_the_answer_alone(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    server.echo.endless = True
    printed = builtins.print

    def interrupt(*text: object, **options: object) -> None:
        printed(*text, **options)  # type: ignore[call-overload]
        if text == (".",):
            server.echo.endless = "first" not in messages(server, -1)[-1][1]
            raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "print", interrupt)
    assert talk(server, monkeypatch, ["first", "second"]) == 0
    asked = messages(server, 1)
    assert [role for role, _ in asked] == ["user", "assistant", "user"]
    assert asked[1][1].startswith("FIRST .")
    assert "(stopped)" in capsys.readouterr().out


def test_cancel_reaches_the_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.echo.endless = True
    printed = builtins.print

    def interrupt(*text: object, **options: object) -> None:
        printed(*text, **options)  # type: ignore[call-overload]
        if text == (".",):
            raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "print", interrupt)
    assert talk(server, monkeypatch, ["on and on"]) == 0
    deadline = time.monotonic() + 20
    while not server.echo.ended:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_failed_turn_is_forgotten(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    server.echo.fail = grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full"
    assert talk(server, monkeypatch, ["one", "two"]) == 0
    assert messages(server, 1) == [("user", "two")]
    assert "queue full (RESOURCE_EXHAUSTED)" in capsys.readouterr().err


def test_a_model_without_a_chat_template(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    server.echo.has_chat_template = False
    assert talk(server, monkeypatch, ["never read"]) == 1
    assert capsys.readouterr().err == "npuserve: echo has no chat template; use npuserve generate\n"
    assert not server.echo.requests


def test_chat_that_is_piped_prints_answers_alone(server: Server) -> None:
    done = npuserve("chat", "--target", server.target, stdin="hi there\ncafé\n".encode())
    assert (done.returncode, done.stdout, done.stderr) == (0, "HI THERE \nCAFÉ \n", "")


def test_chat_with_a_line_that_is_not_utf8_says_so(server: Server) -> None:
    done = npuserve("chat", "--target", server.target, stdin=b"caf\xe9\nnext\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "NEXT \n", "npuserve: the line is not UTF-8\n")
    assert len(server.echo.requests) == 1
