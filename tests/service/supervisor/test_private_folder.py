"""Private folder of the supervisor: access, removal at the end, and removal of abandoned folders at the next start."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from npuserve.service.config import ConfigError
from npuserve.service.supervisor.private_folder import LOCK, private_folder

HOLDER = """
import sys, time
from npuserve.service.supervisor.private_folder import private_folder
with private_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_private_folder_has_mode_0700_and_is_removed(parent: Path) -> None:
    with private_folder() as folder:
        assert folder.parent == parent
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
    assert not folder.exists()


def test_private_folder_that_cannot_be_created_names_tmpdir(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent / "none"))
    refused = rf"^TMPDIR: a folder {parent}/none/npuserve-\w+ cannot be created: No such file or directory$"
    with pytest.raises(ConfigError, match=refused), private_folder():
        pass


def test_private_folder_without_a_writable_parent_names_tmpdir(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only root without a volume."""
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", fail)
    refused = r"^TMPDIR: a folder cannot be created: No usable temporary directory found in "
    with pytest.raises(ConfigError, match=refused), private_folder():
        pass


def test_private_folder_of_killed_process_is_removed_at_next_start(parent: Path) -> None:
    others = [parent / "npuserve-foreign", parent / "npuserve-file"]
    others[0].mkdir()
    others[1].touch()
    link = parent / "npuserve-link"
    with subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        left = Path(holder.stdout.readline().strip())
        link.symlink_to(left)
        with private_folder():
            assert (left / LOCK).exists()
        holder.kill()
        holder.wait()
        assert left.exists()
        with private_folder() as folder:
            assert not left.exists()
            assert set(parent.iterdir()) == {folder, link, *others}
