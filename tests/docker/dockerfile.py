"""Parser of this repository's Dockerfiles, and execution of their build stage in a folder instead of a container:

    python -m tests.docker.dockerfile cpu|ascend|gateway FOLDER [ARG=VALUE ...]

Each COPY copies from the tree through .dockerignore, each RUN runs in sh with the stage's variables. Installations of
Debian packages are only printed. VENV and WORKDIR are inside FOLDER.

The dependencies, which are installed before the COPY of the whole tree, are kept in FOLDER. A later build uses them for
MAX_AGE_SECONDS if their instructions and the files that these copy are the same; else it deletes FOLDER.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"


MAX_AGE_SECONDS = 14 * 24 * 3600

# Commands that must succeed in the environment of an image.
CHECKS = {"server": (["npuserve", "--version"], ["npuserve", "check"]),
          "gateway": (["smg", "--version"],)}


class Instruction(NamedTuple):
    name: str
    text: str


WHOLE_TREE = Instruction("COPY", ". .")


def read(file: Path) -> list[list[Instruction]]:
    """Return the instructions before the first FROM, then each stage's, its FROM first."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    stages: list[list[Instruction]] = [[]]
    for line in filter(None, map(str.strip, lines)):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stages.append([])
        stages[-1].append(Instruction(name, rest))
    return stages


def sent(root: Path = ROOT) -> list[Path]:
    """Return the files visible to COPY. In .dockerignore the last pattern that matches a path or its folder counts."""
    patterns = [line for line in (root / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, check=True,
                           capture_output=True, text=True).stdout.splitlines()

    def ignored(name: str) -> bool:
        parts, decided = name.split("/"), False
        ways = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        for pattern in patterns:
            glob = pattern.removeprefix("!")
            anywhere = glob.startswith("**/")
            if any(fnmatch.fnmatch(*((way.split("/")[-1], glob[3:]) if anywhere else (way, glob))) for way in ways):
                decided = not pattern.startswith("!")
        return decided

    return [Path(name) for name in names
            if not ignored(name) and ((root / name).is_file() or (root / name).is_symlink())]


def filled(text: str, variables: dict[str, str]) -> str:
    """Return the text with the values of ${NAME}; nothing for unknown names."""
    return re.sub(r"\${(\w+)}", lambda match: variables.get(match[1], ""), text)


def with_arguments(stage: list[Instruction], arguments: dict[str, str]) -> list[Instruction]:
    """Return the instructions with the stage's ARGs in the files that COPY names."""
    variables = dict(arguments)
    instructions = []
    for name, text in stage:
        if name == "ARG":
            key, _, value = text.partition("=")
            variables.setdefault(key, filled(value, variables))
        instructions.append(Instruction(name, filled(text, variables) if name == "COPY" else text))
    return instructions


def dependencies(build: list[Instruction], arguments: dict[str, str]) -> str:
    """Return the digest of the instructions before the COPY of the whole tree, and of the files that they copy."""
    found: list[object] = [sys.version, arguments]
    for name, text in build:
        if (name, text) == WHOLE_TREE:
            break
        files = text.split()[:-1] if name == "COPY" else []
        found.append([name, text, *((ROOT / file).read_text() for file in files)])
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def run_build(kind: str, folder: Path, arguments: dict[str, str]) -> Path:
    """Run the build stage and return its environment. Raises CalledProcessError if a RUN fails."""
    _, stage, _ = read(FOLDER / f"Dockerfile.{kind}")
    build = with_arguments(stage, arguments)
    variables = {**os.environ, **arguments, "VENV": str(folder / "venv")}
    where, context = folder, sent()
    digest, mark = dependencies(build, arguments), folder / "dependencies"
    are_installed = (mark.exists() and mark.read_text() == digest
                     and time.time() - mark.stat().st_mtime < MAX_AGE_SECONDS)
    if not are_installed:
        if folder.exists() and not mark.exists():
            raise SystemExit(f"{folder} exists and is of no earlier build")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mark.write_text("incomplete")
    for name, text in build:
        print(f"-- {name} {text}", flush=True)
        if (name, text) == WHOLE_TREE:
            if are_installed:
                shutil.rmtree(where)
                where.mkdir()
            else:
                mark.write_text(digest)
            are_installed = False  # the remaining instructions run
        if are_installed and name in ("COPY", "RUN"):
            print("   not run: the dependencies are installed")
        elif name in ("ARG", "ENV"):
            for word in text.split():
                key, _, value = word.partition("=")
                value = filled(value, variables)
                variables[key] = variables.get(key, value) if name == "ARG" else value
        elif name == "WORKDIR":
            where = folder / text.lstrip("/")
            where.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, target = text.split()
            for file in context:
                if any(source == "." or file == Path(source) for source in sources):
                    made = where / target / (file if "." in sources else file.name)
                    made.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / file, made, follow_symlinks=False)
        elif name == "RUN" and text.startswith("apt-get "):
            print("   not run here: Debian packages")
        elif name == "RUN":
            subprocess.run(["sh", "-c", text], cwd=where, env=variables, check=True)
        elif name != "FROM":
            raise ValueError(f"{name} is not known here")
    if mark.read_text() != digest:
        mark.write_text(digest)
    return folder / "venv"


def main(kind: str, folder: str, *arguments: str) -> None:
    venv = run_build(kind, Path(folder).resolve(), dict(word.split("=", 1) for word in arguments))
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for program, *command in CHECKS.get(kind, CHECKS["server"]):
        subprocess.run([venv / "bin" / program, *command], cwd=folder, env=plain, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
