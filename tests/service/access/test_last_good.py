"""The copy of a file that was good, for processes that start while it is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from npuserve.service.access.last_good import LastGood
from npuserve.service.config import ConfigError


def read(path: str) -> str:
    if not (text := Path(path).read_text()).startswith("good"):
        raise ConfigError(f"{path}: not good")
    return text


def made(folder: Path, copy: bool = True) -> LastGood[str]:
    return LastGood("api_keys", str(folder / "file"), folder / "copy" if copy else None, read)


def test_last_good_broken_file_is_replaced_at_the_first_read_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("good 1")
    assert made(tmp_path).read() == "good 1"
    (tmp_path / "file").write_text("bad")
    later = made(tmp_path)
    assert later.read() == "good 1"
    with pytest.raises(ConfigError, match="/file: not good"):
        later.read()
    (tmp_path / "file").write_text("good 2")
    assert later.read() == "good 2"
    (tmp_path / "file").unlink()
    assert made(tmp_path).read() == "good 2"
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("copy", [True, False])
def test_last_good_file_that_never_was_good_is_an_error(tmp_path: Path, copy: bool) -> None:
    (tmp_path / "file").write_text("bad")
    with pytest.raises(ConfigError, match="/file: not good"):
        made(tmp_path, copy).read()
    assert not (tmp_path / "copy").exists()
