"""Trace of a step's kernel calls, to find the first kernel with wrong results.

1. A prompt step and a decode step of random tokens run on golden functions only.
2. The same steps run on the backend's kernels. The results of each call are compared with the golden function's results
   for the same arguments, and with the results of the first pass.
3. The same steps run as the backend captures them. Their hidden states must be bit-identical.

A step can be shortened to the first layers, run without LM head, or compute the logits of one row only.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from npuserve.cli.bench.differences import difference_of, relative_of, tolerance_of
from npuserve.cli.bench.taps import Args, Results, Tap, TappedKernels, cloned, golden_tap, results_of
from npuserve.kernels.native.choice import AUTO, CpuKernelSettings
from npuserve.kernels.registry import GOLDEN, KERNELS, Implementation, KernelSet, Span
from npuserve.npu.backends import select
from npuserve.npu.backends.base import Backend, Captured, CaptureError, DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.batch import Batch, BatchBuffers, make_batch
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.memory_plan import resolve_block_size
from npuserve.npu.execution.state_store import StateStore
from npuserve.npu.model.config import HeadDtype, ModelConfig, ModelError
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.storage import choose_kernels
from npuserve.npu.step import Row

log = logging.getLogger(__name__)

LmHead = Literal["full", "skip", "single"]

REPLAYS = 5
"""Replays that are timed."""


@dataclass(frozen=True, slots=True)
class Call:
    """Kernel call compared with its golden function.

    step: "prompt" or "decode".
    index: number of the call in its step.
    shape: shape of the first result.
    difference: largest absolute difference.
    relative: largest `relative_of` of the results.
    drift: largest `relative_of` to the results of the golden pass.
    wrong: `relative` exceeds the tolerance.
    """

    step: str
    index: int
    kernel: str
    shape: tuple[int, ...]
    difference: float
    relative: float
    drift: float
    wrong: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """Replay of a captured step.

    same: its hidden states are bit-identical to the result of the single calls.
    seconds: median time of the decoder.
    in_kernels: sum of the kernels' times; 0 if they cannot be timed.
    """

    step: str
    same: bool
    seconds: float
    in_kernels: float


@dataclass(frozen=True)
class Trace:
    """Trace of `rows` requests with prompts of `prompt` tokens.

    lm_head: compute the logits of all rows ("full"), of none ("skip"), or of the first row ("single").
    dump: folder for files STEP/INDEX-KERNEL.safetensors; None writes no files. Each has the `Results` of a call, of the
        golden function for the same arguments (prefix "golden.") and of the golden pass (prefix "pass."). Caches are in
        the golden layout.
    kv_cache_dtype: "auto", "int8" or "fp8".
    block_size: tokens of a KV-cache block; 0 for the backend's default.
    """

    model: Model
    backend: Backend
    rows: int
    prompt: int
    lm_head: LmHead
    dump: Path | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 0

    def __post_init__(self) -> None:
        """Raise ModelError or BackendError if the backend does not have this block_size or kv_cache_dtype."""
        self.backend.cache_dtype(self.kv_cache_dtype, self.model.weights.dtype)
        resolve_block_size(self.block_size, self.backend)

    @property
    def _size(self) -> int:
        return resolve_block_size(self.block_size, self.backend)

    def run(self) -> Iterator[Call | Replay]:
        """Yield the calls of both steps; after the calls of a step, its replay if the backend captures it."""
        config = self.model.config
        size = self._size
        blocks = -(-(self.prompt + 1) // size)
        total = self.rows * blocks
        cached = self.backend.cache_dtype(self.kv_cache_dtype, self.model.weights.dtype)
        golden_cache, cache, captured_cache = (
            StateStore.allocate(config, total, size, cached, backend, self._slots, self.model.weights.dtype)
            for backend in (CpuBackend(native=False), self.backend, self.backend))
        buffers = BatchBuffers(
            self.rows * self.prompt, self.rows, blocks, size,
            total if self.backend.capabilities.padding_blocks else None, self.backend, num_slots=self._slots)
        captured, captured_decode = self._captured(buffers, captured_cache)
        for step, rows in self._steps(blocks):
            calls, hidden = self.backend.enqueue(partial(self._single, step, rows, golden_cache, cache)).wait()
            yield from calls
            replayed = captured if step == "prompt" else captured_decode or captured
            if replayed and sum(len(row.token_ids) for row in rows) <= replayed.largest:
                yield self._replay(step, rows, hidden, buffers, replayed)
            else:  # the state of the cache after a replay
                for target, source in zip(captured_cache.tensors, cache.tensors, strict=True):
                    target.copy_(source)

    @property
    def _slots(self) -> int:
        """Slots of fixed state, one for each row."""
        return self.model.config.slots_of(self.rows)

    def _captured(self, buffers: BatchBuffers, cache: StateStore) -> tuple[Captured | None, Captured | None]:
        """Return the captured steps of any rows and of decode rows; None for one that the backend does not capture."""
        decode: Captured | None = None
        try:
            with torch.no_grad():
                if self.backend.capabilities.padding_blocks:
                    decode = self.backend.capture(
                        lambda rows: self.model.hidden(buffers.decode(rows), cache), self.rows, decode=True)
                    buffers.clear()
                mixed = self.backend.capture(
                    lambda tokens: self.model.hidden(buffers.tokens(tokens), cache), self.rows * self.prompt,
                    decode=False)
        except CaptureError as error:
            log.warning("%s. No replay is compared", error)
            return None, None
        return mixed, decode

    @torch.no_grad()
    @torch.inference_mode(False)  # tensors of inference mode have no version counter
    def _single(
        self, step: str, rows: list[Row], golden_cache: StateStore, cache: StateStore
    ) -> tuple[list[Call], Tensor]:
        """Execute a step kernel by kernel; return its calls and its hidden states."""
        batch = make_batch(rows, self._size, self.backend, self._slots)
        expected: list[Results] = []
        self._forward(TappedKernels(GOLDEN, golden_tap(expected)), batch, golden_cache)
        calls: list[Call] = []
        hidden = self._forward(TappedKernels(self.backend.kernels, self._compared(step, expected, calls)), batch, cache)
        if self.lm_head != "skip":
            calls.append(self._argmax(step, len(calls), self._sampling(hidden, batch)))
        return calls, hidden

    def _replay(
        self, step: str, rows: list[Row], hidden: Tensor, buffers: BatchBuffers, captured: Captured
    ) -> Replay:
        count = sum(len(row.token_ids) for row in rows)
        staged = buffers.fill([(rows, captured.size(count) if step == "decode" else len(rows))])
        part = staged.parts[0]
        if step == "prompt" and self.backend.capabilities.padding_blocks:
            buffers.pad_tokens(part, captured.size(count))

        def replay() -> tuple[bool, list[Span], list[tuple[str, float]]]:
            staged.upload()
            same = torch.equal(captured.replay(part.tokens, part.context_lens, part.cu_seqlens), hidden)
            spans = []
            for _ in range(REPLAYS):
                spans.append(self.backend.span())
                captured.replay(part.tokens, part.context_lens, part.cu_seqlens)
                spans[-1].stop()
            timed = captured.replay_timed(part.tokens, part.context_lens)
            return same, spans, timed[1] if timed else []

        same, spans, calls = self.backend.enqueue(replay).wait()
        self.backend.synchronize()
        return Replay(step, same, statistics.median(span.read() for span in spans), sum(s for _, s in calls))

    def _steps(self, blocks: int) -> Iterator[tuple[str, list[Row]]]:
        ids = torch.randint(self.model.config.vocab_size, (self.rows, self.prompt + 1),
                            generator=torch.Generator().manual_seed(0)).tolist()
        block_ids = [list(range(row * blocks, (row + 1) * blocks)) for row in range(self.rows)]
        yield "prompt", [Row(r, ids[r][:-1], 0, block_ids[r], 1, state_slot=r) for r in range(self.rows)]
        yield "decode", [Row(r, ids[r][-1:], self.prompt, block_ids[r], 1, state_slot=r) for r in range(self.rows)]

    def _forward(self, kernels: KernelSet, batch: Batch, cache: StateStore) -> Tensor:
        model = dataclasses.replace(self.model, kernels=kernels)
        hidden = model.hidden(batch, cache)
        if self.lm_head != "skip":
            kernels.greedy(model.logits(self._sampling(hidden, batch)), model.config.vocab_size)
        return hidden

    def _sampling(self, hidden: Tensor, batch: Batch) -> Tensor:
        tokens = batch.sample_tokens if self.lm_head == "full" else batch.sample_tokens[:1]
        return hidden[tokens.to(hidden.device)]

    def _argmax(self, step: str, index: int, hidden: Tensor) -> Call:
        """Compare the fused LM head with the backend's own logits, so that near ties do not count as errors."""
        ids = self.model.kernels.greedy(self.model.logits(hidden), self.model.config.vocab_size)[:, :1]
        others = relative_of(self.model.argmax(hidden)[:, :1], ids)
        return Call(step, index, "linear_argmax", tuple(ids.shape), 0.0, others, 0.0, others > 0)

    def _compared(self, step: str, expected: list[Results], calls: list[Call]) -> Tap:
        """Return a tap that compares calls with their golden functions and with `expected`, which it consumes.

        Comparisons are appended to `calls`.
        """

        def call(name: str, function: Callable[..., Any], args: Args) -> Any:
            kernel = KERNELS[name]
            implementation = kernel.implementations.get(self.backend.kernels) or Implementation(kernel.golden)
            golden: list[Results] = []
            golden_tap(golden)(name, KERNELS[name].golden, cloned(implementation.restore(args)))
            result = function(*args)
            got = results_of(result, implementation.restore(args), list(golden[0]))
            of_pass = expected.pop(0)
            errors = [relative_of(got[key], want) for key, want in golden[0].items()]
            tolerance = [tolerance_of(x.dtype) for x in got.values()]
            wrong = any(not error <= limit for error, limit in zip(errors, tolerance, strict=True))
            difference = max(difference_of(got[key], want) for key, want in golden[0].items())
            drift = max(relative_of(got[key], want) for key, want in of_pass.items())
            shape = tuple(got["result.0"].shape)
            calls.append(Call(step, len(calls), name, shape, difference, max(errors), drift, wrong))
            self._save(calls[-1], got, {"golden": golden[0], "pass": of_pass})
            return result

        return call

    def _save(self, call: Call, got: Results, others: dict[str, Results]) -> None:
        if self.dump is None:
            return
        folder = self.dump / call.step
        folder.mkdir(parents=True, exist_ok=True)
        named = {f"{of}.{key}": x for of, results in others.items() for key, x in results.items()}
        save_file({key: x.contiguous() for key, x in (got | named).items()},
                  folder / f"{call.index:04}-{call.kernel}.safetensors")


def load(
    folder: Path | str, *, backend: str = "auto", dtype: str = "auto", threads: int = 0, max_model_len: int = 0,
    layers: int = 0, emulate: Sequence[str] | None = None, lm_head_dtype: HeadDtype = "auto",
    cpu: CpuKernelSettings = AUTO,
) -> tuple[Model, Backend]:
    """Load the model in `folder` without a runner.

    max_model_len: number of positions; 0 for the model's context.
    layers: number of first layers to keep; 0 for all.
    cpu: requested CPU kernels.
    Raises ModelError and BackendError as `load_runner` does, and ModelError for too many layers.
    """
    device = select(backend, emulate, DeviceSettings(threads=threads))
    can = device.capabilities
    config = ModelConfig.from_folder(folder, lm_head_dtype, float8=can.float8, int4=can.int4, stacks=can.stacks)
    if layers > config.num_layers:
        raise ModelError(f"layers: {layers} are more than the {config.num_layers} that the model has")
    resolved_dtype: torch.dtype = getattr(torch, device.resolve_dtype(dtype, config.dtype))
    choose_kernels(config, resolved_dtype, [device], cpu)
    weights = load_weights(folder, config, resolved_dtype, device)
    layers = layers or config.num_layers
    kept = dataclasses.replace(weights, layers=weights.layers[:layers])
    length = max_model_len or config.context_length
    kernels = KernelSet(device.kernels, fuse=False, own=device.own_kernels)
    return Model.of(config.first_layers(layers), kept, length, kernels, device), device
