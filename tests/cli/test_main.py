"""The command line: commands, help, errors and exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest

from npuserve.cli.main import COMMANDS, main
from npuserve.service import settings
from npuserve.service.config import ServerConfig
from tests.support.command import npuserve
from tests.support.fake_server import serving

Capture = pytest.CaptureFixture[str]


def run_until_exit(arguments: str, capsys: Capture) -> tuple[int, str, str]:
    """Run a command line that argparse ends. Return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert isinstance(end.value.code, int)
    return end.value.code, *capsys.readouterr()


def test_version_is_printed(capsys: Capture) -> None:
    assert run_until_exit("--version", capsys) == (0, f"npuserve {version('npuserve')}\n", "")


def test_help_names_every_command(capsys: Capture) -> None:
    code, out, _ = run_until_exit("--help", capsys)
    assert code == 0
    assert all(f"    {command.split()[0]} " in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_help_prints_usage(command: str, capsys: Capture) -> None:
    code, out, _ = run_until_exit(f"{command} --help", capsys)
    assert code == 0
    assert out.startswith(f"usage: npuserve {command} ")


@pytest.mark.parametrize("command", ["serve", "check"])
def test_help_shows_every_flag_with_its_default(command: str, capsys: Capture) -> None:
    out = " ".join(run_until_exit(f"{command} --help", capsys)[1].split())
    for field in msgspec.structs.fields(ServerConfig):
        if field.default != "":
            described = re.split(rf" {settings.flag(field.name)}[ ,]", out)[-1]
            assert f"(default: {settings._show(field.default)})" in described[:200], field.name


@pytest.mark.parametrize(("arguments", "message"), [
    ("sing", "invalid choice: 'sing'"),
    ("bench sing", "invalid choice: 'sing'"),
    ("serve --max-num-seq 1", "unrecognized arguments: --max-num-seq"),
    ("generate", "required: PROMPT"),
    ("generate x --timeout -1", "argument --timeout: must be in [0.001, 1000000], got '-1'"),
    ("generate x --timeout nan", "argument --timeout: must be in [0.001, 1000000], got 'nan'"),
    ("chat --wait inf", "argument --wait: must be in [0, 1000000], got 'inf'"),
    ("generate x --max-tokens many", "argument --max-tokens: must be a whole number, got 'many'"),
])
def test_invalid_command_line_is_one_line(arguments: str, message: str, capsys: Capture) -> None:
    code, _, err = run_until_exit(arguments, capsys)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["", "bench"])
def test_npuserve_without_a_command_prints_help(command: str) -> None:
    """On stdout, with exit code 0, as kubectl and docker do."""
    done = npuserve(*command.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: npuserve{' ' * bool(command)}{command} [-h]")


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "sentence"), [
    ("serve --max-num-seq=4", "npuserve serve: unrecognized arguments: --max-num-seq=4; did you mean --max-num-seqs?; "
     "see npuserve serve --help\n"),
    ("generate x --temprature 1", "npuserve generate: unrecognized arguments: --temprature 1; did you mean "
     "--temperature?; see npuserve generate --help\n"),
    ("--verison", "npuserve: unrecognized arguments: --verison; did you mean --version?; see npuserve --help\n"),
    ("serve --banana", "npuserve serve: unrecognized arguments: --banana; see npuserve serve --help\n"),
])
def test_unknown_flag_suggests_a_similar_flag(arguments: str, sentence: str) -> None:
    done = npuserve(*arguments.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "hint"), [
    ("NPUSERVE_BANANA", "docs/configuration.md lists them"),
    ("NPUSERVE_METRIC_PORT", "did you mean NPUSERVE_METRICS_PORT?"),
])
def test_unknown_variable_suggests_only_a_similar_variable(name: str, hint: str) -> None:
    done = npuserve("serve", environ={name: "1"})
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"npuserve: {name}: no such setting; {hint}\n")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("generate",), ("demo",), ("serve",), ("generate", "x", "--stop")])
def test_argument_not_utf8_is_refused(arguments: tuple[str, ...]) -> None:
    done = npuserve(*arguments, b"caf\xe9")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "npuserve: argument 'caf\\xe9' is not UTF-8\n")


def test_variable_not_utf8_is_refused() -> None:
    done = npuserve("serve", environ={"NPUSERVE_MODEL": b"caf\xe9"})
    assert done.returncode == 2
    assert done.stderr == "npuserve: model: 'caf\\udce9' is not UTF-8 (from NPUSERVE_MODEL)\n"


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("generate", "a b")])
def test_output_to_a_full_disk_is_reported(arguments: tuple[str, ...], unbuffered: str) -> None:
    with serving() as server, Path("/dev/full").open("wb") as full:
        target = ("--target", server.target) if arguments[0] == "generate" else ()
        done = npuserve(*arguments, *target, stdout=full, environ={"PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (1, "npuserve: cannot write the output: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize(("closed", "arguments", "code", "err"), [
    ("0<&-", "generate - --target {}", 0, "npuserve: the model ended at once; for a chat model use --chat\n"),
    ("0<&-", "chat --target {}", 0, ""),
    ("1>&-", "--version", 1, "npuserve: cannot write the output: Bad file descriptor\n"),
    ("1>&-", "generate x --target {}", 1, "npuserve: cannot write the output: Bad file descriptor\n"),
    ("1>&-", "keys list none", 2, "npuserve: none: No such file or directory; npuserve keys add FILE NAME makes it\n"),
    ("2>&-", "nonsense", 2, ""),
    ("0<&- 1>&- 2>&-", "generate x --target {}", 1, ""),
])
def test_closed_standard_stream_has_no_traceback(
    closed: str, arguments: str, code: int, err: str, tmp_path: Path
) -> None:
    with serving() as server:
        line = f"exec {sys.executable} -m npuserve.cli.main {arguments.format(server.target)} {closed}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == code
    assert (err in done.stderr) if err else not done.stderr


@pytest.mark.parametrize(("arguments", "hint"), [
    ("genrate x", "did you mean generate?"), ("bench kernel", "did you mean kernels?"),
    ("keys lst x", "did you mean list?")])
def test_unknown_command_suggests_a_similar_command(
    arguments: str, hint: str, capsys: Capture
) -> None:
    code, out, err = run_until_exit(arguments, capsys)
    assert (code, out) == (2, "")
    assert hint in err


def test_invalid_setting_is_one_sentence(capsys: Capture) -> None:
    assert main(["serve", "--port", "x"]) == 2
    assert capsys.readouterr() == ("", "npuserve: port: 'x' is not a whole number in [0, 65535] (from --port)\n")


def test_closed_output_pipe_has_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with serving() as server:
        command = [sys.executable, "-m", "npuserve.cli", "generate", "a b", "--target", server.target]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_main_imports_no_heavy_packages() -> None:
    script = """
import sys
from npuserve.cli.main import main
try:
    main(["serve", "--help"])
except SystemExit:
    pass
print(sorted({"grpc", "torch", "google.protobuf", "rich", "prometheus_client", "numpy", "jinja2"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
