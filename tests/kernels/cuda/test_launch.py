"""Launch of the kernels in CUDA C++ without a GPU: what happens where the software is missing."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from npuserve.kernels.cuda import compiled, launch_decoder_layers
from npuserve.kernels.decoder_layers import decoder_layers, register_cuda
from npuserve.kernels.triton import LABEL


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    def forget() -> None:
        compiled.available.cache_clear()
        launch_decoder_layers._kernel.cache_clear()
        decoder_layers.implementations.pop(LABEL, None)

    forget()
    yield
    forget()


@pytest.mark.parametrize(("capability", "usable", "registered"), [
    ((9, 0), True, True), ((9, 0), False, False), ((8, 9), True, False), ((10, 0), True, False)])
def test_registered_on_hopper_with_nvrtc_only(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], usable: bool, registered: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(compiled, "available", lambda: usable)
    compiled.available.cache_clear = lambda: None  # type: ignore[attr-defined]
    for _ in range(2):
        register_cuda(torch.device("cuda", 0))
        assert (LABEL in decoder_layers.implementations) is registered


def test_not_registered_on_a_cpu() -> None:
    register_cuda(torch.device("cpu"))
    assert LABEL not in decoder_layers.implementations


def test_missing_bindings_are_logged_with_advice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError("No module named 'cuda'")
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with caplog.at_level(logging.WARNING):
        assert not compiled.available()
        assert not compiled.available()
    assert len(caplog.records) == 1
    assert "No module named 'cuda'" in caplog.text
    assert "pip install 'npuserve[cuda]'" in caplog.text


def test_kernel_that_cannot_be_compiled_is_left_out_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("decoder_layers.cu cannot be compiled: no")

    monkeypatch.setattr(compiled, "kernel", refused)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert launch_decoder_layers._kernel((("ROWS", 2),), torch.device("cuda", 0), 1) is None
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps of 2 rows run kernel by kernel, which is slower: decoder_layers.cu cannot be compiled: no"]
