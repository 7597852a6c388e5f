"""Dependency updates, settings of the static analyser, and .ci/supply_chain's reading of pip-audit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "supply_chain"
KNOWN = {"name": "good", "version": "1", "vulns": []}
VULNERABLE = {"name": "bad", "version": "1.0", "vulns": [{"id": "PYSEC-2026-1", "fix_versions": ["1.1"]}]}
UNKNOWN = {"name": "other", "skip_reason": "Dependency not found on PyPI"}
OFFLINE = "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='example.com'): Max retries exceeded"


def supply_chain(folder: Path, *, bandit: int = 0, out: str = "", err: str = "", code: int = 0) -> tuple[int, str]:
    """Run the script with programs that print and exit as given; return its exit code and output."""
    for name, text in {"out": out, "err": err}.items():
        (folder / name).write_text(text)
    keep = 'for file; do :; done; cp "$file" asked'  # the last argument
    for name, script in {"bandit": f"exit {bandit}", "pip-audit": f"{keep}; cat out; cat err >&2; exit {code}"}.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\ncd {folder}\n{script}\n")
        program.chmod(0o755)
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True,
                          env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})
    return done.returncode, done.stdout


def test_supply_chain_without_findings_passes(tmp_path: Path) -> None:
    code, said = supply_chain(tmp_path, out=json.dumps({"dependencies": [KNOWN]}))
    assert (code, said) == (0, "1 packages checked for known vulnerabilities\n")


def test_supply_chain_audits_every_pin_of_every_image_once(tmp_path: Path) -> None:
    """pip-audit refuses a file in which torch alone has no hash, and a package with two versions."""
    code, _ = supply_chain(tmp_path, out=json.dumps({"dependencies": [KNOWN]}))
    assert code == 0
    asked = (tmp_path / "asked").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in asked)
    names = [line.split("==")[0].lower() for line in asked]
    assert len(set(names)) == len(names)
    locks = "\n".join(file.read_text() for file in (ROOT / "docker").glob("requirements*.txt"))
    assert {"torch", "torch-npu", "smg", "grpcio"} <= set(names)
    assert set(names) == {"torch", *re.findall(r"^([\w.-]+)==", locks, re.MULTILINE)}


def test_supply_chain_known_vulnerability_fails(tmp_path: Path) -> None:
    code, said = supply_chain(tmp_path, out=json.dumps({"dependencies": [KNOWN, VULNERABLE, UNKNOWN]}), code=1)
    assert code == 1
    assert "bad 1.0: PYSEC-2026-1, fixed in 1.1" in said
    assert "NOT CHECKED: the vulnerability service does not know 1 of 3 packages: other" in said


def test_supply_chain_service_without_data_is_reported(tmp_path: Path) -> None:
    """For a mirror without vulnerability data pip-audit's exit code is 0."""
    code, said = supply_chain(tmp_path, out=json.dumps({"dependencies": [UNKNOWN]}))
    assert code == 0
    assert "NOT CHECKED: " in said
    assert "\n0 packages checked" in said


def test_supply_chain_unreachable_service_is_reported(tmp_path: Path) -> None:
    code, said = supply_chain(tmp_path, err=OFFLINE, code=1)
    assert code == 0
    assert said.startswith("NOT CHECKED: the vulnerability service cannot be reached: ")


@pytest.mark.parametrize("wrong", [{"err": "error: unrecognized arguments", "code": 2}, {"bandit": 1}])
def test_supply_chain_failed_tool_or_finding_fails(tmp_path: Path, wrong: dict[str, str | int]) -> None:
    good = {"out": json.dumps({"dependencies": [KNOWN]})}
    assert supply_chain(tmp_path, **(wrong if "err" in wrong else good | wrong))[0] == 1  # type: ignore[arg-type]


FOUND = {
    "B602": "import subprocess\nsubprocess.run(input(), shell=True)\n",
    "B301": "import pickle\npickle.load(open('x', 'rb'))\n",
    "B614": "import torch\ntorch.load('x')\n",
    "B307": "eval(input())\n",
    "B306": "import tempfile\ntempfile.mktemp()\n",
    "B701": "import jinja2\njinja2.Environment()\n",
}
"""Rule of bandit -> source that it finds with our settings."""


@pytest.mark.slow
def test_bandit_with_our_settings_finds(tmp_path: Path) -> None:
    program = shutil.which("bandit") or shutil.which("bandit", path=str(Path(sys.executable).parent))
    if not program:
        pytest.skip("no program bandit (pip install bandit)")
    for rule, source in FOUND.items():
        (tmp_path / f"{rule}.py").write_text(source)
    done = subprocess.run([program, "-q", "-r", "-f", "json", "-c", ROOT / "pyproject.toml", tmp_path],
                          capture_output=True, text=True)
    found = {(Path(each["filename"]).stem, each["test_id"]) for each in json.loads(done.stdout)["results"]}
    assert {(rule, rule) for rule in FOUND} <= found


def test_dependabot_covers_every_manifest_of_the_tree() -> None:
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    covered = {(made["package-ecosystem"], folder.strip("/"))
               for made in updates for folder in made.get("directories", [made.get("directory")])}
    manifests = {"pip": r"(pyproject\.toml|requirements.*\.txt)", "docker": r"Dockerfile.*", "npm": r"package\.json",
                 "github-actions": r"\.github/workflows/.*"}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    found = {(kind, "" if kind == "github-actions" else name.rpartition("/")[0])
             for kind, pattern in manifests.items() for name in listed.stdout.splitlines()
             if re.fullmatch(pattern, name if "/" in pattern else name.rpartition("/")[2])}
    assert covered == found
