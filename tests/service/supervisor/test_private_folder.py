"""Private folder of the supervisor: access, removal at the end, and removal of abandoned folders at the next start."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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
