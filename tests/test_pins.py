"""Bounds of the dependencies, each with its reason, and the torch that pip takes from local indexes."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from npuserve.service.rpc import aio_server
from npuserve.v1 import generate_pb2

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLIENT: dict[str, Any] = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
GENERATED = (ROOT / "protos" / "npuserve" / "v1" / "inference_service_pb2_grpc.py").read_text()

REASONS = {
    "npuserve-client": "tests/test_packaging.py::test_server_requires_the_client_of_its_version",
    "torch": "tests/test_pins.py::test_torch_bounds_are_the_tested_versions",
    "grpcio": "tests/service/rpc/test_aio_server.py::test_server_missing_private_name_raises_config_error",
    "grpcio-health-checking": "tests/test_pins.py::test_grpc_packages_have_one_upper_bound",
    "grpcio-reflection": "tests/test_pins.py::test_grpc_packages_have_one_upper_bound",
    "grpcio-status": "tests/test_pins.py::test_grpc_packages_have_one_upper_bound",
    "protobuf": "tests/test_pins.py::test_protobuf_range_is_that_of_the_generated_code",
    "llguidance": (
        "tests/service/structured_output/translation/test_pattern.py::test_anchor_at_an_end_is_honoured"),
}
"""Dependency with an upper bound -> test that says why."""


def requirements(project: dict[str, Any]) -> dict[str, Requirement]:
    return {requirement.name: requirement for requirement in map(Requirement, project["dependencies"])}


def bounds(requirement: Requirement) -> dict[str, str]:
    """Return operator -> version."""
    return {part.operator: part.version for part in requirement.specifier}


def test_every_upper_bound_has_a_test_that_says_why():
    bounded = {name for name, requirement in requirements(PROJECT).items() if bounds(requirement).keys() & {"<", "=="}}
    assert bounded == REASONS.keys()
    for reason in REASONS.values():
        file, _, test = reason.partition("::")
        assert f"def {test}" in (ROOT / file).read_text()


def test_grpc_packages_have_one_upper_bound():
    """Each requires grpcio of its own version or later. An asyncio server needs grpcio 1.84: see test_parser.py."""
    (generated,) = re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", GENERATED)
    ranges = {name: bounds(requirement) for name, requirement in requirements(PROJECT).items() if "grpcio" in name}
    assert ranges.pop("grpcio") == {">=": "1.84.0", "<": "1.86"}
    assert [*ranges.values()] == [{">=": generated, "<": "1.86"}] * 3
    assert aio_server.PRIVATE_NAMES, "without private names the upper bound has no reason"
    assert bounds(requirements(CLIENT)["grpcio"])[">="] == generated


def test_protobuf_range_is_that_of_the_generated_code():
    """Code of a major version runs with this one and the next, from the version that generated it."""
    text = Path(generate_pb2.__file__).read_text()
    (generated,) = re.findall(r"# Protobuf Python Version: ([\d.]+)", text)
    for project in (PROJECT, CLIENT):
        assert bounds(requirements(project)["protobuf"]) == {
            ">=": generated, "<": str(Version(generated).major + 2)}


def test_torch_bounds_are_the_tested_versions():
    """CI runs the newest version that is allowed and, on the emulator, the oldest."""
    allowed = requirements(PROJECT)["torch"].specifier
    (tested,) = set(re.findall(r"install -q torch==([\d.]+)", (ROOT / ".ci" / "run").read_text()))
    assert tested in allowed
    assert f"{Version(tested).major}.{Version(tested).minor + 1}" not in allowed
    pins = {extra: next(Requirement(text) for text in EXTRAS[extra] if Requirement(text).name == "torch")
            for extra in ("cpu", "cuda", "npu", "npu213")}
    assert {extra: str(pin.specifier) for extra, pin in pins.items()} == {
        "cpu": f"=={tested}+cpu", "cuda": f"=={tested}", "npu": "==2.10.0", "npu213": f"=={tested}"}
    assert bounds(requirements(PROJECT)["torch"])[">="] == "2.10"


def test_page_of_licences_names_every_dependency_and_what_needs_it():
    spec = importlib.util.spec_from_file_location("npuserve_licenses", ROOT / "docs" / "licenses.py")
    assert spec is not None
    assert spec.loader is not None
    licenses = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(licenses)
    listed = licenses.listed()
    assert {name: groups for name, (groups, _) in listed.items()} == licenses.needs(), "run python docs/licenses.py"
    assert all(licence for _, licence in listed.values())


def save_wheel(folder: Path, name: str, version: str, requires: list[str], extras: list[str]) -> None:
    """Save an empty wheel with metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {text}" for text in requires]
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        lines = ["Wheel-Version: 1.0", "Generator: test", "Root-Is-Purelib: true", "Tag: py3-none-any"]
        wheel.writestr(f"{info}/WHEEL", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the addresses of an index like PyPI, with a torch that brings CUDA, and of one like PyTorch's for CPUs."""
    folder = tmp_path_factory.mktemp("indexes")
    needs_torch = [text for text in PROJECT["dependencies"] if Requirement(text).name == "torch"]
    of_extras = [f'{text.partition(";")[0]}; extra == "{extra}"' for extra in ("cpu", "cuda", "npu")
                 for text in EXTRAS[extra] if "torch" in text]
    save_wheel(folder / "pypi/npuserve", "npuserve", "0.1.0", needs_torch + of_extras, ["cpu", "cuda", "npu"])
    for version in ("2.10.0", "2.13.0", "2.14.1"):
        save_wheel(folder / "pypi/torch", "torch", version, ["nvidia-cudnn"], [])
        save_wheel(folder / "cpu/torch", "torch", f"{version}+cpu", [], [])
    save_wheel(folder / "pypi/torch", "torch", "2.13.1", ["nvidia-cudnn"], [])  # not yet on the other index
    save_wheel(folder / "pypi/torch-npu", "torch_npu", "2.10.0.post4", ["torch==2.10.0+cpu"], [])
    save_wheel(folder / "pypi/nvidia-cudnn", "nvidia_cudnn", "9.0", [], [])
    for index in ("pypi", "cpu"):
        for package in (folder / index).iterdir():
            links = "".join(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>\n'
                            for wheel in package.iterdir())
            (package / "index.html").write_text(links)
    return f"file://{folder}/pypi", f"file://{folder}/cpu"


def resolve(*arguments: str) -> dict[str, str] | str:
    """Return name -> version of what pip would install; its errors for a failure."""
    command = [sys.executable, "-m", "pip", "install", "--isolated", "--quiet", "--dry-run", "--ignore-installed",
               "--disable-pip-version-check", "--report", "-", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return done.stderr
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(done.stdout)["install"]}


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="the pins are for Linux")
@pytest.mark.parametrize(("extra", "has_cpu_index", "expected"), [
    ("", False, {"torch": "2.13.1", "nvidia_cudnn": "9.0"}),
    # The index alone does not suffice: PyPI may have a newer one.
    ("", True, {"torch": "2.13.1", "nvidia_cudnn": "9.0"}),
    ("[cpu]", True, {"torch": "2.13.0+cpu"}),
    ("[cpu]", False, "Cannot install npuserve[cpu]"),
    ("[cuda]", False, {"torch": "2.13.0", "nvidia_cudnn": "9.0"}),
    ("[npu]", True, {"torch": "2.10.0+cpu", "torch_npu": "2.10.0.post4"}),
], ids=str)
def test_pip_takes_the_torch_of_the_extra(
    indexes: tuple[str, str], extra: str, has_cpu_index: bool, expected: dict[str, str] | str
):
    pytest.importorskip("pip")
    pypi, cpu = indexes
    found = resolve("--index-url", pypi, *(("--extra-index-url", cpu) if has_cpu_index else ()), f"npuserve{extra}")
    if isinstance(expected, str):
        assert expected in found
    else:
        assert found == {"npuserve": "0.1.0", **expected}
