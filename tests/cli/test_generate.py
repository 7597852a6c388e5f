"""`npuserve generate` against a server that repeats the prompt in capitals (fake_server.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from npuserve.cli.generate import summary
from npuserve.cli.main import main
from npuserve.v1 import generate_pb2
from tests.support.command import npuserve
from tests.support.fake_server import Server, serving

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def generate(server: Server, *arguments: str) -> int:
    return main(["generate", "--target", server.target, *arguments])


def test_generate_prints_the_answer_on_stdout(server: Server, capsys: Capture) -> None:
    assert generate(server, "once upon") == 0
    assert capsys.readouterr() == ("ONCE UPON \n", "")
    (request,) = server.echo.requests
    assert request == generate_pb2.GenerateRequest(text="once upon")


def test_generate_flags_set_request_fields(server: Server) -> None:
    flags = (
        "--temperature 0.5 --top-p 0.75 --top-k -1 --min-p 0.25 --repetition-penalty 1.5 --presence-penalty -1 "
        "--frequency-penalty 2 --seed 18446744073709551615 --max-tokens 7 --min-tokens 0 --stop a --stop b --ignore-eos"
    )
    assert generate(server, "x", *flags.split()) == 0
    (request,) = server.echo.requests
    assert request.sampling == generate_pb2.SamplingParams(
        temperature=0.5, top_p=0.75, top_k=-1, min_p=0.25, repetition_penalty=1.5, presence_penalty=-1,
        frequency_penalty=2, seed=2**64 - 1)
    assert request.stopping == generate_pb2.StoppingParams(
        max_tokens=7, min_tokens=0, stop=["a", "b"], ignore_eos=True)


def test_generate_chat_sends_messages(server: Server, capsys: Capture) -> None:
    assert generate(server, "--chat", "--system", "be brief", "hello") == 0
    assert [(m.role, m.content) for m in server.echo.requests[0].chat.messages] == [
        ("system", "be brief"), ("user", "hello")]
    assert capsys.readouterr().out == "HELLO \n"


def test_generate_system_without_chat_is_refused(server: Server, capsys: Capture) -> None:
    assert generate(server, "--system", "be brief", "hello") == 2
    assert capsys.readouterr() == ("", "npuserve: --system: is for --chat only\n")
    assert not server.echo.requests


def test_generate_empty_answer_says_why(server: Server, capsys: Capture) -> None:
    """A chat model may end a text at once. An answer to a chat, and one of a constraint, may be empty on purpose."""
    assert generate(server, "") == 0
    assert capsys.readouterr() == ("\n", "npuserve: the model ended at once; for a chat model use --chat\n")
    assert generate(server, "--chat", "") == 0
    assert generate(server, "--regex", "a*", "") == 0
    assert generate(server, "a") == 0
    assert capsys.readouterr().err == ""


def test_generate_json_prints_one_object_per_message(server: Server, capsys: Capture) -> None:
    assert generate(server, "--json", "a b") == 0
    messages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert messages == [
        {"text": "A ", "num_tokens": 1}, {"text": "B ", "offset": 1, "num_tokens": 1},
        {"offset": 2, "finish": {"reason": "FINISH_REASON_EOS", "usage": {"generated_tokens": 2}}},
    ]


def test_generate_prompt_from_stdin_is_sent_unchanged(server: Server) -> None:
    done = npuserve("generate", "-", "--target", server.target, stdin="from a café\r\n".encode())
    assert (done.returncode, done.stderr) == (0, "")
    assert server.echo.requests[0].text == "from a café\r\n"


def test_generate_stdin_not_utf8_is_refused(server: Server) -> None:
    done = npuserve("generate", "-", "--target", server.target, stdin=b"caf\xe9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "npuserve: PROMPT: stdin is not UTF-8: byte 0xe9 at 3\n"
    assert not server.echo.requests


def test_generate_output_not_utf8_replaces_characters(server: Server) -> None:
    done = npuserve("generate", "--target", server.target, "-", stdin="café".encode(),
                    environ={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "CAF? \n", "")


def test_generate_key_file_not_utf8_is_named(server: Server, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"k\xe9")
    assert generate(server, "--api-key-file", str(file), "x") == 1
    assert capsys.readouterr() == ("", f"npuserve: --api-key-file: {file}: is not UTF-8\n")


def test_generate_stats_prints_tokens_and_rate(server: Server, capsys: Capture) -> None:
    assert generate(server, "--stats", "a b c") == 0
    assert capsys.readouterr().err.startswith("3 tokens, ")
    finish = generate_pb2.Finish(reason=generate_pb2.FINISH_REASON_LENGTH)
    finish.usage.generated_tokens = 101
    assert summary([finish], 10.0, 10.5, 12.5) == "101 tokens, 50 tokens/s, first after 500 ms (LENGTH)"
    other = generate_pb2.Finish(reason=generate_pb2.FINISH_REASON_EOS)
    assert summary([finish, other, finish], 10.0, 10.5, 10.5) == (
        "202 tokens in 3 samples, first after 500 ms (EOS, LENGTH)")
    finish.usage.generated_tokens = 1
    assert summary([finish], 10.0, 10.5, 10.5) == "1 token, first after 500 ms (LENGTH)"
    finish.reason = 99  # type: ignore[assignment]  # of a newer server
    assert summary([finish], 10.0, 10.5, 10.5) == "1 token, first after 500 ms (99)"


def test_generate_samples_are_printed_in_order_with_headings(server: Server, capsys: Capture) -> None:
    assert generate(server, "--n", "3", "--stats", "a b") == 0
    out, err = capsys.readouterr()
    assert out == "--- sample 0 ---\nA B \n--- sample 1 ---\nA1 B1 \n--- sample 2 ---\nA2 B2 \n"
    assert err.startswith("6 tokens in 3 samples, ")
    assert server.echo.requests[0].n == 3


def test_generate_samples_json_prints_one_object_per_sample(server: Server, capsys: Capture) -> None:
    assert generate(server, "--n", "2", "--json", "a b") == 0
    finish = {"reason": "FINISH_REASON_EOS", "usage": {"generated_tokens": 2}}
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"index": 1, "text": "A1 B1 ", "finish": finish}, {"index": 0, "text": "A B ", "finish": finish}]


def test_generate_error_follows_the_partial_samples(server: Server, capsys: Capture) -> None:
    server.echo.fail = grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full"
    assert generate(server, "--n", "2", "a b") == 1
    out, err = capsys.readouterr()
    assert out == "--- sample 0 ---\nA \n--- sample 1 ---\nA1 \n"
    assert err == f"npuserve: {server.target}: queue full (RESOURCE_EXHAUSTED)\n"


@pytest.mark.parametrize("n", ["0", "17", "x"])
def test_generate_n_out_of_range_is_refused(server: Server, capsys: Capture, n: str) -> None:
    with pytest.raises(SystemExit):
        generate(server, "--n", n, "a b")
    assert f"argument --n: must be in [1, 16], got '{n}'" in capsys.readouterr().err
    assert not server.echo.requests


def test_generate_error_follows_the_partial_answer(server: Server, capsys: Capture) -> None:
    server.echo.fail = grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full"
    assert generate(server, "a b") == 1
    assert capsys.readouterr() == ("A \n", f"npuserve: {server.target}: queue full (RESOURCE_EXHAUSTED)\n")


@pytest.mark.parametrize(("flag", "value", "allowed"), [
    ("--max-tokens", "-1", "[0, 4294967295]"), ("--seed", "18446744073709551616", "[0, 18446744073709551615]"),
    ("--top-k", str(2**31), "[-2147483648, 2147483647]")])
def test_generate_number_out_of_range_is_refused(
    server: Server, capsys: Capture, flag: str, value: str, allowed: str
) -> None:
    assert generate(server, "x", flag, value) == 2
    assert capsys.readouterr().err == f"npuserve: {flag}: {value} is not in {allowed}\n"
    assert not server.echo.requests


def test_generate_without_a_server_names_the_cause(capsys: Capture, free_port: Callable[[], int]) -> None:
    target = f"127.0.0.1:{free_port()}"
    assert main(["generate", "x", "--target", target]) == 1
    assert capsys.readouterr().err.startswith(f"npuserve: {target}: no server answers there (Connection refused)")


def test_generate_deadline_ends_the_answer(server: Server, capsys: Capture) -> None:
    server.echo.endless = True
    assert generate(server, "x", "--timeout", "0.3") == 1
    assert "(DEADLINE_EXCEEDED)" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "expected"), [
    (["--json-schema", "FILE"], {"json_schema": '{"type": "object"}'}),
    (["--structural-tag", "FILE"], {"structural_tag": '{"type": "object"}'}),
    (["--grammar", "FILE"], {"grammar": '{"type": "object"}'}),
    (["--json-object"], {"json_object": True}),
    (["--regex", "a*"], {"regex": "a*"}),
    (["--choice", "yes", "--choice", "no"], {"choices": generate_pb2.Choices(choices=["yes", "no"])}),
], ids=lambda value: value[0] if isinstance(value, list) else "")
def test_generate_constraint_is_sent(
    server: Server, tmp_path: Path, capsys: Capture, flags: list[str], expected: dict[str, Any]
) -> None:
    file = tmp_path / "constraint"
    file.write_text('{"type": "object"}')
    arguments = [str(file) if flag == "FILE" else flag for flag in flags]
    assert generate(server, "a", *arguments) == 0
    (request,) = server.echo.requests
    assert request == generate_pb2.GenerateRequest(text="a", **expected)
    server.echo.satisfies = False
    capsys.readouterr()
    assert generate(server, "a", *arguments) == 1
    assert capsys.readouterr() == (
        "A \n", "npuserve: the answer does not satisfy the constraint; it ended with EOS\n")


def test_generate_answer_without_a_constraint_is_complete(server: Server) -> None:
    server.echo.satisfies = False
    assert generate(server, "a") == 0


def test_generate_sample_that_does_not_satisfy_the_constraint_is_an_error(server: Server, capsys: Capture) -> None:
    server.echo.satisfies = False
    assert generate(server, "--n", "2", "--json", "--json-object", "a") == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert err == "npuserve: the answer does not satisfy the constraint; it ended with EOS\n"


@pytest.mark.parametrize(("flag", "content", "why"), [
    ("--json-schema", None, "No such file or directory"),
    ("--json-schema", b"{", "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ("--json-schema", b'"caf\xe9"', "is not UTF-8"),
    ("--json-schema", b" " * 65537, "has more than 65536 bytes"),
    ("--structural-tag", b"", "is not JSON: Expecting value: line 1 column 1 (char 0)"),
    ("--grammar", None, "No such file or directory"),
    ("--grammar", b"\xff", "is not UTF-8"),
])
def test_generate_bad_file_of_a_constraint_is_refused(
    server: Server, tmp_path: Path, capsys: Capture, flag: str, content: bytes | None, why: str
) -> None:
    file = tmp_path / "constraint"
    if content is not None:
        file.write_bytes(content)
    assert generate(server, "a", flag, str(file)) == 2
    assert capsys.readouterr() == ("", f"npuserve: {flag}: {file}: {why}\n")
    assert generate(server, "a", flag, str(tmp_path)) == 2
    assert capsys.readouterr() == ("", f"npuserve: {flag}: {tmp_path}: Is a directory\n")
    assert not server.echo.requests


def test_generate_tools_nested_too_deeply_are_refused(server: Server, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "tools").write_text("[" * 50_000)
    assert main(["generate", "x", "--target", server.target, "--chat", "--tools", str(tmp_path / "tools")]) == 2
    assert f"--tools: {tmp_path}/tools cannot be read: maximum recursion depth" in capsys.readouterr().err


def test_generate_two_kinds_of_constraint_are_refused(server: Server, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        generate(server, "a", "--json-object", "--regex", "a")
    assert ended.value.code == 2
    assert "argument --regex: not allowed with argument --json-object" in capsys.readouterr().err
    assert not server.echo.requests
