"""Loading of a model into a runner, from its files or from memory that outlives the engine process.

The supervisor holds the memory file of the weights and passes it to each engine process, with the description
(`describe`) that the last ready process gave. If the model's files, the kernels, their instruction set and the form of
the weights are unchanged, the new process follows the described plan and reuses the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from npuserve.kernels import native
from npuserve.kernels.collectives import ALONE, Ranks
from npuserve.kernels.native.choice import AUTO, CpuKernels, CpuKernelSettings
from npuserve.kernels.registry import Observe
from npuserve.npu.backends import select, select_prefill
from npuserve.npu.backends.base import Backend, BackendError, CaptureMode, DeviceSettings
from npuserve.npu.execution.activations import rotary_bytes
from npuserve.npu.execution.decoder import MAX_LOGITS_BYTES
from npuserve.npu.execution.memory_plan import MeasuredMemory, MemoryPlan, mib, predict
from npuserve.npu.execution.prefill_device import possible_mtp
from npuserve.npu.execution.runner import Runner
from npuserve.npu.execution.state_store import block_bytes
from npuserve.npu.model.config import HeadDtype, ModelConfig, ModelError, MtpSetting
from npuserve.npu.model.folder import weight_files
from npuserve.npu.model.layers.shard import Shard
from npuserve.npu.model.loader import load_weights, report_ignored_head
from npuserve.npu.model.pooling import TaskSetting
from npuserve.npu.model.progress import Progress
from npuserve.npu.model.storage import choose_kernels, stored_bytes
from npuserve.npu.model.weights import ModelWeights

if TYPE_CHECKING:
    from npuserve.npu.parallel import Group

log = logging.getLogger(__name__)


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


def load_runner(
    folder: Path | str, *, backend: str = "auto", dtype: str = "auto", max_model_len: int = 0, block_size: int = 0,
    kv_cache_dtype: str = "auto", state_dtype: str = "auto", kv_cache_memory: int = 0, max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512, kernel_sampling: int = 0, observe: Observe | None = None, threads: int = 0,
    emulate: Sequence[str] | None = None, decode_buckets: Sequence[int] = (), prefill_device: str = "same",
    lm_head_dtype: HeadDtype = "auto", int8_levels: float = 0, progress: Progress | None = None,
    memory: SharedMemory | None = None, cpu: CpuKernelSettings = AUTO, capture: CaptureMode = "auto",
    capture_chunks: bool = True, cpu_binding: Literal["auto", "off"] = "off", group: Group | None = None,
    max_drafts: int = 0, task: TaskSetting = "auto", expert_parallel: bool = False, mtp: MtpSetting = "off",
    draft: Path | str = "", draft_depth: int = 3, kv_offload_memory: int = 0,
) -> Runner:
    """Load the model in `folder`. Zeros select the default of `predict`, whose plan is followed.

    backend, emulate: see `select`.
    threads, state_dtype, decode_buckets, int8_levels, capture (capture_mode), capture_chunks: see `DeviceSettings`.
    prefill_device, lm_head_dtype, task, mtp: see `select_prefill`, `ModelConfig`, `read_pooling` and `possible_mtp`.
    kernel_sampling, observe, max_drafts, kv_offload_memory: see `Runner`.
    draft_depth: most tokens that are drafted after a row. With `mtp` "auto" any smaller number may be.
    progress: called with (bytes done, total bytes) while the weights are read; None shows progress on stderr.
    memory: shared memory file for the weights, if the backend supports it. It may already contain them. Each rank of a
        group has its own.
    cpu: requested CPU kernels.
    cpu_binding: "auto" calls `Backend.bind_threads`, unless prompts are computed on the host.
    group: ranks that share the model. Each calls this function. None: load the whole model.
    expert_parallel: each rank has whole experts (`Shard.whole_experts`).
    draft: folder of a smaller model that drafts tokens; "" for none.

    Raises ModelError for a model or settings that cannot be served, BackendError for an unavailable device or dtype.
    """
    num_ranks, place = (group.size, group.place) if group else (1, (0, 1))
    settings = DeviceSettings(
        place=place, threads=threads, state_dtype=state_dtype,
        decode_buckets=buckets_up_to(max_num_seqs, decode_buckets),
        capture_mode=_agreed(capture, group) if group else capture, capture_chunks=capture_chunks,
        int8_levels=int8_levels)
    device, host = open_devices(backend, emulate, prefill_device, settings, ranks=num_ranks)
    _preflight(device, num_ranks)
    if host:
        mtp = possible_mtp(mtp, draft, host)
        memory = None  # `describe` has no plan of a host
        cpu_binding = "off"  # prompts need all cores
    config = _config(folder, lm_head_dtype, task, device, group, expert_parallel=expert_parallel, mtp=mtp)
    config = with_draft(config, draft, device)
    obstacle = chunk_obstacle(config, device, dtype, kv_cache_dtype)
    if group and not group.minimum(int(not obstacle))[0]:
        obstacle = obstacle or "another rank captures none"
    config = drafting_config(config, device, mtp, obstacle, dtype)
    chosen = _choose_kernels(config, dtype, device, host, cpu, group)
    ranks = _ranks(group, device, config, dtype, max_num_seqs + max_drafts, max_num_batched_tokens)
    device.memory.wait()
    kept = memory.plan(Path(folder)) if memory else None
    planned = partial(
        predict, config, device, dtype=dtype, max_model_len=max_model_len, block_size=block_size,
        kv_cache_dtype=kv_cache_dtype, kv_cache_memory=kv_cache_memory, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, prefill=host, max_drafts=max_drafts,
        kv_offload_memory=kv_offload_memory)
    measures = device.capabilities.measures_memory and not (host or kv_cache_memory)
    with device.memory.sharing(memory.file, filled=kept is not None) if memory else nullcontext(False) as shared:
        plan = kept if shared and kept else planned()
        if plan is not kept:
            (replace(plan, kv_cache=0, fixed_state=0, activations=0, logits=0) if measures else plan).require_fit()
            report_ignored_head(folder, config)
        if group:
            group.minimum(0)  # wait until all ranks have read the free memory
        weights = load_weights(folder, config, getattr(torch, plan.dtype), device, progress, loaded=plan is kept)
    drafting = _load_draft(draft, config, weights, device, progress)
    build = partial(
        Runner, device, weights, config, block_size=plan.block_size, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, kv_cache_dtype=kv_cache_dtype, ranks=ranks,
        max_drafts=max_drafts, draft=drafting, capture_chunks=not obstacle,
        draft_depths=range(draft_depth + 1) if mtp == "auto" and not drafting else (0, draft_depth))
    if measures:
        length = max_model_len or config.context_length
        measured = _measured(device, config, weights, build, plan, length, max_num_batched_tokens)
        plan = planned(measured=measured)
        plan.require_fit()
    unplanned = 0  # a kept plan has these bytes
    if plan is not kept:
        unplanned = sum(model.unplanned_bytes for model in (weights, drafting) if model)
    plan = _completed(plan, unplanned, config, device, group)
    runner = build(
        num_blocks=plan.num_blocks, num_slots=plan.num_slots, max_model_len=plan.max_model_len,
        kernel_sampling=kernel_sampling, observe=observe,
        prefill=(host, load_weights(folder, config.headless, weights.dtype, host, progress)) if host else None,
        shared_weights=describe(Path(folder), plan) if shared and not weights.unplanned_bytes else None,
        cpu_kernels=chosen, kv_offload_memory=kv_offload_memory)
    if group:
        group.minimum(0)  # wait until all ranks have captured their steps; raises RuntimeError if one could not
    if cpu_binding == "auto" and (said := device.bind_threads()):
        log.info("%s", said)
    runner.map_cache()
    return runner


def _config(
    folder: Path | str, lm_head_dtype: HeadDtype, task: TaskSetting, device: Backend, group: Group | None,
    *, expert_parallel: bool, mtp: MtpSetting,
) -> ModelConfig:
    """Return the configuration of the part of the model that this process computes on the device."""
    shard = Shard(group.rank, group.size, expert_parallel) if group else Shard(whole_experts=expert_parallel)
    can = device.capabilities
    return ModelConfig.from_folder(
        folder, lm_head_dtype, task=task, float8=can.float8, int4=can.int4, stacks=can.stacks, mtp=mtp).sharded(shard)


def with_draft(config: ModelConfig, draft: Path | str, device: Backend) -> ModelConfig:
    """Return the configuration with that of a smaller model that drafts. draft: its folder; "" for none."""
    if not draft:
        return config
    can = device.capabilities
    smaller = config.draft_from_folder(draft, float8=can.float8, int4=can.int4)
    return config.with_draft(smaller.sharded(replace(config.shard, whole_experts=False)))


def _load_draft(
    folder: Path | str, config: ModelConfig, weights: ModelWeights, device: Backend, progress: Progress | None
) -> ModelWeights | None:
    """Return the weights of the smaller model, or EAGLE-3 head, in a folder; None without one.

    weights: of the served model, whose embedding an EAGLE-3 head may share.
    """
    if config.draft is None:
        return None
    return load_weights(folder, config.draft, weights.dtype, device, progress, embedding=weights.embedding)


def chunk_obstacle(config: ModelConfig, device: Backend, dtype: str, kv_cache_dtype: str) -> str:
    """Return why steps of any rows are not captured where steps are; "" if they are."""
    resolved: torch.dtype = getattr(torch, device.resolve_dtype(dtype, config.dtype))
    if not device.settings.capture_chunks:
        return "capture_chunks is off"
    if not device.captures_chunks(device.cache_dtype(kv_cache_dtype, resolved)):
        return f"kv_cache_dtype is {kv_cache_dtype}"
    reading = config.kernels_where(lambda kernel, sizes: device.reads_host_lengths(kernel, sizes, resolved))
    return f"{device.name} lacks operators of {', '.join(sorted(reading))}" if reading else ""


def drafting_config(
    config: ModelConfig, device: Backend, mtp: MtpSetting, obstacle: str, dtype: str
) -> ModelConfig:
    """Return the configuration with what drafts tokens on a device.

    An MTP head is left out where the device captures decode rows and not rows with drafts. It has an LM head of its own
    in int8 where that is faster: each draft reads it, and an answer does not depend on it.

    obstacle: `chunk_obstacle`. Raises BackendError there for `mtp` "on", and for a smaller model that drafts.
    dtype: of the activations. Drafts in float32 are exact.
    """
    drafts = config.mtp or config.draft
    if not (drafts and obstacle and device.settings.capture_mode != "off" and device.capabilities.padding_blocks):
        is_rounded = device.capabilities.rounds_draft_head and device.resolve_dtype(dtype, config.dtype) != "float32"
        return replace(config, draft_head_dtype="int8") if config.mtp and is_rounded else config
    reason = f"rows with drafts are not captured, since {obstacle}, and would take much longer than decode rows"
    if config.draft or mtp == "on":
        what = "a model that drafts" if config.draft else "mtp"
        raise BackendError(f"speculate: {what} is not possible on {device.name}: {reason}; possible are off and auto")
    log.info("the model's head for multi-token prediction is not loaded: %s", reason)
    return config.without_mtp()


def _agreed(capture: CaptureMode, group: Group) -> CaptureMode:
    """Return the least of the ranks' modes: an earlier failure to capture is known only to the ranks of its host."""
    modes: tuple[CaptureMode, ...] = ("off", "decoder", "auto", "on")
    agreed = modes[group.minimum(modes.index(capture))[0]]
    if agreed != capture:
        what = "sampler and drafting run" if agreed == "decoder" else "steps run"
        log.warning("%s kernel by kernel, which is slower: another rank could not use captured steps", what)
    return agreed


def _measured(
    device: Backend, config: ModelConfig, weights: ModelWeights, build: Callable[..., Runner], plan: MemoryPlan,
    length: int, max_tokens: int,
) -> MeasuredMemory:
    """Measure the memory of the largest step and of captured steps, by a runner whose cache holds no more.

    build: builds a runner from its cache's sizes. length: longest context, which bounds the memory of attention.

    Raises ModelError if the step does not fit.
    """
    cache_bytes = 0

    def work() -> None:
        nonlocal cache_bytes
        runner = build(
            num_blocks=-(-max_tokens // plan.block_size), num_slots=min(plan.num_slots, 2), max_model_len=length)
        cache_bytes = runner.cache_bytes
        runner.compute_largest_step()

    try:
        excess = device.memory.excess_bytes(work)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"a step of {max_tokens} tokens does not fit the memory that the weights leave; a smaller "
            "max_num_batched_tokens, max_num_seqs or dtype takes less") from error
    step = max(excess - cache_bytes - rotary_bytes(config, length), 0)
    log.info("the largest step, its buffers and captured steps take %s of %s; predicted were %s for the step alone",
             mib(step), device.name, mib(plan.activations + plan.logits))
    available = device.memory.available() + stored_bytes(config, weights.dtype, device) + weights.unplanned_bytes
    return MeasuredMemory(available, step)


def _completed(
    plan: MemoryPlan, unplanned: int, config: ModelConfig, device: Backend, group: Group | None
) -> MemoryPlan:
    """Return the plan with the weights that could not be compacted, and with the smallest KV cache of the ranks.

    unplanned: bytes of these weights that the plan lacks.

    Raises ModelError if it does not fit.
    """
    cached: torch.dtype = getattr(torch, plan.kv_cache_dtype)
    block = block_bytes(config, plan.block_size, cached, device)
    if unplanned:
        plan = plan.grown(unplanned, block)
        plan.require_fit()
    if group is None:
        return plan
    num_blocks, max_model_len, num_slots = group.minimum(plan.num_blocks, plan.max_model_len, plan.num_slots)
    return replace(plan.shrunk(num_blocks, max_model_len, block), num_slots=num_slots)


def _choose_kernels(
    config: ModelConfig, dtype: str, device: Backend, host: Backend | None, cpu: CpuKernelSettings,
    group: Group | None,
) -> CpuKernels | None:
    """Choose the CPU kernels; of a group, rank 0 chooses for all."""
    if group and group.rank and (chosen := msgspec.json.decode(group.broadcast())):
        cpu = replace(cpu, kept=CpuKernels(**chosen))
    resolved: torch.dtype = getattr(torch, device.resolve_dtype(dtype, config.dtype))
    kernels = choose_kernels(config, resolved, (device, host), cpu)
    if group and group.rank == 0:
        group.broadcast(msgspec.json.encode(kernels))
    return kernels


def _ranks(
    group: Group | None, device: Backend, config: ModelConfig, dtype: str, max_samples: int, max_tokens: int
) -> Ranks:
    """Return the group for the kernels of a runner, whose memory is then no longer free."""
    if group is None:
        return ALONE
    resolved: torch.dtype = getattr(torch, device.resolve_dtype(dtype, config.dtype))
    can = device.capabilities
    rows = min(max_samples, max_tokens)
    width = config.padded_vocabulary(can.vocabulary_tile) // group.size
    hidden = max(config.hidden_size, config.draft.hidden_size if config.draft else 0)
    largest = max(max_tokens * hidden, rows * width) * resolved.itemsize
    ranks = group.ranks(can.collectives, device.device, max(largest, MAX_LOGITS_BYTES), shared=can.shares_memory,
                        reduces=can.reduces)
    device.synchronize()
    return ranks


def buckets_up_to(max_num_seqs: int, decode_buckets: Sequence[int]) -> tuple[int, ...]:
    """Return the row counts up to max_num_seqs, or max_num_seqs if all are larger; () for none."""
    if not decode_buckets:
        return ()
    return tuple(rows for rows in decode_buckets if rows <= max_num_seqs) or (max_num_seqs,)


def open_devices(
    backend: str, emulate: Sequence[str] | None, prefill_device: str, settings: DeviceSettings, *, ranks: int
) -> tuple[Backend, Backend | None]:
    """Start the device and, if prompts are computed on the host, the host's backend.

    ranks: number of ranks that share the model.
    The other parameters are as for `load_runner`. Raises BackendError.
    """
    device = select(backend, emulate, settings)
    device.check_ranks(ranks)
    host = select_prefill(prefill_device, device)
    if host and ranks > 1:
        raise BackendError(f"prefill_device: {prefill_device} is not possible with a tensor_parallel_size above 1")
    return device, host


def _preflight(device: Backend, ranks: int) -> None:
    """Check the device's host, and log the warnings. Raises BackendError if it cannot serve."""
    for notice in device.preflight(captures=device.settings.capture_mode != "off", ranks=ranks):
        if notice.level == "error":
            raise BackendError(notice.said)
        if notice.level == "warning":
            log.warning("%s", notice.said)


def describe(folder: Path, plan: MemoryPlan) -> dict[str, Any]:
    """Return the JSON value that identifies the weights, for `SharedMemory` of the next process. plan: without host."""
    return {"model": _stamp(folder), "plan": asdict(plan)}


def _stamp(folder: Path) -> list[Any]:
    files = [(path, path.stat()) for path in (folder / "config.json", *weight_files(folder))]
    made_by: list[str] = [torch.__version__]
    if native.available():
        lib = native.library()
        made_by += [lib.source, lib.isas[lib.isa], "compact" if lib.compact else "plain"]
    return [[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in files] + made_by
