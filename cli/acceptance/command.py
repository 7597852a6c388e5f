"""Acceptance check of a device, the entry of this folder: options, and the parts in order.

1. Kernels: each kernel of the backend on its test cases, against the golden function in float64.
2. Sizes: kernels at the widths of a real model, with an LM head of 151,936 ids, in bfloat16 and int8.
3. Tokens: the model answers prompts greedily, in chunks and in changing batches. The CPU in float32 judges every token
   and every position. In float32, if the device has it, all tokens must equal the CPU's. In other dtypes, and with
   float8 layers or a quantized KV cache, the check judges the share of positions with the same argmax, and that no
   token is less likely than rounding explains. It runs twice: with overlapped steps, and with one step in flight.
4. Sampling: answers with each sampling parameter, judged by the CPU.
5. Capture: time and memory of each bucket, and its result against the same kernels one by one.
6. Contexts: captured steps at contexts from 1,000 to 1,100 and from 12,000 to 13,000, against the same kernels.
   Soak: the same with random contexts for --soak minutes.
7. Variants: tokens of the built-in model in W8A8, with an int8 LM head, with a KV cache in int8 and fp8, and with an LM
   head of 151,936 ids. For a model with linear attention, the built-in model gets such layers.
8. Latency: time of kernels and decode steps against the floor, which is the bytes that must be read by the measured
   memory bandwidth. Judged only with --least-share, and never on an emulated device.

Each finding is one line with its limit. The end of the report repeats each failed finding with the action to take. With
`--sizes quick`, the default of the CPU and of emulated devices, sizes and contexts are reduced, and their lines say so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from npuserve.cli.acceptance.report import Finding, guarded
from npuserve.service.arguments import number
from npuserve.service.config import ServerConfig
from npuserve.service.text.model_path import resolve

MAX_SOAK_MINUTES = 7 * 24 * 60.0

FATAL_FAULTS = ("engine", "node")
"""Faults after which this process can no longer use the device."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("acceptance")
    group.add_argument("--accept", action="store_true", help="run the model on the device and judge its results")
    group.add_argument("--least-share", type=number(float, 0.0, 1.0), metavar="SHARE",
                       help="minimum share of a latency that memory reads must explain (default: latencies are not "
                            "judged)")
    group.add_argument("--sizes", choices=("auto", "quick", "real"), default="auto",
                       help="quick: fewer cases at real sizes, and fewer contexts; auto: quick on the CPU and on "
                            "emulated devices, real elsewhere (default: %(default)s)")
    group.add_argument("--soak", type=number(float, 0.0, MAX_SOAK_MINUTES), default=0.0, metavar="MINUTES",
                       help="replay captured steps with random contexts for this time (default: %(default)g)")


def findings(
    config: ServerConfig, least_share: float | None, sizes: str, soak_minutes: float = 0.0
) -> Iterator[Finding]:
    """Run all parts and yield their findings. Prompts, too, are computed on the device.

    An exception becomes a finding, except ConfigError for an invalid model and BackendError for a missing device.

    least_share: minimum of floor / latency; None if latencies are not judged.
    sizes, soak_minutes: as the options.
    """
    from npuserve.cli.acceptance.kernels import check_kernels, check_sizes
    from npuserve.cli.acceptance.latency import LatencyCheck
    from npuserve.cli.acceptance.model import check_model
    from npuserve.cli.acceptance.variants import check_variants
    from npuserve.npu.backends import select
    from npuserve.npu.backends.base import DeviceSettings
    from npuserve.npu.model.config import ModelConfig

    backend = select(config.device, config.relaxations if config.emulate else None,
                     DeviceSettings(threads=config.threads, decode_buckets=config.buckets, capture_mode=config.capture))
    folder = resolve(config.model)
    facts = ModelConfig.from_folder(folder)
    latencies = LatencyCheck(config.emulate, None if config.emulate else least_share)
    quick = sizes == "quick" or (sizes == "auto" and (config.emulate or backend.device.type == "cpu"))
    for part, part_findings in (
        ("memory", latencies.bandwidth(backend)), ("kernels", check_kernels(backend)),
        ("sizes", check_sizes(backend, quick=quick)), ("kernels", latencies.kernels(backend)),
        ("latency", latencies.samplers(backend)),
        ("model", check_model(folder, backend, config, latencies, quick=quick, soak_minutes=soak_minutes)),
        ("variants", check_variants(
            backend, config.threads, hybrid=facts.has_fixed_state, experts=facts.has_experts)),
    ):
        for finding in guarded(part, "", part_findings):
            yield finding
            if finding.figures.get("fault") in FATAL_FAULTS:
                return
