"""A model's weights in memory that outlives their process, so that the next one need not load them.

The supervisor holds a file in memory and hands it to each life of the engine, with what the life before, once it was
ready, said of it (`describe`). Where the model's files, the kernels and the form of weights are those of then, the
plan of then is followed, and the weights are found as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from npuserve.kernels import native
from npuserve.npu.execution.memory_plan import MemoryPlan
from npuserve.npu.model.loader import weight_files


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """file: its descriptor. left: what `describe` said in the life before; None for none that was ready."""

    file: int
    left: Mapping[str, Any] | None = None

    def plan(self, folder: Path) -> MemoryPlan | None:
        """By which the life before loaded what lies in the file, if that is what this one would load."""
        if self.left is None or self.left.get("model") != _stamp(folder):
            return None
        return MemoryPlan(**self.left["plan"])


def describe(folder: Path, plan: MemoryPlan) -> dict[str, Any]:
    """For the `left` of the next life; as JSON takes it. The plan must be one without a host."""
    return {"model": _stamp(folder), "plan": asdict(plan)}


def _stamp(folder: Path) -> list[Any]:
    files = [(path, path.stat()) for path in (folder / "config.json", *weight_files(folder))]
    made_by: list[str] = [torch.__version__]
    if native.available():
        made_by += [native.library().source, "compact" if native.library().compact else "plain"]
    return [[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in files] + made_by
