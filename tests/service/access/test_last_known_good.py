"""Copy of the last valid settings file, for processes that start while the file is invalid."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from npuserve.service import metrics
from npuserve.service.access import api_keys
from npuserve.service.access.file_reloader import FileReloader
from npuserve.service.access.last_known_good import LastKnownGoodFile
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.frontend.process import _open_keys


def read(path: str) -> str:
    if not (text := Path(path).read_text()).startswith("good"):
        raise ConfigError(f"{path}: not good")
    return text


def make_file(folder: Path, copy: bool = True) -> LastKnownGoodFile[str]:
    return LastKnownGoodFile("api_keys", str(folder / "file"), folder / "copy" if copy else None, read)


def first_value(file: LastKnownGoodFile[str], folder: Path) -> str:
    return FileReloader("api_keys", [str(folder / "file")], file.read, file.read_copy).value


def test_last_known_good_copy_is_read_only_at_first_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("good 1")
    assert make_file(tmp_path).read() == "good 1"
    (tmp_path / "file").write_text("bad")
    later, count = make_file(tmp_path), metrics.settings_not_read_total.labels("api_keys")
    before = count._value.get()
    assert first_value(later, tmp_path) == "good 1"
    assert count._value.get() == before + 1
    assert caplog.messages == ["not read, the last good one stays"]
    with pytest.raises(ConfigError, match="/file: not good"):
        later.read()
    (tmp_path / "file").write_text("good 2")
    assert later.read() == "good 2"
    (tmp_path / "file").unlink()
    assert first_value(make_file(tmp_path), tmp_path) == "good 2"
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("later", ["bad", None])
def test_last_known_good_keeps_no_copy_of_a_file_that_changes_meanwhile(tmp_path: Path, later: str | None) -> None:
    file = tmp_path / "file"
    file.write_text("good")

    def read_and_change(path: str) -> str:
        text = read(path)
        file.unlink()
        if later:
            file.write_text(later)
        return text

    known = LastKnownGoodFile("api_keys", str(file), tmp_path / "copy", read_and_change)
    assert known.read() == "good"
    assert {path.name for path in tmp_path.iterdir()} == ({"file"} if later else set())


def test_last_known_good_without_a_folder_for_the_copy_reads_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("good")
    assert LastKnownGoodFile("api_keys", str(tmp_path / "file"), tmp_path / "absent" / "copy", read).read() == "good"
    assert caplog.messages == ["no copy for other processes"]


@pytest.mark.parametrize("copy", [True, False])
def test_last_known_good_without_copy_raises_config_error(tmp_path: Path, copy: bool) -> None:
    (tmp_path / "file").write_text("bad")
    with pytest.raises(ConfigError, match="/file: not good"):
        first_value(make_file(tmp_path, copy), tmp_path)
    assert not (tmp_path / "copy").exists()


def test_front_end_that_read_the_copy_reads_the_unchanged_file_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("")
    cause: list[OSError] = []

    def read_keys(path: str) -> api_keys.Keys:
        if cause and path == str(file):
            raise cause[0]
        return api_keys.Keys({})

    monkeypatch.setattr(api_keys, "read", read_keys)
    config = ServerConfig(model="m", api_keys=str(file))
    assert _open_keys(config, str(tmp_path))
    cause.append(OSError(errno.EMFILE, "Too many open files"))
    reloader = _open_keys(config, str(tmp_path))
    assert reloader
    assert not reloader.reload_if_changed()
    cause.clear()
    assert reloader.reload_if_changed()
    assert not reloader.reload_if_changed()
