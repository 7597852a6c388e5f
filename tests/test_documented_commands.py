"""Commands in the documents: flags of `npuserve` exist, and so do scripts and modules that Python or a shell runs, and
what the links lead to."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from npuserve.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md"), *ROOT.glob("helm/**/*.md"),
                *ROOT.glob("docker/*.md"), *ROOT.glob("client/*.md")])


def lines(page: Path) -> list[str]:
    """Return the lines of a page, with continued ones joined."""
    return re.sub(r"\\\n\s*", " ", page.read_text()).splitlines()


def commands() -> Iterator[tuple[str, str]]:
    """Yield (page, command) of each call of npuserve, without comments, brackets and pipes."""
    for page in PAGES:
        for line in lines(page):
            for text in re.findall(r"(?:^    |`|&& )((?:\.venv/bin/)?npuserve [a-z][^`]*)", line):
                command = re.split(r" +# | && |[|>]", re.sub(r"[][]", "", text))[0].strip()
                yield page.relative_to(ROOT).as_posix(), command


@pytest.mark.parametrize("page", sorted({page for page, _ in commands()}))
def test_flags_of_documented_commands_exist(page: str) -> None:
    for _, command in filter(lambda found: found[0] == page, commands()):
        words = shlex.split(command)[1:]
        name = " ".join(words[:2]) if words[0] == "bench" and len(words) > 1 else words[0]
        if name == "bench":
            continue
        assert name in COMMANDS, command
        parser = argparse.ArgumentParser(allow_abbrev=False)
        importlib.import_module(f"npuserve.cli.{COMMANDS[name][0]}").add_arguments(parser)
        known = {*parser._option_string_actions}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                known.update(*(child._option_string_actions for child in action.choices.values()))
        flags = {word.partition("=")[0] for word in words if re.match("--[a-z]", word)}
        assert not flags - known, command


def test_documented_scripts_exist() -> None:
    found = 0
    for page in PAGES:
        for line in lines(page):
            for module in re.findall(r"python3? -m ((?:bench|tests)[\w.]*)", line):
                path = ROOT / module.replace(".", "/")
                assert path.is_dir() or path.with_suffix(".py").exists(), f"{page.name}: {module}"
                found += 1
            for name in re.findall(r"(?:(?:python3?|bash) |(?<![\w/])(?=\.ci/))([\w./]+)", line):
                if name.startswith(".ci/") or name.endswith((".py", ".sh")):
                    assert (ROOT / name).exists() or (page.parent / name).exists(), f"{page.name}: {name}"
                    found += 1
    assert found > 50


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", re.sub(r"\[(.*?)]\(.*?\)", r"\1", head).lower()).replace(" ", "-") for head in heads}


def test_links_lead_to_files_and_headings() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"]\(([^)\s]+)\)", page.read_text())
             if not re.match(r"\w+:", link)]
    broken = []
    for page, link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert links
    assert not broken
