"""The machine, its software, and its ceilings in this run."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from typing import Any

import torch

from gpu_parts.worker import Context, Units


def units(context: Context) -> Units:
    yield "software", lambda: _software(context)
    yield "ceilings", lambda: _ceilings(context)


def _software(context: Context) -> Iterator[dict[str, Any]]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if context.gpu:
        facts = torch.cuda.get_device_properties(0)
        found |= {"GPU": f"{facts.name}, {facts.multi_processor_count} SMs, {facts.total_memory / 2**30:.0f} GiB",
                  "CUDA of torch": str(torch.version.cuda), "driver": _driver()}
    for package in ("triton", "transformers", "msgspec"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    found["golden functions on the device"] = ", ".join(_fallbacks(context)) or "none"
    yield from ({"table": "Machine", "what": what, "found": value} for what, value in found.items())


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().split("Module")[-1].split()[0]
    except (OSError, IndexError):
        return "unknown"


def _fallbacks(context: Context) -> list[str]:
    from npuserve.kernels.registry import KernelSet

    return KernelSet(context.backend.kernels).fallbacks


def _ceilings(context: Context) -> Iterator[dict[str, Any]]:
    _, best = context.ceilings()
    for name, said, unit in (
        ("copy_gbs", "copy, read and write", "GB/s"), ("read_gbs", "read", "GB/s"), ("bf16_gflops", "bf16", "TFLOP/s"),
        ("int8_gops", "int8", "TOP/s"), ("fp32_gflops", "fp32, no tf32", "TFLOP/s")):
        value = best[name] / (1 if unit == "GB/s" else 1e3)
        yield {"table": "Ceilings of this run", "what": said, "best": value, "unit": unit}
