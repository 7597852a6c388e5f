"""Facts in README.md: devices that have run it, and requirements."""

from __future__ import annotations

import re
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "README.md").read_text()


def test_readme_second_sentence_names_the_devices_that_never_ran() -> None:
    paragraph = " ".join(TEXT.split("\n\n")[1].split())
    second = re.split(r"(?<=\.) ", paragraph)[1]
    assert re.search(r"\bnever\b|\bnot\b", second)
    assert re.search(r"\bNPU\b", second)
    assert re.search(r"\bGPU\b", second)


def test_readme_platforms_are_those_of_torch() -> None:
    """torch's wheels are manylinux_2_28: glibc 2.28 or newer, no musl."""
    section = TEXT.split("\n## Install\n")[1].split("\n## ")[0]
    assert {"glibc", "musl", "2.28"} <= set(re.findall(r"\d\.\d+|\w+", section))
