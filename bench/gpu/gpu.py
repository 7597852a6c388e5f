"""All GPU checks and benchmarks in one run of a few minutes, with a report.

    python bench/gpu/gpu.py [--out DIR] [--quick] [--parts numbers,machine,...] [--model FOLDER ...] [--wheels DIR]
                            [--profile]

Needs a machine with one NVIDIA GPU, torch, triton, transformers, safetensors, numpy, and this checkout, which need not
be installed. Parts, the most important first:

    numbers    every kernel compared with its golden function in float64, on inputs seeded by the clock, with poisoned
               outputs: the shapes of Qwen3-14B in bf16, then all cases of the registry in bf16, fp32 and fp16
    machine    the GPU and its software, and the ceilings of this run: copies, reads, GEMM in bf16, int8 and fp32
    replays    100,000 replays of a captured graph beside copies to the host, with launches that depend on each other
               and without: every replay must give the same bits
    tokens     greedy answers in float32 compared with transformers on the same device, of the built-in model and of
               each --model: chunks and decode rows mixed, two steps in flight
    steps      Qwen3-14B's exact shape with random weights made on the device, in bf16, FP8 and W8A8: prefill, TPOT,
               its floor by bytes, captured and eager, two steps in flight and one, and a profile of the host's work;
               of shapes with a head for drafts (qwen3.5-*) also steps that verify 1 and 3 drafts a row and draft
    peer       transformers with a static cache in a CUDA graph at the same shape, alternating with npuserve
    attention  attention of prompts of 512 to 32,768 tokens at Qwen3-14B's heads: the kernel's configurations beside
               cuDNN and the FlashAttention of torch
    kernels    each kernel alone at Qwen3-14B's shapes
    served     `npuserve serve` through gRPC compared with the engine's own speed (bench/serving/served.py), random
               weights of Qwen3-0.6B's shape, with --budget served=240 or more also of Qwen3-14B's; needs --wheels
    goodput    `npuserve serve` of the shape with 1 and 64 streams, then with the arrivals of --trace at 1, 2, 3 and 4
               times their rate, as far as the budget lasts; needs --wheels and --trace
    candidates correctness of the other configurations of tunable kernels, which also compiles them
    sweep      the same configurations timed, and the best for each shape, as an entry of the kernels' tables

Each part has a budget in seconds (--budget PART=SECONDS); what exceeds it is listed and skipped. DIR/cuda.json and
DIR/cuda.md are rewritten with each row. Parts run in processes of their own: one that hangs or loses the device is
killed, and another continues with the rest. Several processes share numbers and candidates. Exit code 1: a number or a
token is wrong, or something failed; 2: no GPU.

With --shape qwen3.5-27b, numbers, steps and kernels measure a hybrid of linear and full attention, with
qwen3-30b-a3b and qwen3.5-35b-a3b mixtures of experts, whose floor has the bytes of the experts that as many random
tokens are expected to choose. --kinds names the forms of the weights, and has steps profile each. What has not run on a
GPU takes two calls, of 5.5 and 8 minutes:

    G="python bench/gpu/gpu.py"
    $G --out hybrid --shape qwen3.5-27b --kinds "FP8 blocks,bf16" --parts numbers,machine,steps --budget steps=200 \\
        --seconds 330

    $G --out experts --shape qwen3.5-35b-a3b --kinds "FP8 blocks" --parts numbers,machine,steps --seconds 240
    $G --out experts-30b --shape qwen3-30b-a3b --kinds "FP8 blocks" --parts machine,steps --seconds 120
    $G --out int4 --shape qwen3-14b --kinds "4 bits" --parts machine,steps --seconds 120

A checkpoint for `served` or `goodput` is written to /dev/shm if there is space (33 GB for Qwen3-14B), else among
temporary files.

--wheels: folder with the other packages that `serve` needs. They are installed from this folder only:
grpcio, grpcio_health_checking, grpcio_reflection, grpcio_status, googleapis_common_protos, protobuf, msgspec,
prometheus_client, and if missing rich, markdown_it_py, mdurl, pygments, jinja2, markupsafe, tokenizers,
huggingface_hub, typing_extensions. Without it a stub of msgspec serves the parts before `served`.

--emulate runs all parts without a GPU, on a toy shape, in Triton's interpreter; this proves function, not speed.
--device cpu does the same with the CPU's kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

BUDGETS = {"numbers": 110, "machine": 30, "replays": 30, "tokens": 45, "steps": 130, "peer": 45, "attention": 40,
           "kernels": 45, "served": 75, "goodput": 210, "candidates": 40, "sweep": 40}
"""Seconds of each part, in the order of execution."""

KINDS = "bf16", "FP8", "FP8 blocks", "W8A8", "W8A8 and head", "4 bits"
"""Forms of the weights of the part steps (gpu_parts/steps.py)."""

SHARDS = 6
"""Number of processes that share a part without timings: a kernel takes seconds to compile on one core."""

FOLDERS = {"cli": "cli", "client": "client", "common": "common", "service": "service", "npu": "npu",
           "kernels": "kernels", "v1": "protos/npuserve/v1"}


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("cuda-results"), metavar="DIR")
    add("--quick", action="store_true", help="few repetitions, few shapes")
    add("--parts", type=lambda text: text.split(","), default=list(BUDGETS), help="comma-separated (default: all)")
    add("--budget", action="append", default=[], metavar="PART=SECONDS")
    add("--seconds", type=float, default=480, help="seconds of the whole run (default: %(default)s)")
    add("--model", type=Path, action="append", default=[], metavar="FOLDER", help="for tokens; repeatable")
    add("--wheels", type=Path, metavar="DIR")
    add("--trace", type=lambda text: Path(text).resolve(), metavar="CSV", help="Azure or Mooncake trace, for goodput")
    add("--profile", action="store_true", help="write DIR/trace-*.json.gz of ten decode steps, for a trace viewer")
    add("--shape", choices=("qwen3-14b", "qwen3-0.6b", "qwen3.5-27b", "qwen3-30b-a3b", "qwen3.5-35b-a3b", "toy",
                            "toy-hybrid", "toy-experts"),
        help="for numbers, steps, peer, kernels (default: qwen3-14b)")
    add("--kinds", type=lambda text: text.split(","), metavar="KIND,...",
        help=f"for steps: some of {', '.join(KINDS)} (default: all but 4 bits)")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--emulate", action="store_true")
    add("--seed", type=int, default=time.time_ns() & 0x7FFFFFFF, help="seed of all inputs (default: from the clock)")
    add("--shards", type=int, help="processes that share numbers and candidates (default: 6 with a GPU)")
    add("--worker", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if wrong := [part for part in args.parts if part not in BUDGETS]:
        parser.error(f"--parts: {wrong[0]!r} is not one of {', '.join(BUDGETS)}")
    if wrong := [kind for kind in args.kinds or () if kind not in KINDS]:
        parser.error(f"--kinds: {wrong[0]!r} is not one of {', '.join(KINDS)}")
    args.budgets = dict(BUDGETS)
    for text in args.budget:
        part, _, seconds = text.partition("=")
        if part not in BUDGETS or not seconds.isdigit():
            parser.error(f"--budget: {text!r} is not PART=SECONDS, PART being one of {', '.join(BUDGETS)}")
        args.budgets[part] = int(seconds)
    real = args.device == "cuda" and not args.emulate
    args.shards = args.shards or (min(SHARDS, max(1, (os.cpu_count() or 1) // 2)) if real else 1)
    args.shape = args.shape or ("qwen3-14b" if real else "toy")
    return args


def links(folder: Path) -> None:
    """Link the import names, which differ from the folders', for a checkout that is not installed.

    A server asks for the package's version, so it is there, too.
    """
    (folder / "npuserve").mkdir()
    for name, source in FOLDERS.items():
        (folder / "npuserve" / name).symlink_to(ROOT / source)
    (folder / "gpu_parts").symlink_to(ROOT / "bench" / "gpu" / "gpu_parts")
    (folder / "npuserve-0.dist-info").mkdir()
    (folder / "npuserve-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: npuserve\nVersion: 0\n")


def install(wheels: Path, site: Path) -> None:
    """Install the wheels into `site`. Raises SystemExit if that fails."""
    if not (found := sorted(map(str, wheels.glob("*.whl")))):
        sys.exit(f"--wheels: {wheels} holds no wheels")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade",
         "--target", str(site), *found], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"--wheels: {wheels}: {done.stderr.strip()}")


def no_device(args: argparse.Namespace) -> str:
    """Return why the parts cannot run here, "" if they can. A child process asks torch, and frees the device."""
    if args.emulate or args.device != "cuda":
        return ""
    code = "import torch; print(torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        return f"torch cannot be imported here: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    return "" if done.stdout.strip() == "True" else (
        "torch sees no NVIDIA GPU on this machine; --emulate runs everything on a toy shape without one.")


def main(argv: list[str]) -> int:
    args = arguments(argv)
    if args.worker:
        from gpu_parts import worker

        return worker.run(args, **json.loads(args.worker))
    if said := no_device(args):
        print(said, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        links(folder)
        if args.wheels:
            install(args.wheels, folder)
        sys.path.insert(0, place)
        from gpu_parts import supervisor

        paths = [place, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1",
                                       "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, str(Path(__file__).resolve()), *argv, "--seed", str(args.seed)]
        return supervisor.run(args, command, environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
