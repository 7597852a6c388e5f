"""Command `npuserve keys`."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from npuserve.cli.main import main
from npuserve.service.access import api_keys as keys
from npuserve.service.access.caller import Caller, Limits
from tests.support.command import npuserve


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def add(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run `npuserve keys add`; return the printed key."""
    assert main(["keys", "add", *map(str, arguments)]) == 0
    (key,) = capsys.readouterr().out.splitlines()
    return key


def test_keys_add_prints_key_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alice = add(capsys, file, "alice")
    root = add(capsys, file, "root", "--admin", "--max-requests", 8)
    again = add(capsys, file, "alice")
    assert len({alice, root, again}) == 3
    # 43 characters hold 256 bits. The file contains no key.
    assert all(re.fullmatch(r"npuserve-[A-Za-z0-9_-]{43}", key) for key in (alice, root, again))
    assert not any(key in file.read_text() for key in (alice, root, again))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = keys.read(str(file))
    assert found.find(alice) == found.find(again) == Caller("alice", Limits(None), admin=False)
    assert found.find(root) == Caller("root", Limits(8), admin=True)
    for wrong in ("", "alice", alice[:-1], alice + "x", alice.upper(), hashlib.sha256(alice.encode()).hexdigest(), "ü"):
        assert found.find(wrong) is None
    assert main(["keys", "list", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == ["alice keys=2", "root keys=1 admin=True max_requests=8"]
    assert main(["keys", "remove", str(file), "alice"]) == 0
    assert keys.read(str(file)).find(alice) is None
    assert keys.read(str(file)).find(root)


@pytest.mark.parametrize("mode", [0o640, 0o400, 0o600])
def test_keys_add_keeps_the_mode_of_the_file(file: Path, capsys: pytest.CaptureFixture[str], mode: int) -> None:
    file.touch()
    file.chmod(mode)
    add(capsys, file, "alice")
    assert stat.S_IMODE(file.stat().st_mode) == mode


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize(("refused", "expected"), [
    ((), (10001, 10002, 0o640)),
    ((10001,), (0, 10002, 0o640)),
    ((10001, -1), (0, 0, 0o600)),
])
def test_keys_add_keeps_the_owner_if_permitted(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, refused: tuple[int, ...],
    expected: tuple[int, int, int],
) -> None:
    """refused: owners that the process may not set."""
    file.touch()
    os.chown(file, 10001, 10002)
    file.chmod(0o640)
    change = os.fchown

    def fchown(descriptor: int, owner: int, group: int) -> None:
        if owner in refused:
            raise PermissionError
        change(descriptor, owner, group)

    monkeypatch.setattr(os, "fchown", fchown)
    add(capsys, file, "alice")
    found = file.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == expected


def test_keys_add_to_a_full_output_blames_the_output(file: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = npuserve("keys", "add", str(file), "alice", stdout=full, environ={"PYTHONUNBUFFERED": "1"})
    assert (done.returncode, done.stderr) == (1, "npuserve: cannot write the output: No space left on device\n")
    assert main(["keys", "list", str(file)]) == 0


@pytest.mark.slow
def test_keys_added_by_many_processes_at_once_are_all_kept(file: Path) -> None:
    command = [sys.executable, "-m", "npuserve.cli", "keys", "add", str(file)]
    processes = [subprocess.Popen([*command, f"name{i}"], stdout=subprocess.PIPE, text=True) for i in range(8)]
    added = [process.communicate(timeout=60)[0].strip() for process in processes]
    found = keys.read(str(file))
    for index, key in enumerate(added):
        assert found.find(key) == Caller(f"name{index}", Limits(None), admin=False)


@pytest.mark.parametrize(("arguments", "error_text"), [
    (["add", "{file}"], "keys add: NAME is missing"),
    (["remove", "{file}", "nobody"], "there is no nobody"),
    (["add", "{file}", "a b"], "a name is 1 to 64 letters"),
    (["add", "{file}", "x", "--max-requests", "-1"], "x.max_requests: must be"),
    (["list", "/no/such/file"], "/no/such/file: No such file or directory"),
    (["add", "/no/such/folder/file", "x"], "/no/such/folder/file: No such file or directory"),
])
def test_keys_command_invalid_arguments_name_fault(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error_text: str
) -> None:
    file.write_text("")
    assert main(["keys", *(word.format(file=file) for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert error_text in err
    assert out == ""
    assert file.read_text() == ""


def test_keys_add_beyond_the_limit_of_names_leaves_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys.save_tables(str(file), {f"k{i}": {"sha256": [f"{i:064x}"]} for i in range(keys.MAX_NAMES)})
    before = file.read_bytes()
    assert main(["keys", "add", str(file), "one-more"]) == 2
    assert "at most 1000 names, got 1001" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_keys_list_of_unreadable_toml_is_one_sentence(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("a=" + "[" * 20_000)
    assert main(["keys", "list", str(file)]) == 2
    assert capsys.readouterr().err == f"npuserve: {file}: not a TOML file: its arrays or tables are nested too deeply\n"
