"""`npuserve bench kernels`: time each kernel alone, at the shapes of a real model, and compare it with the ceilings.

The output begins with the machine's ceilings and the choice of CPU kernels. Then, for each case and implementation, it
has the error against the golden function in float64, the time of a call, and its share of the binding ceiling. The
ceiling is measured in turn with the kernel. With --json each line is one object, the first with ceilings and choice;
otherwise the output is a table. A terminal on stderr shows what is measured now, and how many measurements there are.

With --device, the kernels of that device are timed by its clock, in one dispatch if it captures steps. For an NPU,
`npuserve check --accept` times the kernels against its own memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from npuserve.npu.large_import import import_torch
from npuserve.service.arguments import number
from npuserve.service.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from npuserve.kernels.native.choice import CpuKernels
    from npuserve.kernels.registry import Case, Kernel

INPUTS = 1024
"""Input size of the cases' largest weights: the hidden size of Qwen3-0.6B."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kernel", nargs="+", default=[], metavar="NAME", help="time only these kernels")
    add("--case", default="", metavar="TEXT", help="time only cases whose name contains TEXT")
    add("--backend", default="", metavar="NAME", help="time only this backend's implementations, or golden")
    add("--golden", action="store_true", help="time the golden functions in plain torch too, which takes minutes more")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16",
        help="dtype of activations and weights, for kernels that support it (default: %(default)s)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="device to time (default: %(default)s)")
    add("--emulate", action="store_true", help="use an emulated device, for correctness only")
    add("--isa", metavar="NAME", help="instruction set of the native kernels (default: this processor's fastest)")
    add("--threads", type=number(int, 0), default=0, metavar="N",
        help="number of threads; 0 for the number of cores (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Return 0. Raise ConfigError for an unknown device, kernel, case, backend or instruction set."""
    import_torch()
    import torch

    from npuserve.kernels import native
    from npuserve.kernels.bench.ceilings import HOST, Ceilings
    from npuserve.kernels.bench.measure import Bench
    from npuserve.kernels.native.choice import describe
    from npuserve.npu.backends import select
    from npuserve.npu.backends.base import BackendError
    from npuserve.npu.backends.machine import machine_of, takes_case

    try:
        backend = select(args.device, () if args.emulate else None)
    except BackendError as error:
        raise ConfigError(str(error)) from error
    machine = machine_of(backend)
    cases = [(kernel, case, dtype) for kernel, case, dtype in _cases(args.kernel, args.case, getattr(torch, args.dtype))
             if takes_case(backend, case)]
    isas = native.library().isas if native.available() else []
    served = partial(_labels, backend.kernels, machine is HOST)
    labels = {label for kernel, _, _ in cases for label in served(kernel)}
    chosen_labels = partial(_chosen_labels, served, args.backend, args.golden)
    total = sum(len(chosen_labels(kernel)) for kernel, _, _ in cases)
    if args.backend and args.backend not in labels:
        raise ConfigError(f"backend: {args.backend!r} is not one of {', '.join(sorted(labels))}")
    if args.isa and args.isa not in isas:
        known = ', '.join(isas) or 'those of this build, which has no native kernels'
        raise ConfigError(f"isa: {args.isa!r} is not one of {known}")
    set_threads(args.threads)
    with native.using(args.isa) if args.isa else nullcontext():
        _show(f"measuring the machine's ceilings, then {total} measurements")
        ceilings = Ceilings(machine=machine)
        best = ceilings.best()
        chosen = _chosen(args.isa) if isas and machine is HOST else None
        _show("")
        if args.json:
            print(json.dumps(best | {"cpu_kernels": chosen and asdict(chosen)}))
        else:
            print(_ceilings_line(best), *(describe(chosen) if chosen else ()), sep="\n")
        if not args.json:
            print("share: part of the time that the ceiling explains; absent for caches, which are not measured")
            print(f"\n{'kernel':22}{'case':46}{'dtype':9}{'backend':8}{'error':>10}{'us':>10}{'GB/s':>8}{'GFLOP/s':>9}"
                  f"{'share':>7} of     {'others':>9}", flush=True)
        count = 0
        for kernel, case, dtype in cases:
            if not (labels_of_kernel := chosen_labels(kernel)):
                continue
            _show(f"{count + 1} of {total}: {kernel.name} {case.name}")
            bench = Bench(kernel, case, dtype, machine)
            for label in labels_of_kernel:
                count += 1
                _show(f"{count} of {total}: {kernel.name} {case.name} {label}")
                measured = bench.measure(label, ceilings, best)
                _show("")
                row: dict[str, Any] = {"kernel": kernel.name, "case": case.name,
                                       "dtype": str(dtype).removeprefix("torch."), "backend": label, **asdict(measured)}
                print(json.dumps(row) if args.json else _line(row), flush=True)
    return 0


def _show(text: str) -> None:
    """Show what is done now on the last line of a terminal on stderr; "" removes it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _chosen_labels(
    served: Callable[[Kernel[..., Any]], list[str]], backend: str, with_golden: bool, kernel: Kernel[..., Any]
) -> list[str]:
    """Return the labels of a kernel's implementations to time. The golden function is one of them if it is asked for,
    and if the kernel has no other.

    backend: the only label; "" for all.
    """
    from npuserve.kernels.registry import GOLDEN

    labels = served(kernel)
    if backend:
        return [label for label in labels if label == backend]
    return [label for label in labels if with_golden or label != GOLDEN or len(labels) == 1]


def _chosen(isa: str | None) -> CpuKernels:
    """Return the choice of CPU kernels: what a server would choose for the shapes of the cases.

    isa: instruction set to use, with its usual form of weights; None to choose it, too.
    """
    from npuserve.kernels import native
    from npuserve.kernels.native import choice

    if isa is None:
        return choice.choose(choice.CpuKernelSettings(), INPUTS)
    compact = native.library().usually_compact
    return choice.CpuKernels(isa, choice.gemm_of(isa), "compact" if compact else "plain", choice.measure_rates())


def _labels(device_label: str, host: bool, kernel: Kernel[..., Any]) -> list[str]:
    """Return the labels of the implementations to time: on the host all CPU implementations and the golden function,
    otherwise the device's own implementation.

    device_label: label of the device's kernels. host: whether the device is the host's CPU.
    """
    from npuserve.kernels import ascend, triton
    from npuserve.kernels.registry import GOLDEN

    if host:
        return [*(label for label in kernel.implementations if label not in (ascend.LABEL, triton.LABEL)), GOLDEN]
    return [device_label] if device_label in kernel.implementations else []


def set_threads(count: int) -> None:
    """Set the number of threads of native kernels and torch. count: 0 for the number of cores."""
    import torch

    from npuserve.kernels import native
    from npuserve.npu.backends.cpu import usable_cores

    torch.set_num_threads(count or usable_cores())
    if native.available():
        native.library().set_threads(count or usable_cores())


def _cases(names: list[str], text: str, wanted: torch.dtype) -> Iterator[tuple[Kernel[..., Any], Case, torch.dtype]]:
    """Yield kernel, case and dtype of each measurement: `wanted`, or the kernel's first dtype if it lacks that."""
    from npuserve.kernels.registry import KERNELS

    if unknown := [name for name in names if name not in KERNELS]:
        raise ConfigError(f"kernel: {unknown[0]!r} is not one of {', '.join(KERNELS)}")
    kernels = [KERNELS[name] for name in names or KERNELS]
    chosen = [(k, case, wanted if wanted in k.dtypes else k.dtypes[0])
             for k in kernels for case in k.cases if case.benchmark and text in case.name]
    if not chosen:
        raise ConfigError(f"case: no benchmark case of {', '.join(k.name for k in kernels)} contains {text!r}")
    yield from chosen


def _ceilings_line(best: dict[str, float]) -> str:
    return (f"ceilings: memory read {best['read_gbs']:.1f} GB/s; bf16 {best['bf16_gflops']:.0f} GFLOP/s, "
            f"int8 {best['int8_gops']:.0f} GOP/s, fp32 {best['fp32_gflops']:.0f} GFLOP/s")


def _line(row: dict[str, Any]) -> str:
    share = "–" if row["share"] is None else f"{row['share']:.2f}"
    error = f"{row['error']:.1e}" if not row["other_ids"] else f"{row['other_ids']} ids"
    return (f"{row['kernel']:22}{row['case']:46}{row['dtype']:9}{row['backend']:8}{error:>10}"
            f"{row['seconds'] * 1e6:10.1f}{row['bytes_per_second'] / 1e9:8.1f}"
            f"{row['operations_per_second'] / 1e9:9.1f}{share:>7} {row['bound']:7}{row['others']:9.2f}")
