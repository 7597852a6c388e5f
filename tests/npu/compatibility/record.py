"""Record of the operators that our kernels call on the emulated device: arguments, and functions of CANN.

    TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -m tests.npu.compatibility.record     prints it as JSON

It runs in a process of its own, since the emulator replaces CANN when torch_npu is imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
WORKSPACE = "GetWorkspaceSize"
RULE = re.compile(r"\[[a-z0-9_]+\.[a-z0-9_]+; .*\]")
"""Constraint that forbids a call, as the emulator names it."""
COMPILED = re.compile(r"[A-Z]\w*")
"""Name of a task of the device that is an operator which CANN compiles at its first use."""


@dataclass(slots=True)
class Recorded:
    """Operators and kernels.

    operators: by path as in `names`, or aten::... for operators of plain torch.
    kernels: our kernels -> operators that they call.
    failed: case of a kernel -> why it did not run, other than a documented constraint of the device; or a kernel none
        of whose cases ran.
    emulated: description of the emulator's library.
    registered: schemas of npu:: in torch's dispatcher.
    """

    operators: dict[str, Calls] = field(default_factory=dict)
    kernels: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    emulated: dict[str, Any] = field(default_factory=dict)
    registered: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Calls:
    """Calls of an operator.

    functions: functions of CANN, and compiled operators, that ran.
    calls: (kinds of positional, of keyword arguments).
    """

    functions: list[str] = field(default_factory=list)
    calls: list[tuple[list[str], dict[str, str]]] = field(default_factory=list)


def kind(value: Any) -> str:
    name = type(value).__name__
    return {"NoneType": "None", "Parameter": "Tensor", "tuple": "list", "device": "str"}.get(name, name)


def _recorder(found: Recorded, synchronize: Callable[[], None]) -> Any:
    """Return a dispatch mode that adds the operators called by a kernel to `found`."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from npuserve.npu import emulator

    class Recorder(TorchDispatchMode):
        def __init__(self, kernel: str, only: str = "") -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.called, self.only = found.kernels.setdefault(kernel, []), only

        def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if not func.name().startswith(self.only):
                return func(*args, **kwargs)
            synchronize()
            emulator.clear_calls()
            emulator.log_tasks(True)
            result = func(*args, **kwargs)
            synchronize()
            ran = {c.name for c in emulator.calls() if c.name.startswith("aclnn") and not c.name.endswith(WORKSPACE)}
            ran |= {task.name for task in emulator.tasks() if COMPILED.fullmatch(task.name)}
            made = found.operators.setdefault(func.name(), Calls())
            made.functions = sorted({*made.functions, *ran})
            call = [kind(x) for x in args], {name: kind(x) for name, x in kwargs.items()}
            if call not in made.calls:
                made.calls.append(call)
            if func.name() not in self.called:
                self.called.append(func.name())
            return result

    return Recorder


def record() -> Recorded:
    """Run all kernels' cases. Needs torch_npu, and a process that has not imported it."""
    from npuserve.npu import emulator

    emulator.activate(relax=("small_heads",))
    import torch

    from npuserve.kernels import ascend
    from npuserve.kernels.quantized import with_levels
    from npuserve.kernels.registry import KERNELS, Implementation, Kernel, to_host

    synchronize = ascend.torch_npu.npu.synchronize  # imports torch_npu
    found = Recorded()
    found.emulated = emulator.operators()
    found.registered = [str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("npu::")]

    recorder = _recorder(found, synchronize)

    def run(name: str, kernel: Kernel[Any, Any]) -> None:
        golden = Implementation(kernel.golden, ascend.to_device, to_host)
        served = kernel.implementations.get(ascend.LABEL, golden)
        refused: dict[str, str] = {}
        cases = [case for case in kernel.cases
                 if not (case.benchmark or case.zeros or case.float8 or case.int4 % 8 or case.w4a8 or case.ragged)
                 and case.cache in (None, torch.int8)]
        for case in cases:
            args = with_levels(case, ascend.LEVELS).make(torch.Generator().manual_seed(0), torch.bfloat16)
            try:
                with recorder(name, "npu::"):
                    args = served.adapt(args)
                with recorder(name):
                    served.function(*args)
                with recorder(name, "npu::"):
                    served.restore(args)
                synchronize()
            except RuntimeError as error:
                text = " ".join(str(error).split())
                (refused if RULE.search(text) else found.failed)[f"{name}, {case.name}"] = text
        if len(refused) == len(cases):
            found.failed |= refused

    for name, kernel in KERNELS.items():
        # Without an optional kernel others are called, and the device refuses models whose layers need the others.
        if (kernel.optional or kernel.by_layer) and ascend.LABEL not in kernel.implementations:
            continue
        run(name, kernel)
    return found


def recorded() -> Recorded:
    """Run `record` in another process. Raises RuntimeError with its output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.npu.compatibility.record"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    data = json.loads(done.stdout.splitlines()[-1])
    operators = {name: Calls(**calls) for name, calls in data.pop("operators").items()}
    return Recorded(operators=operators, **data)


if __name__ == "__main__":
    print(json.dumps(asdict(record())))
