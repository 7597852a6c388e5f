"""Weights in a memory file that outlives the engine process, so that the next process need not load them.

The supervisor holds the file and passes it to each engine process, with the description (`describe`) that the last
ready process gave. If the model's files, the kernels and the form of the weights are unchanged, the new process follows
the described plan and reuses the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from npuserve.kernels import native
from npuserve.npu.execution.memory_plan import MemoryPlan
from npuserve.npu.model.folder import weight_files


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory file. file: its descriptor. contents: `describe` of the last ready process; None if there was none."""

    file: int
    contents: Mapping[str, Any] | None = None

    def plan(self, folder: Path) -> MemoryPlan | None:
        """Return the plan by which the file was filled; None if its weights are not from the present `folder`."""
        if self.contents is None or self.contents.get("model") != _stamp(folder):
            return None
        return MemoryPlan(**self.contents["plan"])


def describe(folder: Path, plan: MemoryPlan) -> dict[str, Any]:
    """Return the JSON value that identifies the weights, for `left` of the next process. plan: without host prefill."""
    return {"model": _stamp(folder), "plan": asdict(plan)}


def _stamp(folder: Path) -> list[Any]:
    files = [(path, path.stat()) for path in (folder / "config.json", *weight_files(folder))]
    made_by: list[str] = [torch.__version__]
    if native.available():
        made_by += [native.library().source, "compact" if native.library().compact else "plain"]
    return [[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in files] + made_by
