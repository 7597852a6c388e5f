"""Picture of the imports between folders, drawn from the code as a Mermaid graph in docs/architecture.md.

    python docs/import_graph.py            print the graph
    python docs/import_graph.py --write    replace the one in docs/architecture.md; a test compares

An arrow from A to B means that a file of A imports a file of B, imports inside functions included. Arrows that follow
from others are left out (transitive reduction). Raises ValueError if folders import each other in a circle.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- imports: made by docs/import_graph.py -->\n", "<!-- end of imports -->\n"
TOPS = ("cli", "client", "common", "service", "npu", "kernels")
CATALOGUES = ("npu/emulator", "npu/backends", "kernels", "cli")
"""Folders that are drawn whole, with those below them."""


def modules() -> dict[str, Path]:
    """Return the name of each module, without `npuserve.`, and its file."""
    found = {}
    for top in TOPS:
        for file in (ROOT / top).rglob("*.py"):
            found[".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = file
    return found


def imported(file: Path, names: dict[str, Path]) -> set[str]:
    """Return the modules of ours that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            candidates = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            candidates = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        else:
            continue
        for candidate in candidates:
            name = candidate.removeprefix("npuserve.")
            if candidate != name and name in names:
                found.add(name)
    return found


def folder(file: Path) -> str:
    """Return the folder by which a file is drawn."""
    path = file.parent.relative_to(ROOT).as_posix()
    return next((whole for whole in CATALOGUES if path == whole or path.startswith(f"{whole}/")), path)


def graph() -> dict[str, set[str]]:
    """Return folder -> folders that it imports, without arrows that follow from others. Raises ValueError."""
    names = modules()
    edges: defaultdict[str, set[str]] = defaultdict(set)
    for file in names.values():
        edges[folder(file)] |= {folder(names[name]) for name in imported(file, names)} - {folder(file)}
    try:
        order = list(TopologicalSorter(edges).static_order())  # what is imported comes first
    except CycleError as error:
        raise ValueError(f"folders import each other: {' -> '.join(error.args[1])}") from None
    reached: dict[str, set[str]] = {}
    for name in order:
        reached[name] = edges[name].union(*(reached[other] for other in edges[name]))
    return {name: {target for target in edges[name]
                   if not any(target in reached[other] for other in edges[name] - {target})} for name in order}


def node(name: str) -> str:
    """Return a folder as a node of the graph."""
    return f"{name.replace('/', '_')}[{name}]"


def mermaid() -> str:
    """Return the graph as a block of Markdown."""
    lines = ["```mermaid", "flowchart TD"]
    for source, targets in sorted(graph().items()):
        if targets:
            lines.append(f"    {node(source)} --> {' & '.join(map(node, sorted(targets)))}")
    return "\n".join([*lines, "```", ""])


def main() -> int:
    if sys.argv[1:] != ["--write"]:
        print(mermaid(), end="")
        return 0
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + mermaid() + END + rest.split(END)[1], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
