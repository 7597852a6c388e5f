"""Scheduler slices of threads, as the kernel reports them."""

from __future__ import annotations

import ctypes
import os
import platform
import threading

import pytest

from npuserve.service.ipc import short_slice
from npuserve.service.ipc.short_slice import ATTRIBUTES, SECONDS, request_slice

GET_ATTRIBUTES = {"x86_64": 315, "aarch64": 275}


def slice_and_nice() -> tuple[float, int]:
    attributes = ctypes.create_string_buffer(ATTRIBUTES.size)
    number = GET_ATTRIBUTES[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, 0, attributes, ATTRIBUTES.size, 0) == 0
    found = ATTRIBUTES.unpack(attributes.raw)
    return found[5] / 1e9, found[3]


def in_a_thread(work: object) -> list[object]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))  # type: ignore[operator]
    thread.start()
    thread.join()
    return found


def test_short_slice_applies_to_thread_and_its_threads_only() -> None:
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    if platform.system() != "Linux" or platform.machine() not in GET_ATTRIBUTES or release < (6, 12):
        pytest.skip("needs Linux 6.12 on x86_64 or aarch64")
    before = slice_and_nice()

    def asking() -> object:
        assert request_slice()
        found = slice_and_nice(), in_a_thread(slice_and_nice)
        assert request_slice(0)
        return *found, slice_and_nice()

    asked = (SECONDS, os.getpriority(os.PRIO_PROCESS, 0))
    assert in_a_thread(asking) == [(asked, [asked], before)]
    assert slice_and_nice() == before != asked


def test_short_slice_unsupported_system_returns_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_slice.platform, "machine", lambda: "riscv64")
    assert not request_slice()
    monkeypatch.undo()
    monkeypatch.setattr(short_slice.platform, "system", lambda: "Darwin")
    assert not request_slice()
