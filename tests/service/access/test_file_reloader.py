"""Reload of settings files, also after a failure of the system that leaves the files as they are."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from npuserve.service.access.file_reloader import FileReloader


class Reader:
    """Reader of one file that raises `error`, if there is one."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.error: OSError | None = None

    def read(self) -> str:
        if self.error:
            raise self.error
        return self.file.read_text()


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.fields["error"] for record in caplog.records if "not read again" in record.getMessage()]


def test_reload_after_an_error_of_the_system_reads_the_unchanged_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "npuserve")
    file = tmp_path / "file"
    file.write_text("old")
    reader = Reader(file)
    reloader = FileReloader("api_keys", [str(file)], reader.read)
    file.write_text("new file")
    reader.error = OSError(errno.EMFILE, "Too many open files")
    assert not any(reloader.reload_if_changed() for _ in range(3))
    assert (reloader.value, len(failures(caplog))) == ("old", 1)
    reader.error = OSError(errno.EIO, "Input/output error")
    assert not reloader.reload_if_changed()
    assert len(failures(caplog)) == 2
    file.write_text("newest file")
    assert not reloader.reload_if_changed()
    assert len(failures(caplog)) == 3
    reader.error = None
    assert reloader.reload_if_changed()
    assert reloader.value == "newest file"
    assert not reloader.reload_if_changed()
    assert caplog.messages.count("read again") == 1


def test_reload_after_a_change_of_the_mode_reads_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    file.chmod(0o600)
    reloader = FileReloader("api_keys", [str(file)], file.read_text)
    before = os.stat(file)
    while os.stat(file).st_ctime_ns == before.st_ctime_ns:  # the clock of the file system is coarse
        file.chmod(0o644)
    assert os.stat(file).st_mtime_ns == before.st_mtime_ns
    assert reloader.reload_if_changed()
