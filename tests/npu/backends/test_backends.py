"""Selection of the backend."""

from __future__ import annotations

import pytest

from npuserve.npu import backends
from npuserve.npu.backends import BackendError, select
from npuserve.npu.backends.cpu import CpuBackend


def test_select_auto_returns_the_first_available_backend():
    here = [name for name in ("npu", "cuda", "cpu") if backends.backend_class(name).available()]
    assert select("auto").name == select().name == here[0]
    assert "cpu" in backends.present()


def test_select_unknown_backend_names_those_present(monkeypatch):
    monkeypatch.setitem(backends.MODULES, "tpu", "tpu")
    for name in ("tpu", "gpu"):
        with pytest.raises(BackendError, match=rf"device: this version has no backend '{name}'; it has: .*cpu"):
            select(name)
    assert "tpu" not in backends.present()


def test_select_unavailable_backend_is_skipped_by_auto_and_refused_by_name(monkeypatch):
    monkeypatch.setattr(CpuBackend, "available", classmethod(lambda cls: False))
    monkeypatch.setattr(backends, "present", lambda: ["cpu"])
    for name in ("auto", "cpu"):
        with pytest.raises(BackendError, match="cpu not available on this machine"):
            select(name)
