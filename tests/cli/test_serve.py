"""Help of `npuserve serve`. tests/e2e starts servers by it."""

from __future__ import annotations

import re

import pytest

from npuserve.cli.main import main
from npuserve.service.settings import SETTINGS


def test_help_begins_with_what_users_do_and_ends_with_advanced_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: npuserve serve [MODEL] [settings]\n")
    assert re.findall(r"^(\w.*):$", text, re.MULTILINE) == ["options", *SETTINGS]
    assert [*SETTINGS][-1] == "advanced"
    assert "TEXT" not in text
