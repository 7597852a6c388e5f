"""Devices with streams: the wait for the memory of ended processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from npuserve.npu.backends import streams
from npuserve.npu.backends.streams import StreamMemory

GIB = 1 << 30


@pytest.mark.parametrize(("held", "seconds"), [
    ([1], 0), ([30, 30, 20, 2], 3), ([30] + [10] * 20, 6), ([20] * 20, 5), ([100 - i for i in range(95)], 60)],
    ids=["nothing is held", "all returns", "a part returns", "another process", "it returns for ever"])
def test_wait_for_memory_ends_when_it_rises_no_more(
    monkeypatch: pytest.MonkeyPatch, held: Sequence[int], seconds: int
) -> None:
    """held: GiB that others hold, second by second."""
    total, reserved, slept = 128 * GIB, 3 * GIB, list[float]()
    monkeypatch.setattr(streams.time, "sleep", slept.append)
    readings = itertools.chain(held, itertools.repeat(held[-1]))
    module = SimpleNamespace(
        mem_get_info=lambda device: (total - reserved - next(readings) * GIB, total),
        memory_reserved=lambda device: reserved)
    StreamMemory(module, torch.device("cpu")).wait()
    assert slept == [1.0] * seconds
