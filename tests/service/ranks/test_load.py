"""Settings that decide what drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from npuserve.service.config import SPECULATE, ConfigError, ServerConfig
from npuserve.service.ranks.load import MTP_SETTINGS, draft_folder, max_drafts
from npuserve.service.speculation.speculator import MAX_STEP_DRAFTS


@pytest.mark.parametrize("speculate", SPECULATE)
def test_modes_are_no_folders(speculate: str) -> None:
    config = ServerConfig(speculate=speculate)
    assert draft_folder(config) == ""
    assert max_drafts(config) == (0 if speculate == "off" else MAX_STEP_DRAFTS)
    assert MTP_SETTINGS.get(speculate, "off") == {"auto": "auto", "mtp": "on"}.get(speculate, "off")


def test_folder_is_that_of_a_smaller_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert draft_folder(ServerConfig(speculate=str(tmp_path))) == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "small").mkdir()
    assert draft_folder(ServerConfig(speculate="~/small")) == str(tmp_path / "small")
    with pytest.raises(ConfigError, match=r"'\./sufix' is neither one of off, auto, suffix, mtp nor the folder of a "):
        draft_folder(ServerConfig(speculate="./sufix"))
