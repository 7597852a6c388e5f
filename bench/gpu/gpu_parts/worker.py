"""Process that runs parts: prints one JSON object per line for each start, row, failure and end."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpu_parts import stand_in

if TYPE_CHECKING:
    from npuserve.kernels.bench.ceilings import Ceilings, Machine
    from npuserve.npu.backends.base import Backend

T = TypeVar("T")
Units = Iterator[tuple[str, Callable[[], Iterator[dict[str, Any]]]]]

LOST = 4
"""Exit code of a process that lost the device."""


@dataclass
class Context:
    """State shared by parts.

    toy: all sizes are small, for runs without a GPU.
    deadline: end of the current part's budget, or of the run if that is earlier, by time.monotonic.
    """

    args: argparse.Namespace
    backend: Backend
    machine: Machine
    out: Path
    deadline: float = math.inf
    _kept: dict[Any, Any] = field(default_factory=dict)
    _ceilings: tuple[Ceilings, dict[str, float]] | None = None

    @property
    def toy(self) -> bool:
        return str(self.args.shape).startswith("toy")

    @property
    def quick(self) -> bool:
        return bool(self.args.quick)

    @property
    def gpu(self) -> bool:
        """True for a real GPU, with clocks, streams and profiles."""
        return self.backend.device.type == "cuda"

    def ceilings(self) -> tuple[Ceilings, dict[str, float]]:
        """Return the ceilings, and the best passes: read_gbs, copy_gbs, bf16_gflops, int8_gops, fp32_gflops."""
        if self._ceilings is None:
            from npuserve.kernels.bench import ceilings

            if self.toy:
                ceilings._TORCH_SIZES = (64, 64)
                ceilings._PASS_SECONDS = 1e-3
            made = ceilings.Ceilings((8 << 20) if self.toy else (4 << 30), machine=self.machine)
            best = made.best()
            best["copy_gbs"] = max(made.copy() for _ in range(7)) / 1e9
            self._ceilings = made, best
        return self._ceilings

    def only(self, key: Any, make: Callable[[], T]) -> T:
        """Return make() for a key. Only the last key's object is kept, since models are large."""
        if key not in self._kept:
            self.release()
            self._kept[key] = make()
        found: T = self._kept[key]
        return found

    def release(self) -> None:
        self._kept.clear()
        gc.collect()
        if self.gpu:
            import torch

            torch.cuda.empty_cache()


def run(args: argparse.Namespace, parts: list[str], done: list[str], seconds: float, out: str, shard: list[int]
        ) -> int:
    """Run parts. shard: (i, n) for the units whose number is i modulo n."""
    # Output of libraries must not mix with the JSON lines.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(event: str, **facts: Any) -> None:
        try:
            print(json.dumps({"event": event, **facts}), file=answers, flush=True)
        except BrokenPipeError:  # the parent has ended
            os._exit(1)

    ends = time.monotonic() + seconds
    tell("start")
    context = start(args, Path(out))
    for part in parts:
        tell("part", part=part)
        context.deadline = min(time.monotonic() + args.budgets[part], ends)
        try:
            units = list(importlib.import_module(f"gpu_parts.{part}").units(context))[shard[0] :: shard[1]]
        except Exception:
            tell("note", part=part, unit="all", said=traceback.format_exc())
            units = []
        left_out = []
        for name, unit in units:
            if f"{part}/{name}" in done:
                continue
            if time.monotonic() > context.deadline:
                left_out.append(name)
                continue
            tell("begin", part=part, unit=name)
            try:
                for row in unit():
                    tell("row", part=part, **row)
            except Exception as error:
                tell("note", part=part, unit=name, said=traceback.format_exc())
                if lost(error):
                    return LOST
                del error
                context.release()
        if left_out:
            tell("note", part=part, unit=", ".join(left_out), said="left out: the part's budget is spent")
        context.release()
        tell("end", part=part)
    return 0


def start(args: argparse.Namespace, out: Path) -> Context:
    if importlib.util.find_spec("msgspec") is None:
        sys.modules["msgspec"] = stand_in.msgspec()
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import npuserve.kernels  # noqa: F401  fills the registry
    from npuserve.npu.backends import select
    from npuserve.npu.backends.base import DeviceSettings
    from npuserve.npu.backends.machine import machine_of

    backend = select(args.device, () if args.emulate else None, DeviceSettings(threads=0))
    return Context(args, backend, machine_of(backend), out)


def lost(error: Exception) -> bool:
    """Return True if the process lost its device memory."""
    from npuserve.npu.backends import fault
    from npuserve.npu.backends.faults import Fault

    return fault(error) in (Fault.ENGINE, Fault.NODE)
