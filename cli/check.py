"""`npuserve check [MODEL]`: report the machine's software and devices, and whether the model fits. Starts no server.

With --accept the model is run on the device, too: see `acceptance`. With --compare its answers are compared with those
of transformers: see `compare`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.cli.acceptance import command as acceptance
from npuserve.cli.acceptance.report import Finding, as_json, ending, line
from npuserve.cli.compare import compare
from npuserve.npu.large_import import import_torch
from npuserve.service import settings
from npuserve.service.arguments import number
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.ranks.load import MTP_SETTINGS, draft_folder, max_drafts
from npuserve.service.ranks.world import read_world

if TYPE_CHECKING:
    from npuserve.kernels.native.choice import CpuKernels
    from npuserve.npu.backends.base import Backend
    from npuserve.npu.execution.memory_plan import MemoryPlan
    from npuserve.npu.model.config import ModelConfig
    from npuserve.npu.model.layers.shard import Shard

# Flags of /proc/cpuinfo that the kernels use, on x86 and on ARM.
CPU_FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
)
PARTS = "weights", "kv_cache", "fixed_state", "activations", "logits", "base"  # of a memory plan
# Module: its use, with the extra in pyproject.toml that installs it.
OPTIONAL = {
    "torch_npu": "Ascend NPUs (npuserve[npu])",
    "triton": "NVIDIA GPUs (npuserve[cuda])",
    "transformers": "tokenizers that only it can load (npuserve[transformers])",
    "matplotlib": "bench serve --plot (npuserve[bench])",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--explain", type=number(int, 1, 999999), metavar="CODE",
                        help="print what an error code of the device's software means and what to do, and nothing else")
    parser.add_argument("--compare", action="store_true",
                        help="compare the model's answers with those of transformers, token for token")
    acceptance.add_arguments(parser)
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if the model can be served here with these settings, with --accept no finding failed, and with --compare
    the answers are those of transformers; 1 if not.
    Return 130 if Ctrl-C ends --accept, after the report of the findings so far.

    Raise ConfigError for an invalid setting or folder.
    """
    config = settings.load(args, os.environ)
    if args.explain:
        return explain(args.explain)
    if args.least_share is not None and not args.accept:
        raise ConfigError("least_share: needs --accept")
    if args.soak and not args.accept:
        raise ConfigError("soak: needs --accept")
    with contextlib.redirect_stdout(sys.stderr):  # torch_npu prints to stdout when it is imported
        import_torch()
        described_model = model(config)  # first, because it starts the emulator
    chosen = described_model.pop("cpu_kernels", None)
    report: dict[str, Any] = {
        "machine": machine(), "native": native(chosen), "backends": backends(), "optional": optional(),
        "emulated": config.emulate, "preflight": preflight(config), "model": described_model}
    if not args.json:
        print(text(report), flush=True)
    has_errors = any(notice["level"] == "error" for notice in report["preflight"])
    good = described_model["fits"] and not described_model["missing_weights"] and not has_errors
    code = 0
    if good and args.accept:
        findings, complete = accept(config, args)
        good = complete and not any(finding.passed is False for finding in findings)
        report["acceptance"] = {
            "passed": good, "complete": complete, "findings": [as_json(finding) for finding in findings]}
        if not args.json:
            print(ending(findings, complete=complete))
        if not complete:
            code = 130
    if good and args.compare:
        with contextlib.redirect_stdout(sys.stderr):  # transformers prints progress
            compared = compare(config)
        good = compared.passed
        report["comparison"] = compared.as_json()
        if not args.json:
            print(compared.text())
    if args.json:
        print(json.dumps(report, allow_nan=False))
    return code or (0 if good else 1)


def accept(config: ServerConfig, args: argparse.Namespace) -> tuple[list[Finding], bool]:
    """Return the findings of the acceptance check, and whether it is complete: Ctrl-C ends it."""
    findings: list[Finding] = []
    try:
        for finding in acceptance.findings(config, args.least_share, args.sizes, args.soak):
            findings.append(finding)
            if not args.json:
                print(line(finding), flush=True)
    except KeyboardInterrupt:
        return findings, False
    return findings, True


def explain(code: int) -> int:
    """Print the meaning of an error code and advice. Return 1 for an unknown code."""
    from npuserve.npu.backends import explain_code

    meaning = explain_code(code)
    print(f"{code} {meaning or 'is not known here: send the file of npuserve collect'}")
    return 0 if meaning else 1


def machine() -> dict[str, Any]:
    """Return the machine and its software. memory_bytes: installed memory; `backends` has the available memory."""
    import torch

    from npuserve.npu.backends.cpu import usable_cores

    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    flags = {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": usable_cores(),
        "cpu_features": [feature for feature in CPU_FEATURES if feature in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def native(chosen: CpuKernels | None) -> dict[str, Any]:
    """Return the choice of native CPU kernels.

    isa: instruction set that they use; None if they are not installed.
    isas: instruction sets that they can use, the widest first.
    missing: wider instruction sets of this processor, for which they are not built.
    The other keys are the fields of `CpuKernels`.

    chosen: the choice for the model; None to choose for a small model, if the CPU does not compute this one.
    """
    from npuserve.kernels import native
    from npuserve.kernels.native.choice import CpuKernelSettings, choose

    if not native.available():
        return {"isa": None, "isas": []}
    library = native.library()
    return {"isas": library.isas, "missing": library.missing_isas} | asdict(chosen or choose(CpuKernelSettings()))


def backends() -> dict[str, Any]:
    """Return the properties of each device, by name.

    supported: whether this version has its code.
    available: whether this machine has the device and its software.
    memory_available_bytes, kernels: free memory, and the label of each kernel; only for available devices.
    """
    import npuserve.kernels  # noqa: F401  fills the registry
    from npuserve.kernels.registry import KernelSet
    from npuserve.npu.backends import MODULES, backend_class, present, select

    report: dict[str, Any] = {}
    for name in MODULES:
        supported = name in present()
        available = supported and backend_class(name).available()
        report[name] = {"supported": supported, "available": available}
        if available:
            backend = select(name)
            report[name]["memory_available_bytes"] = backend.memory.available()
            report[name]["kernels"] = KernelSet(backend.kernels).served_labels
    return report


def preflight(config: ServerConfig) -> list[dict[str, str]]:
    """Return the checks of the host by the devices that are available here, or that the settings name."""
    from npuserve.npu.backends import backend_class, present

    classes = [(name, backend_class(name)) for name in present()]
    return [{"device": name, **notice._asdict()} for name, cls in classes
            if name == config.device or cls.available()
            for notice in cls.preflight(captures=config.capture != "off", ranks=config.tensor_parallel_size)]


def optional() -> dict[str, bool]:
    return {name: importlib.util.find_spec(name) is not None for name in OPTIONAL}


def model(config: ServerConfig) -> dict[str, Any]:
    """Return the model's properties and its memory plan, in bytes by part. `error`: why it cannot be served.

    ranks: number of the ranks that share the model. The plan is that of each.
    cpu_kernels: choice of native CPU kernels, on which the plan depends; None if they are not used.
    """
    import torch

    from npuserve.kernels.native.choice import CpuKernelSettings
    from npuserve.npu.backends.base import BackendError, DeviceSettings
    from npuserve.npu.execution.load import buckets_up_to, open_devices
    from npuserve.npu.model.config import ModelError
    from npuserve.npu.model.layers.shard import Shard
    from npuserve.npu.model.loader import check_weights
    from npuserve.npu.model.storage import choose_kernels
    from npuserve.service.text.model_path import resolve

    folder = resolve(config.model)
    name = config.served_name or config.model or "built-in"
    report: dict[str, Any] = {"name": name, "fits": False, "missing_weights": None}
    try:
        shard = Shard(0, config.tensor_parallel_size, config.expert_parallel)
        world = read_world(config, os.environ)
        place = 0, len(world.ranks(config)) if world else shard.size
        buckets = buckets_up_to(config.max_num_seqs, config.buckets)
        backend, prefill = open_devices(
            config.device, config.relaxations if config.emulate else None, config.prefill_device,
            DeviceSettings(place, config.threads, config.state_dtype, buckets), ranks=shard.size)
        facts = served_model(config, folder, backend, prefill, shard)
        dtype: torch.dtype = getattr(torch, backend.resolve_dtype(config.dtype, facts.dtype))
        report["cpu_kernels"] = choose_kernels(
            facts, dtype, (backend, prefill), CpuKernelSettings(config.cpu_gemm, config.cpu_weights))
        missing = missing_weights(folder)
        if not missing:
            check_weights(folder, facts)
        plan = memory_plan(config, facts, backend, prefill, None if missing else folder)
    except (ModelError, BackendError) as error:
        return report | {"error": str(error)}
    return report | {
        "fits": plan.fits,
        "missing_weights": missing,
        "architecture": facts.architecture,
        "parameters": facts.num_parameters,
        "active_parameters": facts.active_parameters,
        "backend": backend.name,
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "quantization": facts.quantization_name,
        "max_model_len": plan.max_model_len,
        "context_length": facts.context_length,
        "max_num_seqs": config.max_num_seqs,
        "ranks": config.tensor_parallel_size,
        "kv_cache_tokens": plan.num_blocks * plan.block_size,
        "bytes": {part: getattr(plan, part) for part in PARTS},
        "peak_bytes": plan.peak,
        "available_bytes": plan.available,
        "kv_offload": {"bytes": plan.kv_offload, "available": plan.host_available} if plan.kv_offload else None,
        "host": asdict(plan.host) | {"needed": plan.host.needed, "fits": plan.host.fits} if plan.host else None,
    }


def served_model(
    config: ServerConfig, folder: Path, backend: Backend, prefill: Backend | None, shard: Shard
) -> ModelConfig:
    """Return the configuration of the model as it is served, with what drafts tokens. Raises as `load_runner` does."""
    from npuserve.npu.execution.load import chunk_obstacle, drafting_config, with_draft
    from npuserve.npu.execution.prefill_device import possible_mtp
    from npuserve.npu.model.config import ModelConfig

    draft = draft_folder(config)
    mtp = MTP_SETTINGS.get(config.speculate, "off")
    if prefill:
        mtp = possible_mtp(mtp, draft, prefill)
    can = backend.capabilities
    model = ModelConfig.from_folder(folder, config.lm_head_dtype, task=config.task, float8=can.float8,
                                    int4=can.int4, stacks=can.stacks, mtp=mtp).sharded(shard)
    model = with_draft(model, draft, backend)
    obstacle = chunk_obstacle(model, backend, config.dtype, config.kv_cache_dtype)
    return drafting_config(model, backend, mtp, obstacle, config.dtype)


def memory_plan(
    config: ServerConfig, model: ModelConfig, backend: Backend, prefill: Backend | None, folder: Path | None
) -> MemoryPlan:
    """Return the plan of a rank.

    folder: folder of its weights, of which a sample is read; None without weights.

    Raises the errors of `predict` and `refused_bytes`.
    """
    import torch

    from npuserve.npu.execution.memory_plan import predict
    from npuserve.npu.execution.state_store import block_bytes
    from npuserve.npu.model.loader import refused_bytes

    plan = predict(
        model, backend, dtype=config.dtype, max_model_len=config.max_model_len, block_size=config.block_size,
        kv_cache_dtype=config.kv_cache_dtype, kv_cache_memory=config.kv_cache_memory, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens, prefill=prefill, max_drafts=max_drafts(config),
        reserved=backend.communicator_bytes(model.shard.size), kv_offload_memory=config.kv_offload_memory)
    more = refused_bytes(folder, model, getattr(torch, plan.dtype), backend) if folder else 0
    cached: torch.dtype = getattr(torch, plan.kv_cache_dtype)
    return plan.grown(more, block_bytes(model, plan.block_size, cached, backend)) if more else plan


def missing_weights(folder: Path) -> str | None:
    """Return why the weights in `folder` cannot be loaded; None if all files are there."""
    from npuserve.npu.model.config import ModelError
    from npuserve.npu.model.folder import weight_files

    try:
        weight_files(folder)
    except ModelError as error:
        return str(error)
    return None


def native_text(isa: str | None, isas: list[str], missing: Sequence[str] = (), **chosen: Any) -> list[str]:
    """Return lines about the CPU kernels. isa: instruction set in use; None without native kernels."""
    from npuserve.kernels.native import unavailable_text
    from npuserve.kernels.native.choice import CpuKernels, describe, missing_text

    if isa is None:
        return [unavailable_text()]
    return describe(CpuKernels(isa, **chosen), isas) + ([missing_text(missing)] if missing else [])


def host_text(prefill: dict[str, Any] | None, offload: dict[str, int] | None) -> list[str]:
    """Return lines about host memory beside a device. prefill, offload: bytes for prompts and for evicted prefixes."""
    from npuserve.npu.execution.memory_plan import mib

    lines: list[str] = []
    if prefill:
        lines.append(f"prompts are computed on {prefill['backend']}, whose memory holds")
        lines += [f"{part.replace('_', ' '):12} {mib(prefill[part]):>12}"
                  for part in ("weights", "kv_cache", "activations", "staging")]
        lines.append(f"{'fits' if prefill['fits'] else 'does NOT fit'}: needs {mib(prefill['needed'])}, "
                     f"{mib(prefill['available'])} available")
    if offload:
        verdict = "fits" if offload["bytes"] <= offload["available"] else "does NOT fit"
        lines.append(f"evicted prefixes: {verdict}: {mib(offload['bytes'])} of host memory, "
                     f"{mib(offload['available'])} available")
    return lines


def text(report: dict[str, Any]) -> str:
    """Return the report for people."""
    from npuserve.kernels.registry import GOLDEN
    from npuserve.npu.execution.memory_plan import mib

    host = report["machine"]
    lines = [
        f"machine     {host['system']}, {host['cores']} cores, {mib(host['memory_bytes'])} of memory",
        f"cpu         {' '.join(host['cpu_features']) or 'no known feature'}",
        f"software    Python {host['python']}, torch {host['torch']}",
        "native      " + f"\n{'':12}".join(native_text(**report["native"])),
    ]
    for name, backend in report["backends"].items():
        if not backend["available"]:
            lines.append(f"{name:11} {'not available here' if backend['supported'] else 'not in this version'}")
            continue
        labels = backend["kernels"]
        implemented = [kernel for kernel, label in labels.items() if label != GOLDEN]
        golden = [kernel for kernel, label in labels.items() if label == GOLDEN]
        lines.append(f"{name:11} available, {mib(backend['memory_available_bytes'])} free")
        lines.append(f"{'':11} own kernels: {', '.join(implemented) or 'none'}")
        lines.append(f"{'':11} by plain torch: {', '.join(golden) or 'none'}")
    for notice in report.get("preflight", ()):
        name = "" if notice["said"].startswith(notice["name"]) else f"{notice['name']}: "
        lines.append(f"{notice['device']:11} {notice['level']:8} {name}{notice['said']}")
    for name, is_installed in report["optional"].items():
        lines.append(f"{'optional':11} {name}: {'found' if is_installed else 'absent'}, for {OPTIONAL[name]}")
    if report["emulated"]:
        lines.append("emulated    the device is emulated: the results below prove calls and numbers, not speed")
    plan = report["model"]
    lines.append(f"model       {plan['name']}")
    if "error" in plan:
        return "\n".join([*lines, f"{'':11} cannot be served: {plan['error']}"])
    parameters, active = (f"{plan[key] / 1e6:,.1f} M" for key in ("parameters", "active_parameters"))
    of_token = f" ({active} for a token)" if active != parameters else ""
    lines.append(
        f"{'':11} {plan['architecture']}, {parameters} parameters{of_token}, "
        f"{'' if plan['quantization'] == 'none' else plan['quantization'] + ', '}{plan['dtype']} on {plan['backend']}")
    lines.append(
        f"{'':11} {plan['max_model_len']} of {plan['context_length']} tokens of context, {plan['max_num_seqs']} "
        f"requests at once, KV cache of {plan['kv_cache_tokens']} tokens"
        f"{' in ' + plan['kv_cache_dtype'] if plan['kv_cache_dtype'] != plan['dtype'] else ''}")
    if plan["ranks"] > 1:
        lines.append(f"{'':11} {plan['ranks']} ranks share it, each with")
    lines += [f"{'':11} {part.replace('_', ' '):12} {mib(size):>12}" for part, size in plan["bytes"].items()]
    lines.append(f"{'':11} {'peak':12} {mib(plan['peak_bytes']):>12}")
    # The available memory is read when the process already exists.
    needed = plan["peak_bytes"] - plan["bytes"]["base"]
    verdict = "fits" if needed <= plan["available_bytes"] else "does NOT fit"
    free = mib(plan["available_bytes"])
    lines.append(f"{'':11} {verdict}: needs {mib(needed)} beyond the process, {free} available")
    lines += [f"{'':11} {line}" for line in host_text(plan["host"], plan["kv_offload"])]
    if plan["missing_weights"]:
        lines.append(f"{'':11} cannot be served: {plan['missing_weights']}")
    return "\n".join(lines)
