"""Instruction sets of the processor for which the library is not built."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from npuserve.cli.check import native_text
from npuserve.kernels import native
from npuserve.kernels.native import shared_library
from npuserve.kernels.native.choice import CpuKernels
from npuserve.kernels.native.shared_library import Library
from npuserve.service.engine.process import cpu_kernels

CHOSEN = CpuKernels("avx2", "fma", "compact")


def names(*isas: str) -> Callable[[int], bytes | None]:
    """Return a function like those of the library that name instruction sets."""
    return lambda i: isas[i].encode() if i < len(isas) else None


def library(*, built: tuple[str, ...], processor: tuple[str, ...]) -> Library:
    return Library(SimpleNamespace(  # type: ignore[arg-type]
        npuserve_isa=names(*built), npuserve_processor_isa=names(*processor)))


def test_missing_isas_are_those_of_the_processor_that_the_library_lacks() -> None:
    narrow = library(built=("avx2", "portable"), processor=("avx512_bf16", "avx512_vnni", "avx2", "portable"))
    assert narrow.isas == ["avx2", "portable"]
    assert narrow.missing_isas == ["avx512_bf16", "avx512_vnni"]
    assert library(built=("avx2", "portable"), processor=("avx2", "portable")).missing_isas == []
    wide = library(built=("avx512_bf16", "portable"), processor=("avx512_bf16", "avx2", "portable"))
    assert wide.missing_isas == [], "narrower sets are not built by default"
    assert library(built=("portable",), processor=("avx2", "portable")).missing_isas == ["avx2"]


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
def test_library_has_all_that_the_processor_has_and_it_lacks() -> None:
    lib = native.library()
    built = lib.source.split()[1:]
    assert {*lib.isas} <= {*built}
    assert {*lib.missing_isas}.isdisjoint(built), "a set that is built and supported is in use"


def test_library_without_a_set_of_the_processor_names_both_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    other = library(built=(), processor=("avx2", "portable"))
    other._lib.npuserve_source = lambda: b"digest avx512_amx avx512_vnni"
    monkeypatch.setattr(shared_library, "_LIBRARY", other)
    assert not shared_library.available()
    with pytest.raises(RuntimeError, match=r"built for avx512_amx, avx512_vnni and not for this processor, which has "
                                           r"avx2, portable, so plain torch computes.* NATIVE_ISAS=all$"):
        shared_library.library()


def test_engine_with_missing_isas_warns_with_the_remedy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = SimpleNamespace(cpu_kernels=CHOSEN)

    def start(built: tuple[str, ...]) -> list[str]:
        caplog.clear()
        lib = library(built=built, processor=("avx512_bf16", "avx2", "portable"))
        monkeypatch.setattr(native, "library", lambda: lib)
        assert cpu_kernels(runner, None) == dataclasses.asdict(CHOSEN)  # type: ignore[arg-type]
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    (warning,) = start(built=("avx2", "portable"))
    assert "not built for avx512_bf16, which this processor has" in warning
    assert "NATIVE_ISAS=all" in warning
    assert start(built=("avx512_bf16", "avx2", "portable")) == []


def test_check_shows_missing_isas() -> None:
    kernels = dataclasses.asdict(CHOSEN)
    *_, last = native_text(isas=["avx2"], missing=["avx512_bf16"], **kernels)
    assert last.startswith("the CPU kernels are not built for avx512_bf16")
    assert len(native_text(isas=["avx2"], missing=[], **kernels)) == 1
