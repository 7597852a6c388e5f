"""Generator of docs/licenses.md: the licence of each package that npuserve or its images depend on.

    python docs/licenses.py

Reads the names from pyproject.toml, client/pyproject.toml and the lock files of the images, and the licences from the
metadata of the installed packages. A package that is not installed keeps the line that the page has. tests/test_pins.py
checks that the page names each package and what needs it.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licenses.md"
HEAD = """# Licences of dependencies

npuserve is under the Apache License 2.0, and its packages hold no code of these; pip installs them, each under its own
licence. [NOTICE](../NOTICE) lists what is part of npuserve. The licences are those that the packages' metadata name,
read by `python docs/licenses.py`. `docker/sbom.py` writes those of an image.

| package | needed by | licence |
|---|---|---|
"""


def needs() -> dict[str, set[str]]:
    """Return package -> what needs it: the server, the client, an extra, or an image."""
    found: dict[str, set[str]] = {}
    projects = {"server": ROOT / "pyproject.toml", "client": ROOT / "client" / "pyproject.toml"}
    for name, file in projects.items():
        project = tomllib.loads(file.read_text())["project"]
        groups = {name: project["dependencies"]}
        groups |= {f"extra {extra}": texts for extra, texts in project["optional-dependencies"].items()}
        for group, texts in groups.items():
            for text in texts:
                found.setdefault(canonicalize_name(Requirement(text).name), set()).add(group)
    for lock in (ROOT / "docker").glob("requirements*.txt"):
        for package in re.findall(r"^([\w.-]+)==", lock.read_text(), re.MULTILINE):
            found.setdefault(canonicalize_name(package), set()).add("images")
    return {name: groups for name, groups in sorted(found.items()) if not name.startswith("npuserve")}


def listed() -> dict[str, tuple[set[str], str]]:
    """Return package -> (what needs it, licence) of the page as it is."""
    if not PAGE.exists():
        return {}
    rows = PAGE.read_text().partition("|---|---|---|\n")[2]
    return {name: (set(groups.split(", ")), text)
            for name, groups, text in re.findall(r"^\| ([\w.-]+) \| ([^|]*) \| ([^|]*) \|$", rows, re.MULTILINE)}


def licence(package: str) -> str:
    """Return the licence in the metadata of an installed package; "" without one."""
    try:
        info = metadata(package)
    except PackageNotFoundError:
        return ""
    classifiers = [line.rsplit(" :: ", 1)[1] for line in info.get_all("Classifier") or ()
                   if line.startswith("License :: OSI Approved ::")]
    text = (info["License"] or "").strip()
    return info["License-Expression"] or (text if 0 < len(text) <= 60 else "") or "; ".join(classifiers)


def main() -> None:
    before = {name: text for name, (_, text) in listed().items()}
    lines = [f"| {name} | {', '.join(sorted(groups))} | {licence(name) or before.get(name) or 'see its metadata'} |\n"
             for name, groups in needs().items()]
    PAGE.write_text(HEAD + "".join(lines))


if __name__ == "__main__":
    main()
