"""Help of `npuserve serve`, and what every start of a server does. tests/e2e starts servers by it."""

from __future__ import annotations

import re

import pytest

from npuserve.cli.main import main
from npuserve.service.settings import SETTINGS
from npuserve.service.supervisor import supervisor


def test_help_begins_with_what_users_do_and_ends_with_advanced_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: npuserve serve [MODEL] [settings]\n")
    assert re.findall(r"^(\w.*):$", text, re.MULTILINE) == ["options", *SETTINGS]
    assert [*SETTINGS][-1] == "advanced"
    assert "TEXT" not in text


@pytest.mark.parametrize("command", [["serve"], ["serve", "--private"], ["demo"]])
def test_every_start_of_a_server_forbids_core_files_and_debuggers(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dumpable: list[bool] = []
    monkeypatch.setattr(supervisor.process_control, "set_dumpable", dumpable.append)
    monkeypatch.setattr(supervisor.logs, "setup", lambda config, name: None)
    monkeypatch.setattr(supervisor.asyncio, "run", lambda coroutine: coroutine.close())
    main(command)
    assert dumpable == [False]
