"""Names and numbers in docs/ascend.md equal the code's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from npuserve.cli.acceptance import captures, latency, model
from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.kernels.ascend import BLOCK
from npuserve.npu.backends.ascend import fault_codes
from npuserve.npu.backends.faults import Fault
from npuserve.npu.backends.graphs import default_buckets
from npuserve.npu.cann import codes, versions
from npuserve.service.config import ServerConfig

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "ascend.md").read_text()


def rows(section: str, page: str = PAGE) -> Iterator[list[str]]:
    """Yield the cells of every line of the tables in a section."""
    text = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    for line in re.findall(r"^\| .*\|$", text, re.MULTILINE):
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def row(section: str, *names: str, page: str = PAGE) -> str:
    """Return the text of the one table row of a section whose first cell contains all names."""
    (found,) = [" ".join(cells) for cells in rows(section, page) if all(name in cells[0] for name in names)]
    return found


def numbers(text: str) -> set[str]:
    """Return the numbers in a text, thousands separators removed."""
    return set(re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)))


def sources() -> str:
    """Return the code that raises errors at the start."""
    files = [file for folder in ("backends", "execution", "model")
             for file in (ROOT / "npu" / folder).rglob("*.py")]
    return "\n".join(file.read_text() for file in files)


def names(said: str) -> set[str]:
    """Return the identifiers, quoted values and names of products in an error message."""
    return {*re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", said), *re.findall(r"'(\w+)'", said),
            *re.findall(r"\b(?:[A-Z]{3,}|torch|triton)\b", said)}


MESSAGES = [part for cells in list(rows("When it does not start"))[1:] for part in cells[0].split("; ")]


def test_ascend_docs_errors_name_what_the_code_names() -> None:
    named = set().union(*map(names, MESSAGES))
    assert named <= set(re.findall(r"\w+", sources()))
    settings = {setting[1] for said in MESSAGES if (setting := re.match(r"(\w+): ", said))}
    assert settings <= {*ServerConfig.__struct_fields__, "quantization_config"}


@pytest.mark.parametrize("section", ["Sizes", "When it does not start"])
def test_ascend_docs_settings_exist(section: str) -> None:
    cells = [cells[0] if section == "Sizes" else cells[1] for cells in list(rows(section))[1:]]
    named = set(re.findall(r"`([a-z]+_[a-z_]+)`", " ".join(cells)))
    assert named
    assert named <= set(ServerConfig.__struct_fields__)


@pytest.mark.parametrize("fault", list(Fault))
def test_ascend_docs_codes_have_the_faults_of_the_code(fault: Fault) -> None:
    (cells,) = [cells for cells in rows("When the device fails") if cells[0] == f"`{fault.value}`"]
    codes = [int(code.replace("x", "5")) for code in re.findall(r"\b\d[\dx]{5}\b", cells[1])]
    assert codes
    assert {fault_codes.sort(code) for code in codes} == {fault}


def test_ascend_docs_versions_equal_compatibility_data() -> None:
    versions = {file.stem for file in (ROOT / "tests" / "npu" / "compatibility" / "versions").glob("*.json")}
    page = PAGE.split("\n## Install\n")[1].split("\n## ")[0]
    refused = re.findall(r"^(\S+) with torch \S+ is refused", page, re.MULTILINE)
    assert {cells[0] for cells in list(rows("Install"))[1:]} | set(refused) == versions


def test_ascend_docs_pairs_are_those_of_the_code() -> None:
    assert [cells[0] for cells in list(rows("Install"))[1:]] == list(versions.PAIRS)
    for cells in list(rows("Install"))[1:]:
        pair = versions.PAIRS[cells[0]]
        assert cells[1] == pair.torch
        assert set(re.findall(r"\d+\.\d+", cells[2])) >= set(pair.cann)


def test_ascend_docs_driver_version_is_that_of_the_code() -> None:
    assert set(re.findall(r"(\d+\.\d+\.\w+) or later", PAGE)) == {codes.MIN_DRIVER}


def test_ascend_docs_error_codes_are_those_of_the_code() -> None:
    _, *table = rows("Error codes")
    known = [(str(code), f"`{entry.name}`", entry) for code, entry in codes.CODES.items()]
    known += [("none", entry.name, entry) for entry in codes.TEXTS.values()]
    assert [cells for cells in table if not set(cells[0]) <= {"-"}] == [
        [code, name, entry.meaning, entry.advice.replace("*", r"\*") + in_step(entry)] for code, name, entry in known]


def in_step(entry: codes.ErrorCode) -> str:
    """Return what the remedy in the page adds for a running step."""
    return f"; in a step: {entry.running[1]}" if entry.running else ""


def test_ascend_docs_sizes_are_those_of_the_code() -> None:
    buckets = re.findall(r"(\d+) for (\d+)", row("Sizes", "decode_buckets"))
    assert len(buckets) == 2
    assert [int(count) for count, _ in buckets] == [len(default_buckets(int(rows))) for _, rows in buckets]
    for section in ("Sizes", "When it does not start"):
        assert numbers(row(section, "block_size")) == {str(BLOCK)}


def test_ascend_docs_acceptance_limits_are_those_of_the_code() -> None:
    section = "The acceptance check"
    judged = numbers(row(section, "beside the CPU"))
    least = f"{model.min_equal_share(1000):.3f}"
    limits = (model.MIN_EQUAL_SHARE, model.SIGMAS, model.MAX_GAP, accept_tokens.BUDGET, least, 1000)
    assert {str(limit) for limit in limits} <= judged
    assert numbers(row(section, "captured decodes")) == {str(model.MIN_CAPTURED_SHARE)}
    tolerances = {str(captures.CAPTURE_TOLERANCE[dtype]) for dtype in ("bfloat16", "float16")}
    assert tolerances <= numbers(row(section, "capture`"))
    limits_of_latency = numbers(row(section, "latency"))
    assert {*map(str, latency.BATCHES), f"{latency.MIN_JUDGED_SECONDS * 1e6:.0f}"} <= limits_of_latency


def test_ascend_docs_fault_node_lists_each_code_that_ends_the_server() -> None:
    (cells,) = [cells for cells in rows("When the device fails") if cells[0] == "`node`"]
    assert {int(code) for code in re.findall(r"\b\d{6}\b", cells[1])} == {
        code for code in codes.CODES if fault_codes.sort(code) is Fault.NODE}
