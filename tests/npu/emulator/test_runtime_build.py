"""Build, loading and refusals of the emulated NPU; a torch_npu without CANN must not affect other backends."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from npuserve.npu import emulator
from npuserve.npu.emulator import build
from tests.npu.emulator.child import ROOT, emulated, needs_npu


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**environment, **variables}, capture_output=True,
                          text=True, timeout=280)


@functools.cache
def has_cann() -> bool:
    """Return whether torch can load an installed torch_npu by itself."""
    return python("import torch").returncode == 0


FIRST = """if True:
    import os, sys
    class Torch:
        def find_spec(self, name, *_):
            if name == "torch":
                print(os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"], flush=True)
                os._exit(0)
    sys.meta_path.insert(0, Torch())
    """
"""Program that prints the variable by which torch loads no device, before the first import of torch, and ends there."""


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed")
def test_torch_npu_without_cann_leaves_cpu_usable():
    if has_cann():
        pytest.skip("a CANN is installed here")
    done = python("import npuserve.kernels.norm, torch; print(torch.ones(2).sum().item())")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2.0\n"


@pytest.mark.parametrize("imported", [
    "npuserve.npu.execution.batch", "npuserve.kernels.norm", "npuserve.service.engine.process, torch"])
def test_torch_is_imported_without_its_devices(imported: str):
    """As in the test above: whatever is imported first."""
    done = python(f"{FIRST}import {imported}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0\n"


@needs_npu
def test_all_linked_symbols_exist():
    if shutil.which("nm") is None:
        pytest.skip("no nm")

    def symbols(file: Path, which: str) -> set[str]:
        listed = subprocess.run(["nm", "-D", which, str(file)], capture_output=True, text=True, check=True).stdout
        return {line.split()[-1].split("@")[0] for line in listed.splitlines()}

    libraries, place = build.libraries(), build.find()
    wanted: set[str] = set()
    for file in [*place.torch_npu.glob("lib/*.so"), *place.torch_npu.glob("*.so")]:
        missing = symbols(file, "--undefined-only")
        wanted |= {name for name in missing if re.match(r"(acl|rt[A-Z]|Msprof|Hccl|hal)", name)}
    assert len(wanted) >= 84
    assert not wanted - symbols(libraries / "libascendcl.so", "--defined-only")


@needs_npu
def test_concurrent_processes_build_once_and_delete_old_files(tmp_path: Path):
    """With existing objects, so that only linking remains."""
    build.libraries()
    home = tmp_path / "npuserve" / "emulator"
    shutil.copytree(build.cache() / "objects", home / "objects", copy_function=os.symlink)
    old = [home / "objects" / "old.o", home / "older" / "built"]
    for file in old:
        file.parent.mkdir(exist_ok=True)
        file.touch()
        os.utime(file, (0, 0))
    code = """if True:
        import logging; logging.basicConfig(format="%(message)s")
        from npuserve.npu.emulator.build import libraries
        print(libraries())"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=110) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    (made,) = {out.strip() for out, _ in said}
    assert sum("is built" in err for _, err in said) == 1
    assert (Path(made) / "libascendcl.so").exists()
    assert not any(file.exists() for file in old)
    assert not old[1].parent.exists()


def test_changed_source_builds_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("runtime", "ops"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.cpp").write_text("int one;")
    (tmp_path / "runtime" / "device.h").write_text("#define A 1")
    monkeypatch.setattr(build, "HERE", tmp_path)

    def digests() -> list[str]:
        headers = sorted((tmp_path / "runtime").glob("*.h"))
        return [build._units(folder, headers, ("-O1",), "salt")[0].digest for folder in ("runtime", "ops")]

    before = digests()
    assert digests() == before
    (tmp_path / "ops" / "one.cpp").write_text("int two;")
    after = digests()
    assert after[0] == before[0]
    assert after[1] != before[1]
    (tmp_path / "runtime" / "device.h").write_text("#define A 2")
    assert not set(digests()) & {*before, *after}


def spec(folder: Path) -> Any:
    return SimpleNamespace(origin=str(folder / "__init__.py"))


@pytest.mark.parametrize(("found", "versions", "says"), [
    ({}, {}, "torch is not installed"),
    ({"torch"}, {"torch": "2.13.0+cpu"}, r"torch_npu is not installed: pip install 'npuserve\[npu\]'"),
    ({"torch", "torch_npu"}, {"torch": "2.12.0", "torch_npu": "2.13.0"},
     "torch_npu 2.13.0 is made for torch 2.13.0, and torch 2.12.0 is installed: pip install torch==2.13.0"),
    ({"torch", "torch_npu"}, {"torch": "2.13.0+cpu", "torch_npu": "2.13.0.post1"}, "came without its headers"),
], ids=["torch", "torch_npu", "pair", "headers"])
def test_missing_package_raises_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: set[str], versions: dict[str, str], says: str
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec(tmp_path) if name in found else None)
    monkeypatch.setattr(build.importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(build.platform, "system", lambda: "Linux")
    with pytest.raises(build.EmulatorError, match=says):
        build.find()


def test_missing_compiler_raises_with_advice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.EmulatorError, match=r"no C\+\+ compiler \(g\+\+ or clang\+\+\): install g\+\+"):
        build.find_compiler()
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(build.EmulatorError, match="no-such-compiler"):
        build.find_compiler()


@pytest.mark.parametrize(("options", "says"), [
    ({"memory": 1 << 20}, "memory must be 64 MiB or more, not 1048576 bytes"),
    ({"relax": ["fp64"]}, "relax must be of fp32, small_heads, not fp64"),
    ({"order": "random"}, "order must be one of lazy, eager, shuffled, not random"),
    ({"depth": 0}, "depth must be 1 or more, not 0"),
], ids=str)
def test_invalid_option_raises_with_name(options: dict[str, Any], says: str):
    with pytest.raises(emulator.EmulatorError, match=says):
        emulator.activate(**options)
    assert not emulator.active()


@pytest.mark.parametrize("named", ["0", "4GiB", "-1", ""])
def test_memory_from_environment_is_checked(monkeypatch: pytest.MonkeyPatch, named: str):
    monkeypatch.setenv("EMULATED_NPU_GIB", named)
    with pytest.raises(emulator.EmulatorError, match=f"EMULATED_NPU_GIB must be a number from 1 to 9999, not {named}"):
        emulator.activate()
    assert not emulator.active()


def test_memory_from_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EMULATED_NPU_GIB", "64")
    monkeypatch.setattr(emulator, "_options", emulator._Options(64 << 30, frozenset(), "lazy", 0, 4096, False))
    emulator.activate()  # again with equal options
    with pytest.raises(emulator.EmulatorError, match="active with other options"):
        emulator.activate(memory=4 << 30)


def test_activate_after_torch_npu_raises(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace())
    with pytest.raises(emulator.EmulatorError, match="torch_npu was imported before"):
        emulator.activate()


def test_functions_before_activate_raise():
    for call in (emulator.calls, emulator.memory, emulator.heal):
        with pytest.raises(emulator.EmulatorError, match="not active"):
            call()


@needs_npu
def test_activate_logs_and_exit_frees_everything():
    code = """if True:
        import atexit, logging; logging.basicConfig(format="%(message)s")
        from npuserve.npu import emulator
        emulator.activate(memory=128 << 20, relax=["fp32"])
        atexit.register(lambda: print("left", *emulator.memory()[:1], emulator.pending()))  # after torch_npu's own
        import torch, torch_npu
        kept = [torch.ones(1000, device="npu") + index for index in range(100)]
        side = torch.npu.Stream()
        with torch.npu.stream(side):
            kept[0].add_(1)
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            kept[1].add_(1)
        graph.replay()
        del kept, graph"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "emulated NPU: proves calls and numbers, not speed (128 MiB, lazy order; relaxed: fp32)" in done.stderr
    assert done.stdout.splitlines()[-1] == "left 0 0"


VARIANT = """if True:
    from npuserve.npu import emulator
    emulator.activate(memory=128 << 20)
    import torch, torch_npu
    ones = lambda *size: torch.ones(size, dtype=torch.bfloat16, device="npu")
    positions = torch.tensor([0, 1]).npu()
    torch_npu.npu_mrope(positions, ones(2, 256), ones(2, 128), ones(9, 64), 64, mrope_section=[0, 0, 0])
    torch.npu.synchronize()
    rope = next(call.name for call in emulator.calls() if "Rope" in call.name)
    print(torch_npu.npu.utils.get_cann_version("CANN"), rope.removesuffix("GetWorkspaceSize"))
    torch_npu.npu_swiglu(ones(2, 64))
"""


@needs_npu
@pytest.mark.parametrize(("cann", "called"), [
    ("8.5.0", "aclnnRopeWithSinCosCache"), ("9.1.0", "aclnnRopeWithSinCosCacheV2"),
    ("9.2.0", "aclnnRopeWithSinCosCacheV2")])
def test_version_of_cann_decides_the_operator(cann: str, called: str):
    done = python(VARIANT, EMULATED_CANN=cann)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{cann} {called}"


@needs_npu
def test_operator_that_cann_lacks_is_an_error_of_torch_npu():
    """The message is torch_npu's own."""
    done = python(VARIANT, EMULATED_CANN_WITHOUT="aclnnSwiGlu aclnnAdd", ASCEND_LAUNCH_BLOCKING="1")
    assert done.returncode != 0
    assert "aclnnSwiGlu or aclnnSwiGluGetWorkspaceSize not in libopapi.so" in done.stdout + done.stderr


@needs_npu
def test_unknown_version_of_cann_is_refused():
    done = python(VARIANT, EMULATED_CANN="7.0")
    assert "EMULATED_CANN must be one of 8.5.0, 9.0.0, 9.1.0, 9.2.0, not 7.0" in done.stderr


@needs_npu
def test_backend_refuses_a_cann_without_an_operator_that_it_needs():
    code = """if True:
    from npuserve.npu.backends import select
    select("npu", [])"""
    done = python(code, EMULATED_CANN_WITHOUT="aclnnRmsNorm aclnnFusedInferAttentionScoreV3")
    assert done.stderr.splitlines()[-1].endswith(
        "BackendError: device: CANN lacks aclnnFusedInferAttentionScoreV3, aclnnRmsNorm, which the kernels call: "
        "install the versions of torch_npu and CANN that docs/ascend.md pairs")


@needs_npu
def test_capture_probe_succeeds_on_cann_that_documents_bfloat16_alone():
    code = """if True:
    from npuserve.npu.backends import select
    backend = select("npu", [])
    import torch
    backend.capture(lambda rows: backend.empty((rows, 8), torch.bfloat16).zero_(), 1, decode=True)
    print(backend._takes_lengths)"""
    done = python(code, EMULATED_CANN="8.5.0")
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr


@emulated()
def test_device_properties():
    import torch
    import torch_npu

    assert torch.npu.device_count() == 8
    assert torch_npu._C._npu_get_soc_version() == 224 or torch.npu.get_device_name(0).startswith("Ascend910B")
    assert torch_npu.npu.utils.get_cann_version("CANN") == "9.1.0"
    lib = ctypes.CDLL("libascendcl.so")
    lib.aclrtGetSocName.restype = ctypes.c_char_p
    assert lib.aclrtGetSocName() == b"Ascend910B4"
    with pytest.raises(RuntimeError, match="device"):
        torch.npu.set_device(8)


@emulated()
def test_functions_not_emulated_fail_by_name():
    lib = ctypes.CDLL("libascendcl.so")
    lib.aclGetRecentErrMsg.restype = ctypes.c_char_p
    assert lib.aclrtProcessReport(1) == 207000
    assert lib.aclGetRecentErrMsg() == b"emulated NPU: aclrtProcessReport is not emulated"
    assert lib.aclGetRecentErrMsg() is None  # it is taken once
