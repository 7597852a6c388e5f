"""docs/ascend.md against the sources that it speaks of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from npuserve.npu.backends.base import Fault
from npuserve.npu.backends.graphs import default_buckets
from npuserve.service import accept
from npuserve.service.config import ServerConfig

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "ascend.md").read_text()


def rows(section: str, page: str = PAGE) -> Iterator[list[str]]:
    """The cells of the lines of the tables in a section, without their heads."""
    text = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    for line in re.findall(r"^\| .*\|$", text, re.MULTILINE):
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def sources() -> str:
    """Of what raises errors at the start, each text in one piece."""
    files = [*(ROOT / "npu" / "backends").glob("*.py"), ROOT / "npu" / "memory.py"]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text() for file in files))


@pytest.mark.parametrize(
    "said", [part for row in list(rows("When it does not start"))[1:] for part in row[0].split("; ")])
def test_each_sentence_is_said(said: str) -> None:
    pieces = [piece for piece in re.split(r"\*\w+\*|'\w+'|, bfloat16, float16", said) if len(piece) > 3]
    found = sources()
    assert pieces
    assert not [piece for piece in pieces if piece.strip(" ()") not in found]


def test_settings_are_settings() -> None:
    named = re.findall(r"`(\w+)`", " ".join(row[0] for row in list(rows("Sizes"))[1:]))
    assert len(named) > 8
    assert set(named) <= set(ServerConfig.__struct_fields__)


def test_faults_are_all_there() -> None:
    table = {row[0].strip("`") for row in rows("When the device fails")}
    assert {fault.value for fault in Fault} <= table


def test_versions_are_those_of_the_ladder() -> None:
    ladder = {file.stem for file in (ROOT / "tests" / "npu" / "ladder" / "versions").glob("*.json")}
    assert {row[0] for row in list(rows("Install"))[1:]} == ladder


def test_figures_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert f"{len(default_buckets(64))} for 64, {len(default_buckets(256))} for 256" in text
    assert f"at least {accept.LEAST_EQUAL} of all positions" in text
    assert f"in bfloat16 less {accept.NOISE}," in text
    assert f"at least {accept.LEAST_CAPTURED} of decode tokens" in text
    assert f"at most {accept.GRAPH_TOLERANCE['bfloat16']} in bfloat16, {accept.GRAPH_TOLERANCE['float16']} in" in text
    assert f"batch {', '.join(map(str, accept.BATCHES[:-1]))} and {accept.BATCHES[-1]}:" in text
    assert f"{accept.JUDGED_SECONDS * 1e6:.0f} µs or more" in text
