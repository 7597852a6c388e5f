"""`npuserve chat` against a server that repeats the last message in capitals (fake_server.py)."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator

import grpc
import pytest

from npuserve.cli.main import main
from tests.support.command import npuserve
from tests.support.fake_server import Server, serving

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def chat(server: Server, monkeypatch: pytest.MonkeyPatch, typed: list[str | type[BaseException]], *flags: str) -> int:
    """Run the command on lines that the user types, followed by Ctrl-D. Return the exit code."""
    lines = iter([*typed, EOFError])

    def read(prompt: str = "") -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)
    return main(["chat", "--target", server.target, *flags])


def interrupt_answers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make answers endless until the message "first" was answered, and interrupt each at its first "."."""
    server.echo.endless = True
    printed = builtins.print

    def interrupt(*text: object, **options: object) -> None:
        printed(*text, **options)  # type: ignore[call-overload]
        if text == (".",):
            server.echo.endless = "first" not in messages(server, -1)[-1][1]
            raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "print", interrupt)


def messages(server: Server, index: int) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in server.echo.requests[index].chat.messages]


def test_chat_conversation_grows_until_reset(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    typed: list[str | type[BaseException]] = ["hi there", "", "and now", "/reset", "anew", KeyboardInterrupt, "/exit"]
    assert chat(server, monkeypatch, typed, "--system", "s", "--max-tokens", "9") == 0
    first = [("system", "s"), ("user", "hi there")]
    assert messages(server, 0) == first
    assert messages(server, 1) == [*first, ("assistant", "HI THERE "), ("user", "and now")]
    assert messages(server, 2) == [("system", "s"), ("user", "anew")]
    assert all(request.stopping.max_tokens == 9 for request in server.echo.requests)
    assert "HI THERE \nAND NOW \n" in capsys.readouterr().out


def test_chat_ctrl_c_stops_only_the_answer(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    interrupt_answers(server, monkeypatch)
    assert chat(server, monkeypatch, ["first", "second"]) == 0
    asked = messages(server, 1)
    assert [role for role, _ in asked] == ["user", "assistant", "user"]
    assert asked[1][1].startswith("FIRST .")
    assert "(stopped)" in capsys.readouterr().out


def test_chat_ctrl_c_cancels_the_call(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_answers(server, monkeypatch)
    assert chat(server, monkeypatch, ["on and on"]) == 0
    deadline = time.monotonic() + 60
    while not server.echo.ended:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_chat_failed_message_is_removed(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    server.echo.fail = grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full"
    assert chat(server, monkeypatch, ["one", "two"]) == 0
    assert messages(server, 1) == [("user", "two")]
    assert "queue full (RESOURCE_EXHAUSTED)" in capsys.readouterr().err


def test_chat_without_chat_template_fails(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    server.echo.has_chat_template = False
    assert chat(server, monkeypatch, ["never read"]) == 1
    assert capsys.readouterr().err == "npuserve: echo has no chat template; use npuserve generate\n"
    assert not server.echo.requests


def test_chat_with_piped_input_prints_only_answers(server: Server) -> None:
    done = npuserve("chat", "--target", server.target, stdin="hi there\ncafé\n".encode())
    assert (done.returncode, done.stdout, done.stderr) == (0, "HI THERE \nCAFÉ \n", "")


def test_chat_line_not_utf8_is_reported(server: Server) -> None:
    done = npuserve("chat", "--target", server.target, stdin=b"caf\xe9\nnext\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "NEXT \n", "npuserve: the line is not UTF-8\n")
    assert len(server.echo.requests) == 1
