"""The engine process: loads the model, then serves the front ends until it is told to stop.

    python -m npuserve.service.engine_process      started by the supervisor, which writes EngineArgs on its stdin
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from npuserve.service import child, logs, metrics
from npuserve.service.block_manager import BlockManager
from npuserve.service.config import ServerConfig
from npuserve.service.engine import Engine
from npuserve.service.engine_socket import EngineSocket
from npuserve.service.messages import ModelInfo
from npuserve.service.scheduler import Scheduler

if TYPE_CHECKING:
    from npuserve.kernels.registry import Observe
    from npuserve.npu.runner import Runner

log = logging.getLogger("npuserve.service.engine_process")


class EngineArgs(msgspec.Struct, frozen=True):
    """config: the server's. folder: of the model. address: to bind. epoch: rises with each start of the engine."""

    config: ServerConfig
    folder: str
    address: str
    epoch: int


def load_model(config: ServerConfig, folder: str, observe: Observe | None = None) -> Runner:
    """The model on its device. observe: is told its kernels' latencies; None: the metrics page. Raises ValueError,
    OSError or MemoryError where the model, the settings or this machine are at fault."""
    from npuserve.npu.runner import load_runner

    def publish(kernel: str, phase: str, backend: str, seconds: float) -> None:
        metrics.tally(metrics.kernel_latency_seconds, kernel, phase, backend).observe(seconds)

    return load_runner(
        Path(folder), backend=config.device, dtype=config.dtype, max_model_len=config.max_model_len,
        block_size=config.block_size, kv_cache_memory=config.kv_cache_memory, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens, kernel_sampling=config.kernel_sampling,
        observe=observe or publish, threads=config.threads,
        emulate=config.relaxations if config.emulate else None, decode_buckets=config.buckets,
        prefill_device=config.prefill_device)


def build(args: EngineArgs) -> Engine:
    """Load the model and bind the socket. Raises what `load_model` does."""
    from npuserve.kernels.registry import KERNELS

    began = time.monotonic()
    config = args.config
    runner = load_model(config, args.folder)
    for kernel in KERNELS:
        metrics.kernel_fallback_total.labels(kernel, runner.backend_name).inc(kernel in runner.fallbacks)
    scheduler = Scheduler(
        BlockManager(runner.num_blocks, runner.block_size, config.prefix_cache), max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens, max_queue=config.max_queue,
        aging_seconds=config.priority_aging_seconds)
    capacity = scheduler.blocks.capacity
    model = ModelInfo(
        family=runner.config.architecture, vocabulary_size=runner.config.vocab_size,
        max_model_len=min(runner.max_model_len, capacity), dtype=runner.dtype_name, quantization="none",
        kv_cache_dtype=runner.dtype_name, backend=runner.backend_name, max_num_seqs=config.max_num_seqs,
        max_queue=config.max_queue, kv_cache_tokens=capacity, parameters=runner.parameters,
        deterministic=runner.deterministic)
    engine = Engine(scheduler, runner, EngineSocket(args.address), model, args.epoch, config.double_buffering)
    seconds = time.monotonic() - began
    logs.event(log, "engine ready", seconds=round(seconds, 3), epoch=args.epoch, kv_cache_tokens=capacity)
    child.report("ready", seconds=seconds, kv_cache_tokens=capacity, backend=runner.backend_name)
    return engine


def main() -> int:
    args = child.read_arguments(EngineArgs)
    logs.setup(args.config, "engine")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child.on_parent_death(lambda: os._exit(1))
    try:
        return serve(args)
    except Exception as error:
        code = fault_code(error)
        if code is None:
            raise
        return code


def fault_code(error: Exception) -> int | None:
    """The exit code for an error of the device, which is logged; None for any other error."""
    from npuserve.npu.backends import fault
    from npuserve.npu.backends.base import Fault

    found = fault(error)
    if found is None:
        return None
    logs.event(log, "device fault", level=logging.CRITICAL, fault=found.value, error=str(error))
    return child.NODE_FAULT if found is Fault.NODE else child.DEVICE_FAULT


def serve(args: EngineArgs) -> int:
    """Until the engine is told to stop."""
    try:
        engine = build(args)
    except (ValueError, OSError, MemoryError) as error:
        print(f"npuserve: {error}", file=sys.stderr)
        return child.UNUSABLE
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    gc.freeze()  # what is here stays: no collection need look at it between two steps
    engine.run()
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # at once: the interpreter would take torch apart first, for a second or more
