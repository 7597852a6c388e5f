"""SBOMs written by docker/sbom.py, checked against CycloneDX's JSON schema and the described packages."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.docker.dockerfile import ROOT

pytest.importorskip("cyclonedx", reason="no cyclonedx-python-lib")
LIBRARY = "npuserve/kernels/native/libnpuserve.so"


def sbom(*arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / "docker" / "sbom.py", *arguments], capture_output=True, text=True)


def check_schema(text: str) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert error is None, str(error)[:500]


def install(folder: Path, name: str, version: str, *metadata: str) -> None:
    made = folder / f"{name}-{version}.dist-info"
    made.mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *metadata]
    (made / "METADATA").write_text("\n".join(lines))


def test_schema_refuses_an_invalid_sbom() -> None:
    with pytest.raises(AssertionError, match="bomFormat"):
        check_schema("{}")


def test_sbom_of_an_environment_names_packages_licences_and_dependencies(tmp_path: Path) -> None:
    install(tmp_path, "npuserve", "0.1.0", "License-Expression: Apache-2.0", "Requires-Dist: Some_Lib>=1",
            "Requires-Dist: absent; extra == 'x'")
    install(tmp_path, "some.lib", "1.5", "License-Expression: MIT OR BSD-3-Clause")
    out = tmp_path / "sbom.json"
    assert sbom(tmp_path, out).returncode == 0
    check_schema(out.read_text())
    made = json.loads(out.read_text())
    (library,) = made["components"]
    assert (library["name"], library["version"], library["purl"]) == ("some-lib", "1.5", "pkg:pypi/some-lib@1.5")
    assert library["licenses"] == [{"expression": "MIT OR BSD-3-Clause"}]
    assert (made["metadata"]["component"]["name"], made["metadata"]["component"]["version"]) == ("npuserve", "0.1.0")
    assert {"ref": "pkg:pypi/npuserve@0.1.0", "dependsOn": ["pkg:pypi/some-lib@1.5"]} in made["dependencies"]


@pytest.mark.slow
def test_sbom_of_this_environment_has_every_package(tmp_path: Path) -> None:
    from importlib.metadata import distributions, version

    import torch

    folder, out = Path(torch.__file__).parents[1], tmp_path / "sbom.json"
    names = {made.name for made in distributions(path=[str(folder)])}
    if "npuserve" not in names:
        pytest.skip("npuserve is installed in another folder than torch")
    done = sbom(folder, out)
    assert done.returncode == 0, done.stderr
    check_schema(out.read_text())
    made = {part["name"]: part["version"] for part in json.loads(out.read_text())["components"]}
    assert len(made) == len({name.lower().replace("_", "-").replace(".", "-") for name in names}) - 1
    assert made["torch"] == version("torch")


def test_sbom_of_a_folder_without_npuserve_is_refused(tmp_path: Path) -> None:
    install(tmp_path, "other", "1")
    done = sbom(tmp_path, tmp_path / "sbom.json")
    assert done.returncode != 0
    assert "npuserve is not installed there" in done.stderr


@pytest.mark.slow
def test_sbom_of_a_wheel_is_in_its_record(tmp_path: Path) -> None:
    wheel, info = tmp_path / "npuserve-0.1.0-py3-none-linux_x86_64.whl", "npuserve-0.1.0.dist-info/"
    contents = {LIBRARY: "library", info + "METADATA": "Metadata-Version: 2.4\nName: npuserve\nVersion: 0.1.0\n",
                info + "RECORD": f"{info}RECORD,,\n"}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in contents.items():
            archive.writestr(name, text)
    wheel.chmod(0o644)
    done = sbom(wheel)
    assert wheel.stat().st_mode & 0o777 == 0o644, "an index may be served by another user"
    name = f"{info}sboms/npuserve.cdx.json"
    assert done.stdout.strip() == name, done.stderr
    with zipfile.ZipFile(wheel) as archive:
        assert {entry: archive.read(entry).decode() for entry in contents if "RECORD" not in entry} == {
            entry: text for entry, text in contents.items() if "RECORD" not in entry}
        text = archive.read(name)
        records = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(info + "RECORD").decode()))}
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
    assert records == {info + "RECORD": ["", ""], name: [f"sha256={digest}", str(len(text))]}
    check_schema(text.decode())
    (library,) = json.loads(text)["components"]
    assert library["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"library").hexdigest()}]
    assert sbom(wheel).returncode != 0, "it has one already"
