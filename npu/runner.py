"""Executes steps on the device.

1. `launch` forgets the requests that ended and meets the new ones (the sampler keeps what sampling takes of each).
2. The step's rows become one batch of tensors. The decoder was captured when the runner was made, where the backend
   can: it runs as one dispatch that reads the batch where it lies. LM head and sampler follow; of a step whose rows
   all decode their likeliest tokens they are part of the dispatch.
3. `collect` waits for the sampled ids and brings them to the host.

On a device that works on its own, step n + 1 may be launched before step n is collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from npuserve.kernels.registry import KernelSet, Observe, Span, Timings
from npuserve.npu.backends import select
from npuserve.npu.backends.base import Backend, Captured, Event
from npuserve.npu.batch import Batch, BatchBuffers, make_batch
from npuserve.npu.kv_cache import KVCache
from npuserve.npu.loader import Progress, load_weights
from npuserve.npu.memory import predict
from npuserve.npu.model import Model
from npuserve.npu.model_config import ModelConfig
from npuserve.npu.rope import cos_sin_table
from npuserve.npu.sampler import Logprobs, SampledIds, Sampler
from npuserve.npu.step import NewRequest, Row, Step, StepResult
from npuserve.npu.weights import ModelWeights

LOGITS_BYTES = 32 << 20
"""Bytes of a slice of prompt logits in float32: a long chunk's are never all there at once."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way. `runner.collect` it once. prompt: (request_id, reports) in the order of the positions."""

    samples: Sequence[tuple[int, int]] = ()
    sampled: SampledIds | None = None
    prompt: list[tuple[int, Logprobs]] = field(default_factory=list)
    span: Span | None = None
    done: Event | None = None
    timings: Timings | None = None


class Runner:
    """A loaded model on a device, with its KV cache.

    num_blocks, block_size: of the KV cache. max_model_len: positions that a request may have. max_num_seqs,
    max_num_batched_tokens: rows and tokens of the largest step that is captured; larger ones run kernel by kernel.
    kernel_sampling: every so many steps each kernel call is timed and `observe` told of it; 0 for never.
    """

    def __init__(
        self,
        backend: Backend,
        weights: ModelWeights,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        kernel_sampling: int = 0,
        observe: Observe | None = None,
    ):
        self.config = config
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        dtype = weights.norm.dtype
        self.dtype_name = str(dtype).removeprefix("torch.")
        self.backend_name = backend.name
        self.parameters = config.num_parameters
        self.deterministic = backend.deterministic
        self._backend = backend
        self._kernels = KernelSet(backend.kernels, observe, backend.span)
        cos_sin = cos_sin_table(config.rope, config.head_dim, max_model_len, backend.device)
        self._model = Model(config, weights, cos_sin, self._kernels)
        self._cache = KVCache.allocate(config, num_blocks, block_size, dtype, backend)
        self._sampler = Sampler(self._kernels, config.vocab_size, backend.device)
        self._prompts: dict[int, NewRequest] = {}  # of the requests that want prompt_logprobs
        self._prompt_slice = max(1, LOGITS_BYTES // (4 * weights.padded_vocabulary))
        self._kernel_sampling = kernel_sampling
        self._steps = 0
        self._buffers = BatchBuffers(
            max_num_batched_tokens, max_num_seqs, -(-max_model_len // block_size), block_size, backend)
        with torch.inference_mode():
            self._captured = backend.capture(lambda: self._model.hidden(self._buffers.batch, self._cache))
            self._captured_decode = backend.capture(
                lambda: self._model.likeliest(self._model.hidden(self._buffers.decode, self._cache)))

    @property
    def fallbacks(self) -> list[str]:
        """Names of the kernels that the backend serves by their golden functions."""
        return self._kernels.fallbacks

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Start a step. Reads `step` only until it returns."""
        for request_id in step.ended:
            self._sampler.remove(request_id)
            self._prompts.pop(request_id, None)
        for request in step.new:
            self._sampler.add(request)
            if request.sampling.prompt_logprobs is not None:
                self._prompts[request.request_id] = request
        if not step.rows:
            return Launched()
        with self._backend.stream():
            held = self._buffers.hold(step.rows)
            batch = self._buffers.fill(step.rows) if held else make_batch(step.rows, self.block_size, self._backend)
            timed = self._kernel_sampling > 0 and self._steps % self._kernel_sampling == 0
            self._steps += 1
            with self._kernels.timed(batch.phase) if timed else nullcontext() as timings:
                span = self._backend.span()
                sampled, prompt = self._step(batch, step.rows, held, timings)
                span.stop()
            return Launched(batch.samples, sampled, prompt, span, self._backend.event(), timings)

    @torch.inference_mode()
    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step's end."""
        if launched.span is None or launched.done is None:
            return StepResult({}, {}, {}, 0.0)
        launched.done.wait()
        requests = [request_id for request_id, _ in launched.samples]
        result = StepResult({}, {}, {}, launched.span.read())
        if launched.sampled:
            result.token_ids.update(zip(requests, launched.sampled.ids[:, 0].tolist(), strict=True))
            result.logprobs.update({requests[row]: report for row, report in launched.sampled.reports().items()})
        for request_id, logprobs in launched.prompt:
            result.prompt_logprobs.setdefault(request_id, []).extend(logprobs.reports())
        if launched.timings:
            launched.timings.report()
        return result

    def _step(
        self, batch: Batch, rows: Sequence[Row], held: bool, timings: Timings | None
    ) -> tuple[SampledIds | None, list[tuple[int, Logprobs]]]:
        """held: the batch is in `_buffers`."""
        likeliest = self._sampler.only_likeliest(batch.samples)
        if held and self._captured_decode and likeliest and len(batch.samples) == len(rows) == len(batch.ids):
            return SampledIds(_replay(self._captured_decode, len(rows), timings)), []
        if held and self._captured:
            hidden = _replay(self._captured, len(batch.ids), timings)
        else:
            hidden = self._model.hidden(batch, self._cache)
        prompt = self._prompt_logprobs(hidden, batch, rows) if self._prompts else []
        if not batch.samples:
            return None, prompt
        sampling = hidden if len(batch.samples) == len(hidden) else hidden[batch.sample_tokens]
        if likeliest:
            return SampledIds(self._model.likeliest(sampling)), prompt
        return self._sampler.sample(self._model.logits(sampling), batch.samples), prompt

    def _prompt_logprobs(self, hidden: Tensor, batch: Batch, rows: Sequence[Row]) -> list[tuple[int, Logprobs]]:
        """The row at positions [a, b) predicts the prompt's tokens [a + 1, min(b + 1, its length))."""
        reports = []
        for row, begin in zip(rows, batch.attention.host_cu_seqlens_q, strict=False):
            request = self._prompts.get(row.request_id)
            if request is None or request.sampling.prompt_logprobs is None:
                continue
            following = request.prompt_ids[row.start + 1 : row.start + 1 + len(row.token_ids)]
            next_ids = torch.tensor(following, dtype=torch.int64, device=hidden.device)
            predicting = hidden[begin : begin + len(following)]
            for part, ids in zip(predicting.split(self._prompt_slice), next_ids.split(self._prompt_slice), strict=True):
                if len(ids):
                    logits = self._model.logits(part)
                    report = self._sampler.prompt_logprobs(logits, ids, request.sampling.prompt_logprobs)
                    reports.append((row.request_id, report))
        return reports


def _replay(captured: Captured, rows: int, timings: Timings | None) -> Tensor:
    if timings is None:
        return captured.replay(rows)
    result, calls = captured.replay_timed(rows)
    timings.add(calls)
    return result


def load_runner(
    folder: Path | str,
    *,
    backend: str = "auto",
    dtype: str = "auto",
    max_model_len: int = 0,
    block_size: int = 0,
    kv_cache_memory: int = 0,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    kernel_sampling: int = 0,
    observe: Observe | None = None,
    threads: int = 0,
    progress: Progress | None = None,
) -> Runner:
    """Load the model in `folder`. Zeros take the default: see `predict`, whose plan is followed.

    progress: is told (bytes done, bytes in all) while the weights are read; None shows it on stderr.

    Raises ModelError for a model or settings that cannot be served, BackendError for a device or dtype that is not
    to be had.
    """
    device = select(backend)
    device.set_threads(threads)
    config = ModelConfig.from_folder(folder)
    plan = predict(
        config, device, dtype=dtype, max_model_len=max_model_len, block_size=block_size,
        kv_cache_memory=kv_cache_memory, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
    )
    plan.require_fit()
    weights = load_weights(folder, config, getattr(torch, plan.dtype), device, progress)
    return Runner(
        device, weights, config, plan.num_blocks, plan.block_size, max_model_len=plan.max_model_len,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, kernel_sampling=kernel_sampling,
        observe=observe,
    )
