"""Debug mode of `npuserve bench step`: finds the wrong kernel of a step (cli/bench/kernel_calls.py).

One prompt step and one decode step are run through the first --layers layers and the LM head of --lm-head. They have as
many rows as the first value of --batch, and prompts as long as the first value of --prompt. Each kernel call is one
line of output. The exit code is 1 if a call exceeds its tolerance, or if the captured step has other hidden states.
One process computes the whole model, also with --tensor-parallel-size.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

from npuserve.service.arguments import number
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.text.model_path import resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "debugging", "These options replace the timing: each kernel call of one prompt step and one decode step, with "
        "the first values of --batch and --prompt, is compared with its golden function.").add_argument
    add("--layers", type=number(int, 1), metavar="N", help="run only the first N layers")
    add("--lm-head", choices=("full", "skip", "single"),
        help="compute logits of all rows (default), of no row, or of a single row")
    add("--dump", type=Path, metavar="DIR", help="write all results to DIR/STEP/INDEX-KERNEL.safetensors")


def run(args: argparse.Namespace, config: ServerConfig) -> int:
    """Return 1 if a result is wrong, otherwise 0.

    Raise ConfigError if the model cannot be loaded this way, or if --dump is no folder.
    """
    from npuserve.cli.bench.kernel_calls import Call, Trace, load
    from npuserve.kernels.native.choice import CpuKernelSettings

    rows = args.batch[0]
    prompt = args.prompt[0]
    try:
        model, backend = load(
            resolve(config.model), backend=config.device, dtype=config.dtype, threads=config.threads,
            max_model_len=prompt + 1, layers=args.layers or 0,
            emulate=config.relaxations if config.emulate else None, lm_head_dtype=config.lm_head_dtype,
            cpu=CpuKernelSettings(config.cpu_gemm, config.cpu_weights))
        trace = Trace(model, backend, rows, prompt, args.lm_head or "full", args.dump, config.kv_cache_dtype,
                      config.block_size)
        if args.dump:
            args.dump.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError, MemoryError) as error:
        raise ConfigError(str(error)) from error
    if not args.json:
        print(f"{'step':8}{'index':>6}  {'kernel':24}{'shape':20}{'difference':>12}{'relative':>12}{'drift':>12}")
    wrong = []
    for result in trace.run():
        if args.json:
            row = {"kind": type(result).__name__.lower(), **asdict(result)}
            print(json.dumps({key: _plain(value) for key, value in row.items()}), flush=True)
        if isinstance(result, Call):
            line = (f"{result.step:8}{result.index:6}  {result.kernel:24}{'x'.join(map(str, result.shape)):20}"
                    f"{result.difference:12.2e}{result.relative:12.2e}{result.drift:12.2e}{'  WRONG' * result.wrong}")
            wrong += [f"{result.step} {result.index} {result.kernel}"] * result.wrong
        else:
            line = (f"{result.step:8}captured: {'the same' if result.same else 'OTHER'} hidden states, "
                    f"{result.seconds * 1e3:.3f} ms, of which kernels {result.in_kernels * 1e3:.3f} ms")
            wrong += [] if result.same else [f"{result.step} as captured"]
        if not args.json:
            print(line, flush=True)
    if wrong and not args.json:
        print(f"first wrong: {wrong[0]}; {len(wrong)} in all")
    return 1 if wrong else 0


def _plain(value: object) -> object:
    """Return the value for JSON, which has no infinity: it is the string inf."""
    return str(value) if value == math.inf else value
