"""Requirements of an NPU, and the messages if one is missing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from typing import Any

import pytest
import torch

from npuserve.npu import backends
from npuserve.npu.backends import BackendError, select
from npuserve.npu.backends.ascend import backend as ascend
from npuserve.npu.backends.ascend.backend import AscendBackend
from npuserve.npu.backends.cpu import CpuBackend


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch_npu appear installed, as far as can be seen without importing it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "torch_npu" else find(name))
    monkeypatch.setattr(backends, "_emulated", {})


def without(name: str) -> Any:
    def load(library: str) -> Any:
        raise OSError(f"{library}: cannot open shared object file: No such file or directory")

    return load


def test_ascend_start_without_torch_npu_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not AscendBackend.available()
    assert "torch_npu is not installed: pip install 'npuserve[npu]'" in AscendBackend.unavailable()


@pytest.mark.usefixtures("installed")
def test_ascend_start_without_cann_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", without("libascendcl.so"))
    assert not AscendBackend.available()
    with pytest.raises(BackendError, match=r"^device: CANN is not found \(libascendcl.so .*source its set_env.sh"):
        select("npu")
    assert isinstance(select("auto"), CpuBackend)


@pytest.mark.usefixtures("installed")
def test_ascend_available_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", asked.append)
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} is imported"))
    assert AscendBackend.available()
    assert asked == ["libascendcl.so"]


@pytest.mark.parametrize(("version", "right"), [
    ("0", True), ("0.post4", True), ("0+git1", True), ("0rc1", True), ("1", False), ("10", False)])
def test_ascend_start_with_other_torch_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, right: bool
) -> None:
    major, minor, *_ = torch.__version__.split("+")[0].split(".")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{major}.{minor}.{version}")
    if right:
        ascend._matching_versions()
        return
    with pytest.raises(BackendError, match=rf"device: torch_npu {major}\.{minor}\..* and torch is {major}\.{minor}\."):
        ascend._matching_versions()


def test_emulate_cpu_is_refused() -> None:
    with pytest.raises(BackendError, match="emulate: there is no emulator of cpu"):
        select("cpu", [])
    assert next(iter(backends.MODULES)) == "npu"  # so that "auto" emulates it


def test_emulate_unknown_relaxation_is_refused() -> None:
    with pytest.raises(BackendError, match=r"^emulate_relax: must be of fp32, small_heads, got anything"):
        select("npu", ["anything"])
