"""The engine process: loads the model, then serves the front ends until the supervisor orders the stop.

SIGTERM ends the first engine while it loads. It is ignored afterwards, and by restarted engines: systemd and Slurm send
it to all processes of the server, and the engine must run until the front ends have drained.

    python -m npuserve.service.engine.process      started by the supervisor, which writes EngineArgs on its stdin
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from npuserve.npu.execution.pooler import Pooler
from npuserve.npu.large_import import TorchError, import_large, import_torch
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.layers.shard import Shard
from npuserve.service import clock, logs, metrics
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.engine.crash_tracker import CrashTracker
from npuserve.service.engine.kv_event_log import KvEventLog
from npuserve.service.engine.kv_event_stream import KvEventStream, first_number
from npuserve.service.engine.loop import Engine
from npuserve.service.engine.request_history import RequestHistory
from npuserve.service.ipc.engine_socket import EngineSocket
from npuserve.service.ipc.messages import ModelInfo
from npuserve.service.processes import child, process_control
from npuserve.service.ranks import faults
from npuserve.service.ranks.lead import LeadRunner
from npuserve.service.ranks.load import draft_folder, load_model, publish_kernel
from npuserve.service.ranks.processes import RankProcesses, end_with_rank
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.drafting import Drafting
from npuserve.service.scheduling.host_tier import HostTier
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.state_slots import StateSlots
from npuserve.service.scheduling.store_tier import StoreTier
from npuserve.service.speculation.speculator import Mode, Speculator
from npuserve.service.store.setup import open_store
from npuserve.service.streams.records import Records
from npuserve.service.structured_output.manager import build_compiler
from npuserve.service.text.model_folder import read_eos_ids

if TYPE_CHECKING:
    from npuserve.npu.execution.runner import Runner
    from npuserve.npu.profiling.session import Profiler
    from npuserve.service.engine.kv_event_publisher import KvEventPublisher

log = logging.getLogger("npuserve.service.engine.process")


class EngineArgs(msgspec.Struct, frozen=True):
    """Arguments of the engine process, from the supervisor.

    config: settings of the server.
    folder: folder of the model.
    address: path of the socket to bind.
    epoch: increases with each start of the engine.
    heartbeat: True to send heartbeats.
    memory: descriptor of the file in memory for the model's weights; -1 for none.
    rank_memory: descriptors of the files in memory of the other ranks of this host; empty for none.
    shared_weights: description of the files' contents by the last engine that was ready (`shared_weights`).
    kernels: CPU kernels that the first engine that was ready chose (kernels/native/choice.py), which this one keeps;
        None to choose them.
    served_name: name of the model for clients.
    start_date: Unix time of the server's start, in seconds; 0: now.
    started: the same moment, time.monotonic() seconds.
    capture_failed: why an earlier engine could not use captured steps; "" otherwise.
    capture: mode that replaces the setting then; "" otherwise.
    """

    config: ServerConfig
    folder: str
    address: str
    epoch: int
    heartbeat: bool = False
    memory: int = -1
    rank_memory: list[int] = []
    shared_weights: dict[str, Any] | None = None
    kernels: dict[str, Any] | None = None
    served_name: str = ""
    start_date: float = 0.0
    started: float = 0.0
    capture_failed: str = ""
    capture: Literal["", "decoder", "off"] = ""

    @property
    def date(self) -> float:
        """Return the Unix time in seconds, as if the clock had not been set since the server's start."""
        return self.start_date + time.monotonic() - self.started if self.start_date else clock.unix_time()

    @property
    def may_drop_captures(self) -> bool:
        """Return True if this engine captures steps and the next one may capture less."""
        return faults.may_drop_captures(self.config.capture, self.capture)


class StopOrder:
    """Order of the supervisor to stop the engine. It may arrive, in another thread, before the engine is built."""

    def __init__(self) -> None:
        self._is_given = False
        self._engine: Engine | None = None

    def give(self) -> None:
        self._is_given = True
        if self._engine:
            self._engine.stop()

    def attach(self, engine: Engine) -> None:
        """Stop this engine at the order; at once if the order was given."""
        self._engine = engine
        if self._is_given:
            engine.stop()


def build(args: EngineArgs) -> tuple[Engine, RankProcesses | None]:
    """Load the model and bind the sockets. Return the engine, and the other ranks if it has any.

    Raises the errors of `load_model`, ConfigError and TorchError.
    """
    publisher = open_publisher(args)
    import_torch()
    import_large("npuserve.npu.execution.load")
    began = time.monotonic()
    from npuserve.kernels.registry import KERNELS
    from npuserve.npu.execution.load import SharedMemory

    memory = SharedMemory(args.memory, args.shared_weights) if args.memory >= 0 else None
    if args.capture_failed:
        what = "the sampler is" if args.capture == "decoder" else "steps are"
        logs.event(log, f"{what} not captured but run kernel by kernel, which is slower", level=logging.WARNING,
                   reason=args.capture_failed)
    ranks = None
    if args.config.tensor_parallel_size > 1:
        whole = ModelConfig.from_folder(args.folder, task=args.config.task)
        shard = Shard(0, args.config.tensor_parallel_size, args.config.expert_parallel)
        whole.sharded(shard)  # checks it before ranks start
        ranks = RankProcesses(args.config, args.folder, args.rank_memory, (args.shared_weights or {}).get("ranks"))
    history = RequestHistory()

    def observe(kernel: str, phase: str, backend: str, seconds: float) -> None:
        history.observe_kernel(f"{kernel}, {phase}", seconds)
        publish_kernel(kernel, phase, backend, seconds)

    runner = load_model(args.config, args.folder, observe, memory=memory, kernels=args.kernels,
                        capture=args.capture or None, group=ranks.group if ranks else None)
    if runner.backend.capabilities.host_lengths:
        metrics.feed(metrics.lengths_lag_seconds, runner.backend.take_lengths_lags)
    if runner.config.has_experts:
        metrics.feed_gauge(metrics.expert_imbalance, runner.expert_balance.take)
    for kernel in KERNELS:
        metrics.kernel_fallback_total.labels(kernel, runner.backend_name).inc(kernel in runner.fallbacks)
    return build_engine(args, runner, publisher, began, ranks, history), ranks


def build_engine(
    args: EngineArgs,
    runner: Runner,
    publisher: KvEventPublisher | None,
    began: float,
    ranks: RankProcesses | None = None,
    history: RequestHistory | None = None,
) -> Engine:
    """Build the engine over a runner, bind its socket, and report it to the supervisor as ready.

    ranks: the other ranks of a group whose rank 0 is the runner's; None for none.
    publisher: publisher of KV events; None for none.
    began: start of the load, by time.monotonic().
    """
    config = args.config
    kv_log = KvEventLog(runner.block_size) if config.kv_events != "off" else None
    tier, root_key = tier_of(args, runner, kv_log)
    blocks = BlockManager(runner.num_blocks, runner.block_size, config.prefix_cache, kv_log, tier, root_key)
    slots = StateSlots.of(runner.num_slots, blocks)
    message_end_ids = read_eos_ids(Path(args.folder)) if slots else frozenset[int]()
    capacity = blocks.capacity
    length = min(runner.max_model_len, capacity)
    scheduler = Scheduler(
        blocks, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        max_queue=config.max_queue, aging_seconds=config.priority_aging_seconds,
        target_itl_seconds=config.target_itl_seconds, max_model_len=length,
        min_forced=runner.min_forced, slots=slots, message_end_ids=message_end_ids,
        drafting=drafting_of(config, runner), tier=tier)
    model = ModelInfo(
        family=runner.config.architecture, vocabulary_size=runner.config.vocab_size,
        max_model_len=length, dtype=runner.dtype_name,
        quantization=runner.config.quantization_name,
        kv_cache_dtype=str(runner.cache_dtype).removeprefix("torch."), backend=runner.backend_name,
        max_num_seqs=config.max_num_seqs, max_queue=config.max_queue, kv_cache_tokens=capacity,
        parameters=runner.parameters, deterministic=runner.deterministic,
        task=runner.config.pooling.task if runner.config.pooling else "generate",
        embedding_dimension=runner.config.embedding_dimension)
    crashes = CrashTracker(f"{args.address}.steps", config.max_num_seqs, 4 * (config.max_num_seqs + config.max_queue),
                           on_killer=lambda: child.report("killer"))
    kv_events = KvEventStream(
        kv_log, runner.block_size, args.epoch, config.kv_events_buffer, first_number(args.date),
        publisher=publisher) if kv_log else None
    socket = EngineSocket(args.address)
    lead = LeadRunner(runner, ranks.group) if ranks else runner
    profiler = open_profiler(args, runner, socket)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = Engine(scheduler, lead, socket, model, args.epoch, config.double_buffering,
                    child.Heartbeat(args.heartbeat), Records(config.resume_seconds),
                    frontends=config.frontends if args.epoch > 1 else 0,
                    crashes=crashes, kv_events=kv_events,
                    build_compiler=partial(build_compiler, Path(args.folder), runner.config.vocab_size),
                    profiler=profiler, on_idle=ranks.check if ranks else None,
                    pooler=Pooler.of(runner.config, args.folder), history=history)
    if publisher and kv_events:
        publisher.start(kv_events.first, socket.wake)
    seconds = time.monotonic() - began
    logs.event(log, "engine ready", level=logging.DEBUG, seconds=round(seconds, 3), epoch=args.epoch)
    child.report("ready", seconds=seconds, kv_cache_tokens=capacity, backend=runner.backend_name,
                 shared_weights=shared_weights(runner, ranks), kernels=cpu_kernels(runner, args.kernels))
    return engine


def tier_of(args: EngineArgs, runner: Runner, kv_log: KvEventLog | None) -> tuple[HostTier | None, bytes | None]:
    """Return the index of the runner's host memory, and the key of the digests of blocks; None for those it lacks.

    Raises ConfigError if a store is set that cannot be used.
    """
    host = runner.host_blocks
    if host is None:
        return None, None
    folders = [folder for folder in (args.folder, draft_folder(args.config)) if folder]
    opened = open_store(args.config, folders, runner, host, is_first=args.epoch == 1)
    store = StoreTier(opened.client, host, opened.max_saves) if opened else None
    return HostTier(host.describe(), host.take_ended_loads, kv_log, store), opened.root_key if opened else None


MODES: Mapping[str, Mode] = {"auto": "auto", "suffix": "suffix", "mtp": "mtp"}
"""Setting `speculate` -> mode; a folder is that of a model that drafts."""


def drafting_of(config: ServerConfig, runner: Runner) -> Drafting:
    """Return the drafting of speculative decoding; without drafts, and with a log line, where the model has none."""
    if config.draft_depth != ServerConfig().draft_depth and not runner.predicts:
        reason = "no head of the model and no smaller model drafts"
        logs.event(log, "draft_depth has no effect", level=logging.WARNING, reason=reason)
    if config.speculate == "off":
        return Drafting()
    if not runner.max_drafts:
        reason = "the device computes rows with drafts slowly, or max_num_seqs leaves no tokens of a step to them"
        logs.event(log, "speculate has no effect", level=logging.WARNING, reason=reason)
        return Drafting(obstacle="device")
    has_state = runner.num_slots > 0
    mode = MODES.get(config.speculate, "model")
    depth = config.draft_depth if runner.predicts else 0
    speculator = Speculator(mode, recomputes=has_state, depth=depth)
    limit = runner.max_drafted_samples if depth else None
    if limit is not None and limit < config.max_num_seqs:
        logs.event(log, "no drafts of the head or smaller model in steps of more rows", level=logging.WARNING,
                   rows=limit, max_num_seqs=config.max_num_seqs)
    return Drafting(
        speculator, runner.max_drafts, overlaps=config.double_buffering,
        state_block_size=runner.block_size if has_state else 0,
        max_drafted_samples=limit)


def shared_weights(runner: Runner, ranks: RankProcesses | None) -> dict[str, Any] | None:
    """Return the description of the weights in memory, also of this host's ranks; None if none are kept."""
    if runner.shared_weights is None:
        return None
    return {**runner.shared_weights, **({"ranks": ranks.shared_weights()} if ranks else {})}


def open_profiler(args: EngineArgs, runner: Runner, socket: EngineSocket) -> Profiler | None:
    """Return the profiler; None without profile_dir, and in a restarted engine whose folder has become unusable.

    Raises ConfigError for an unusable folder at the server's start.
    """
    config = args.config
    if not config.profile_dir:
        return None
    from npuserve.npu.profiling.session import Profiler
    from npuserve.npu.profiling.trace_folder import TraceFolder

    try:
        folder = TraceFolder(Path(config.profile_dir))
    except OSError as error:
        reason = f"profile_dir: {config.profile_dir} cannot be used: {error.strerror or error}"
        if args.epoch == 1:
            raise ConfigError(reason) from None
        logs.event(log, "profiles are off until the next start of the engine", level=logging.ERROR, error=reason)
        return None
    return Profiler(runner, folder, socket.wake)


def open_publisher(args: EngineArgs) -> KvEventPublisher | None:
    """Bind the sockets of KV events over ZeroMQ; None if they are off. Raises ConfigError, also without pyzmq."""
    if args.config.kv_events != "zmq":
        return None
    from npuserve.service.engine.kv_event_publisher import KvEventPublisher, topic_of

    return KvEventPublisher(
        args.config.kv_events_endpoint, args.config.kv_events_replay_endpoint, topic_of(args.served_name))


def cpu_kernels(runner: Runner, kept: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Log the CPU kernels, and export them to the metrics page. Return them as JSON values; None without CPU kernels.

    kept: the choice of an earlier engine.
    """
    chosen = runner.cpu_kernels
    if chosen is None:
        return None
    from npuserve.kernels.native import library
    from npuserve.kernels.native.choice import describe, missing_text

    kernels = dataclasses.asdict(chosen)
    metrics.cpu_kernels_info.labels(chosen.isa, chosen.gemm, chosen.weights).set(1)
    for isa, rates in chosen.gflops.items():
        for numbers, rate in rates.items():
            metrics.cpu_peak_flops.labels(isa, numbers).set(1e9 * rate)
    said, *measured = describe(chosen)
    logs.event(log, said, kept=kernels == kept, measured="; ".join(measured))
    if missing := library().missing_isas:
        logs.event(log, missing_text(missing), level=logging.WARNING)
    return kernels


def main() -> int:
    args = child.read_arguments(EngineArgs)
    process_control.set_dumpable(args.config.debuggable)
    logs.setup(args.config, "engine")
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal; the supervisor handles them
        signal.signal(number, signal.SIG_IGN)
    if args.epoch > 1:  # streams may wait for it
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # see ChildProcess
    stop_order = StopOrder()
    child.listen(lambda _: stop_order.give())
    try:
        return serve(args, stop_order)
    except Exception as error:
        end_with_rank()
        return faults.fault_code(error, args.may_drop_captures)


def serve(args: EngineArgs, stop_order: StopOrder) -> int:
    """Run the engine until the order to stop. Return the exit code."""
    try:
        engine, ranks = build(args)
    except TorchError as error:
        return child.report_unusable(error)
    except (ConfigError, ValueError, OSError, MemoryError) as error:
        return faults.start_code(error, args.may_drop_captures)
    stop_order.attach(engine)
    process_control.request_slice()  # for this thread; the compute threads exist already
    gc.freeze()  # these objects stay: garbage collections between two steps skip them
    engine.run()
    if ranks:
        ranks.stop()
    engine.profiles.close()
    engine.structured_output.close()
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # skip the interpreter's finalization of torch, which takes a second or more
