"""Flags of other servers and clients, and what to write in their place."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from npuserve.service import settings
from npuserve.service.config import ServerConfig
from npuserve.service.equivalents import CLIENTS, SERVERS, VALUES, client_flag_for, setting_for

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_configuration_page_has_every_flag_with_its_answer() -> None:
    """The page adds marks and links."""
    section = DOCUMENT.read_text().split("\n## From vLLM\n")[1].split("\n## ")[0]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", section).replace("`", "")
    rows = dict(re.findall(r"^\| (-.*?) \| (.*) \|$", plain, re.MULTILINE))
    fields = ServerConfig.__struct_fields__
    same = {flags for flags in rows if set(flags.split(", ")) <= set(map(settings.flag, fields))}
    assert {flags: text for flags, text in rows.items() if flags not in same} == {
        ", ".join(flags): text.format_map(dict(zip(fields, fields, strict=True))) for flags, text in SERVERS.items()}


def test_no_flag_is_one_of_ours_and_none_stands_twice() -> None:
    ours = {settings.flag(field.name) for field in msgspec.structs.fields(ServerConfig)}
    for table in (SERVERS, CLIENTS):
        flags = [flag for row in table for flag in row]
        assert len(set(flags)) == len(flags)
    assert not ours.intersection(flag for row in SERVERS for flag in row)


@pytest.mark.parametrize(("name", "ending"), [
    ("--served-model-name", "; here it is <served_name>, one name"),
    ("--Served_Model_Name", "; here it is <served_name>, one name"),
    ("SERVED_MODEL_NAME", "; here it is <served_name>, one name"),
    ("-c", "; here it is <max_model_len>"),
    ("--trust-remote-code", "; there is none here: code of a checkpoint is never run"),
    ("state_folder",
     "; removed: a stream ends with its server. Leave the setting out; clients send such a request again"),
    ("c", None), ("--banana", None), ("", None),
])
def test_setting_for_names_it_as_its_source(name: str, ending: str | None) -> None:
    assert setting_for(name, lambda setting: f"<{setting}>") == ending


def test_client_flag_for_knows_flags_of_clients_alone() -> None:
    assert client_flag_for("--base-url") == "; here it is --target HOST:PORT"
    assert client_flag_for("--stream") == "; leave it out: answers are always streamed"
    assert client_flag_for("--served-model-name") is None


def test_values_of_others_are_values_of_the_setting() -> None:
    for name, values in VALUES.items():
        for value in values.values():
            msgspec.convert({name: value}, ServerConfig)
