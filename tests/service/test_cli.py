"""The command line as a whole: its commands, help, errors and exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version

import msgspec
import pytest

from npuserve.service import settings
from npuserve.service.cli import COMMANDS, main
from npuserve.service.config import ServerConfig
from tests.service.fake_server import serving

Capture = pytest.CaptureFixture[str]


def left(arguments: str, capsys: Capture) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line at which argparse leaves."""
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert isinstance(end.value.code, int)
    return end.value.code, *capsys.readouterr()


def test_version(capsys: Capture) -> None:
    assert left("--version", capsys) == (0, f"npuserve {version('npuserve')}\n", "")


def test_help_names_every_command(capsys: Capture) -> None:
    code, out, _ = left("--help", capsys)
    assert code == 0
    assert all(f"    {command.split()[0]} " in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: Capture) -> None:
    code, out, _ = left(f"{command} --help", capsys)
    assert code == 0
    assert out.startswith(f"usage: npuserve {command} ")


@pytest.mark.parametrize("command", ["serve", "check"])
def test_help_shows_every_flag_with_its_default(command: str, capsys: Capture) -> None:
    out = " ".join(left(f"{command} --help", capsys)[1].split())
    for field in msgspec.structs.fields(ServerConfig):
        if field.default != "":
            described = re.split(rf" {settings.flag(field.name)}[ ,]", out)[-1]
            assert f"(default: {settings._show(field.default)})" in described[:200], field.name


@pytest.mark.parametrize(("arguments", "said"), [
    ("", "required: COMMAND"),
    ("sing", "invalid choice: 'sing'"),
    ("bench", "required: WHAT"),
    ("serve --max-num-seq 1", "unrecognized arguments: --max-num-seq"),
    ("generate", "required: PROMPT"),
    ("generate x --max-tokens many", "argument --max-tokens: invalid int value: 'many'"),
])
def test_a_wrong_command_line(arguments: str, said: str, capsys: Capture) -> None:
    code, _, err = left(arguments, capsys)
    assert code == 2
    assert said in err


def test_a_wrong_setting_is_a_sentence(capsys: Capture) -> None:
    assert main(["serve", "--port", "x"]) == 2
    assert capsys.readouterr() == ("", "npuserve: port: 'x' is not a whole number (from --port)\n")


def test_a_reader_that_leaves_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with serving() as server:
        command = [sys.executable, "-m", "npuserve.service.cli", "generate", "a b", "--target", server.target]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    script = """
import sys
from npuserve.service.cli import main
try:
    main(["serve", "--help"])
except SystemExit:
    pass
print(sorted({"grpc", "torch", "google.protobuf", "rich", "prometheus_client", "numpy", "jinja2"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
