"""Executes steps on the device.

1. `launch` forgets the requests that ended and meets the new ones (the sampler keeps what sampling takes of each).
2. The step's rows are written to host memory from where one copy takes them to the device, and its work is enqueued: it
   runs after that of the step before. Nobody waits.
3. The decoder was captured when the runner was made, where the backend can: it runs as one dispatch that reads the
   batch where it lies. LM head and sampler follow; of rows that all decode their likeliest tokens they are part of the
   dispatch. A step with chunks is one dispatch too, up to as many tokens as are captured. Where only decode rows can
   be, it is one dispatch for those and then the chunks' kernels.
4. The sampled ids stay on the device: step n + 1 takes from there those of step n (its PENDING tokens). Their copy goes
   to one of two host buffers while step n + 1 runs.
5. `collect` waits for that copy.

So step n + 1 may be launched before step n is collected, and no further one.

Where prompts are computed on the host (`prefill`), the device does a step's decode rows while the host does its chunks;
what is then left of the step is launched before the next one, or when it is collected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npuserve.kernels.native.choice import AUTO, CpuKernels, Wanted
from npuserve.kernels.registry import KernelSet, Observe, Timings
from npuserve.npu.backends import select, select_prefill
from npuserve.npu.backends.base import Backend, Captured
from npuserve.npu.execution.batch import Batch, BatchBuffers, Part, Phase, Staged, phase_of
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.host_prefill import Chunk, HostPrefill
from npuserve.npu.execution.in_flight import Launched, PromptRows, Ran, Waiting, Work
from npuserve.npu.execution.kv_cache import KVCache, block_bytes
from npuserve.npu.execution.memory_plan import predict
from npuserve.npu.execution.sampler import Logprobs, Sampler
from npuserve.npu.execution.shared_weights import SharedMemory, describe
from npuserve.npu.model.config import HeadDtype, ModelConfig
from npuserve.npu.model.loader import Progress, load_weights
from npuserve.npu.model.rope import cos_sin_table
from npuserve.npu.model.weights import ModelWeights, choose_kernels, read_bytes, stored_bytes
from npuserve.npu.step import NewRequest, Row, Step, StepResult

LOGITS_BYTES = 32 << 20
"""Bytes of a slice of prompt logits in float32: a long chunk's are never all there at once."""


class Runner:
    """A loaded model on a device, with its KV cache.

    num_blocks, block_size, kv_cache_dtype: of the KV cache; "auto" or "int8". max_model_len: positions that a request
    may have. max_num_seqs, max_num_batched_tokens: rows and tokens of the largest step. kernel_sampling: every so many
    steps each kernel call is timed and `observe` told of it; 0 for never. prefill: the backend that computes the chunks
    of prompts, with its weights, where that is not the device. leaves: what it leaves in shared memory
    (`shared.describe`), or None. cpu_kernels: what the CPU kernels run on; None where none are used.
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
        kv_cache_dtype: str = "auto",
        kernel_sampling: int = 0,
        observe: Observe | None = None,
        prefill: tuple[Backend, ModelWeights] | None = None,
        leaves: Mapping[str, Any] | None = None,
        cpu_kernels: CpuKernels | None = None,
    ):
        self.config = config
        self.cpu_kernels = cpu_kernels
        self.leaves = leaves
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        dtype = weights.norm.dtype
        self.dtype_name = str(dtype).removeprefix("torch.")
        self.backend_name = backend.name
        self.parameters = config.num_parameters
        self.weights_bytes = stored_bytes(config, dtype, backend) + weights.unplanned_bytes
        self.read_bytes = read_bytes(config, dtype, backend) + weights.unplanned_reads
        self.deterministic = backend.deterministic and prefill is None
        self._backend = backend
        self._kernels = KernelSet(backend.kernels, observe, backend.span)
        cos_sin = cos_sin_table(config.rope, config.head_dim, max_model_len, backend.device)
        self._model = Model(config, weights, cos_sin, self._kernels)
        self.cache_dtype = backend.cache_dtype(kv_cache_dtype, dtype)
        self.token_bytes = block_bytes(config, block_size, self.cache_dtype, backend) / block_size
        self._cache = KVCache.allocate(config, num_blocks, block_size, self.cache_dtype, backend)
        self._sampler = Sampler(self._kernels, config.vocab_size, backend)
        self._prompts: dict[int, NewRequest] = {}  # of the requests that want prompt_logprobs
        self._prompt_slice = max(1, LOGITS_BYTES // (4 * weights.padded_vocabulary))
        self._kernel_sampling = kernel_sampling
        self._steps = 0
        rows = min(max_num_seqs, max_num_batched_tokens)
        self._buffers = BatchBuffers(
            max_num_batched_tokens, rows, -(-max_model_len // block_size), block_size,
            num_blocks if backend.padding_blocks else None, backend)
        self._last = backend.empty((rows,), torch.int64).zero_()  # what the last step sampled
        self._ids = [backend.host_buffer(rows, dtype=torch.int64) for _ in range(2)]
        self._sampled: dict[int, int] = {}  # request -> its place in _last
        self._waiting: Waiting | None = None
        self._prefill = HostPrefill(
            *prefill, backend, self._cache, config, num_blocks, block_size, max_model_len=max_model_len, max_rows=rows,
            max_tokens=max_num_batched_tokens, observe=observe) if prefill else None
        self._pads = backend.padding_blocks > 0
        with torch.inference_mode():
            self._likeliest = backend.capture(self._decode, rows, decode=True)
            self._decoding = backend.capture(
                lambda rows: self._hidden(self._buffers.decode(rows)), rows, decode=True) if self._pads else None
            if self._pads:
                self._buffers.clear()
            self._any = backend.capture(
                lambda tokens: self._hidden(self._buffers.tokens(tokens)), max_num_batched_tokens, decode=False)
            self._decoding = self._decoding or self._any
            if self._any and self._any.largest < max_num_batched_tokens:
                # What the largest steps compile and take is compiled and taken now, or not at all.
                self._hidden(self._buffers.tokens(max_num_batched_tokens))
                backend.synchronize()
            if backend.compiles:
                self._rehearse(rows, dtype)

    @property
    def backend(self) -> Backend:
        """The device, for whoever measures on it."""
        return self._backend

    @property
    def fallbacks(self) -> list[str]:
        """Names of the kernels that the backend serves by their golden functions."""
        return self._kernels.fallbacks

    def launch(self, step: Step) -> Launched:
        """Start a step. Reads `step` and what it names only until it returns. Of two steps in flight the first must be
        collected before a third is launched.

        Raises ValueError for more rows or tokens than there is room for, KeyError for unknown requests."""
        self._complete()
        for request_id in step.ended:
            self._sampler.remove(request_id)
            self._prompts.pop(request_id, None)
        for request in step.new:
            self._sampler.add(request)
            if request.sampling.prompt_logprobs is not None:
                self._prompts[request.request_id] = request
        if not step.rows:
            return Launched([], self._ids[0][:0])
        staged = self._buffers.fill(self._parts(step.rows), self._sampled)
        works: list[Work] = []
        requests: list[int] = []
        for part in staged.parts:
            works.append(self._plan(part, len(requests), staged))
            requests += [request_id for request_id, _ in part.samples]
        self._sampled = dict(zip(requests, range(len(requests)), strict=True))
        timed = self._kernel_sampling > 0 and self._steps % self._kernel_sampling == 0
        phase = phase_of(step.rows) if timed else None
        self._steps += 1
        launched = Launched(requests, self._ids[self._steps % 2][: len(requests)])
        last = self._last[: len(requests)]
        staged.seal()
        prefill, hosted = self._prefill, works.pop() if self._on_host(works[-1].part) else None
        if prefill:
            for work in works:
                prefill.written(work.part.rows)
        if prefill and hosted:
            begun = self._backend.enqueue(partial(self._begin, staged, works, phase))
            chunk = prefill.launch(hosted.part.rows, all_hidden=bool(hosted.prompt), phase=phase)
            self._waiting = Waiting(launched, begun, chunk, hosted, last, phase)
        else:
            launched.ran = self._backend.enqueue(partial(self._run, staged, works, last, launched.ids, phase))
        return launched

    def ready(self, launched: Launched) -> bool:
        """Whether `collect` would not wait for it."""
        if (waiting := self._waiting) and waiting.launched is launched:
            if not (waiting.chunk.done() and waiting.begun.done()):
                return False
            self._complete()
        ran = launched.ran
        return ran is None or (ran.done() and (fetched := ran.wait().fetched) is not None and fetched.done())

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step's end. Steps are collected in the order of their launch."""
        if self._waiting and self._waiting.launched is launched:
            self._complete()
        if launched.ran is None:
            return StepResult({}, {}, {}, 0.0)
        ran = launched.ran.wait()
        assert ran.fetched
        ran.fetched.wait()
        result = StepResult(
            dict(zip(launched.requests, launched.ids.tolist(), strict=True)), {}, {}, ran.span.read(), ran.captured,
            ran.captured_decodes, bool(ran.timings))
        for requests, logprobs in ran.reports:
            result.logprobs.update(zip(requests, logprobs.reports(), strict=True))
        for request_id, logprobs in ran.prompt:
            result.prompt_logprobs.setdefault(request_id, []).extend(logprobs.reports())
        for timings in ran.timings:
            timings.report()
        return result

    def _complete(self) -> None:
        """Queue what is left of the step that waits for the host, once that is done."""
        if (waiting := self._waiting) is None:
            return
        self._waiting = None
        chunk, ran = waiting.chunk.wait(), waiting.begun.wait()
        waiting.launched.ran = self._backend.enqueue(partial(self._finish, waiting, chunk, ran))

    # Planned on the host

    def _parts(self, rows: Sequence[Row]) -> list[tuple[Sequence[Row], int]]:
        """Rows that are computed together, and to how many they are padded."""
        graphs = self._decoding if self._pads else None
        if graphs is None and self._prefill is None:
            return [(rows, len(rows))]
        decodes = [row for row in rows if _decodes(row)]
        captured = graphs is not None and 0 < len(decodes) <= graphs.largest
        if self._prefill is None and (not captured or (self._any and len(decodes) < len(rows))):
            return [(rows, len(rows))]
        others = [row for row in rows if not _decodes(row)]
        size = graphs.size(len(decodes)) if graphs and captured else len(decodes)
        return [(part, n) for part, n in ((decodes, size), (others, len(others))) if part]

    def _on_host(self, part: Part) -> bool:
        return self._prefill is not None and not _decodes(part.rows[0])

    def _plan(self, part: Part, first: int, staged: Staged) -> Work:
        plan = self._sampler.plan(part.samples, staged.put)
        prompt = self._prompt_rows(part, staged) if self._prompts else []
        captured = self._captured(part, plan.likeliest)
        if self._pads and captured and captured is self._any:
            self._buffers.pad(part, captured.size(part.tokens))
        return Work(part, first, plan, captured, prompt)

    def _captured(self, part: Part, likeliest: bool) -> Captured | None:
        """What serves it. A captured step reads from the beginning of the buffers."""
        if part.first or self._on_host(part):
            return None
        decode = len(part.samples) == len(part.rows) == part.tokens
        found = (likeliest and self._likeliest, self._decoding) if decode else ()
        return next((each for each in (*found, self._any) if each and part.tokens <= each.largest), None)

    def _prompt_rows(self, part: Part, staged: Staged) -> list[PromptRows]:
        """The row at positions [a, b) predicts the prompt's tokens [a + 1, min(b + 1, its length))."""
        found = []
        for row, begin in zip(part.rows, part.cu_seqlens, strict=False):
            request = self._prompts.get(row.request_id)
            if request is None or request.sampling.prompt_logprobs is None:
                continue
            following = request.prompt_ids[row.start + 1 : row.start + 1 + len(row.token_ids)]
            if following:
                found.append(PromptRows(
                    row.request_id, begin, staged.put(np.array(following)), request.sampling.prompt_logprobs))
        return found

    # Done in the device's queue

    def _run(self, staged: Staged, works: list[Work], last: Tensor, ids: Tensor, phase: Phase | None) -> Ran:
        """last: the sampled ids on the device, for `ids` on the host. phase: of a step whose kernels are timed.

        On a CPU this waits for the interpreter's lock while the processor is idle: what can be done before, is."""
        return self._end(self._begin(staged, works, phase), last, ids)

    def _begin(self, staged: Staged, works: list[Work], phase: Phase | None) -> Ran:
        staged.upload()
        ran = Ran(self._backend.span())
        with self._timed(phase, ran) as timings:
            for work in works:
                self._compute(work, ran, timings)
        return ran

    def _finish(self, waiting: Waiting, chunk: Chunk, ran: Ran) -> Ran:
        """The rest of a step whose chunks the host has computed."""
        hidden = chunk.upload()
        with self._timed(waiting.phase, ran):
            self._sample(waiting.work, hidden, ran)
        ran.timings += chunk.timings
        return self._end(ran, waiting.last, waiting.launched.ids)

    def _end(self, ran: Ran, last: Tensor, ids: Tensor) -> Ran:
        ran.reports = [(requests, logprobs.fetch(self._backend)) for requests, logprobs in ran.reports]
        ran.prompt = [(request_id, logprobs.fetch(self._backend)) for request_id, logprobs in ran.prompt]
        ran.span.stop()
        ran.fetched = self._backend.fetch(last, ids)
        return ran

    @contextmanager
    def _timed(self, phase: Phase | None, ran: Ran) -> Iterator[Timings | None]:
        """Times the kernels called in its body, if the step has a phase."""
        if phase is None:
            yield None
            return
        with self._kernels.timed(phase) as timings:
            ran.timings.append(timings)
            yield timings

    def _compute(self, work: Work, ran: Ran, timings: Timings | None) -> None:
        """Leaves the sampled ids in `_last`."""
        part = work.part
        hidden = _replay(work.captured, part, timings) if work.captured else None
        if hidden is not None:
            ran.captured = True
            ran.captured_decodes += part.decodes
            if work.captured is self._likeliest:
                return
        self._sample(work, self._hidden(self._buffers.batch(part)) if hidden is None else hidden, ran)

    def _sample(self, work: Work, hidden: Tensor, ran: Ran) -> None:
        """hidden: of all tokens of the part, or of those alone that sample."""
        part = work.part
        ran.prompt += self._prompt_logprobs(hidden, work.prompt)
        count = len(part.samples)
        if not count:
            return
        sampling = hidden if count == len(hidden) else hidden[self._buffers.batch(part).sample_tokens]
        if work.plan.likeliest:
            ids = self._model.likeliest(sampling)
        else:
            sampled = self._sampler.sample(self._model.logits(sampling), work.plan)
            ids = sampled.ids
            if sampled.logprobs:
                ran.reports.append(([part.samples[row][0] for row in work.plan.reported], sampled.logprobs))
        self._kernels.keep_ids(ids, self._last[work.first : work.first + count])

    def _decode(self, rows: int) -> Tensor:
        """A whole step of rows that decode their likeliest tokens."""
        ids = self._model.likeliest(self._hidden(self._buffers.decode(rows)))
        self._kernels.keep_ids(ids, self._last[:rows])
        return ids

    def _rehearse(self, most: int, dtype: torch.dtype) -> None:
        """Call what follows the last norm, of all numbers of rows that differ in what is compiled for them, so that no
        request waits for that."""
        hidden = self._backend.empty((most, self.config.hidden_size), dtype).zero_()
        for rows in {most, *(1 << n for n in range(most.bit_length()))}:
            self._model.likeliest(hidden[:rows])
            self._sampler.rehearse(self._model.logits(hidden[:rows]))
        self._backend.synchronize()

    def _hidden(self, batch: Batch) -> Tensor:
        ids = self._kernels.take_ids(batch.ids, self._last)
        return self._model.hidden(replace(batch, ids=ids), self._cache)

    def _prompt_logprobs(self, hidden: Tensor, prompt: list[PromptRows]) -> list[tuple[int, Logprobs]]:
        reports = []
        for rows in prompt:
            predicting = hidden[rows.begin : rows.begin + len(rows.next_ids)]
            slices = zip(predicting.split(self._prompt_slice), rows.next_ids.split(self._prompt_slice), strict=True)
            for part, ids in slices:
                logits = self._model.logits(part)
                reports.append((rows.request_id, self._sampler.prompt_logprobs(logits, ids, rows.n)))
        return reports


def _decodes(row: Row) -> bool:
    """It is one token, and the next is sampled: the shape of a decode row, be it the prompt's last token."""
    return row.samples and len(row.token_ids) == 1


def _replay(captured: Captured, part: Part, timings: Timings | None) -> Tensor | None:
    """None where a replay cannot be timed, and was not run."""
    if timings is None:
        return captured.replay(part.tokens, part.context_lens)
    if (timed := captured.replay_timed(part.tokens, part.context_lens)) is None:
        return None
    timings.add(timed[1])
    return timed[0]


def load_runner(
    folder: Path | str,
    *,
    backend: str = "auto",
    dtype: str = "auto",
    max_model_len: int = 0,
    block_size: int = 0,
    kv_cache_dtype: str = "auto",
    kv_cache_memory: int = 0,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    kernel_sampling: int = 0,
    observe: Observe | None = None,
    threads: int = 0,
    emulate: Sequence[str] | None = None,
    decode_buckets: Sequence[int] = (),
    prefill_device: str = "same",
    lm_head_dtype: HeadDtype = "auto",
    int8_levels: float = 0,
    progress: Progress | None = None,
    memory: SharedMemory | None = None,
    cpu: Wanted = AUTO,
) -> Runner:
    """Load the model in `folder`. Zeros take the default: see `predict`, whose plan is followed.

    emulate: as `select` takes it. decode_buckets, int8_levels: of `Backend`. prefill_device: as `select_prefill` takes
    it. lm_head_dtype: of `ModelConfig`. progress: is told (bytes done, bytes in all) while the weights are read; None
    shows it on stderr. memory: where the model is to lie, if the backend can, or lies already. cpu: of the CPU kernels.

    Raises ModelError for a model or settings that cannot be served, BackendError for a device or dtype that is not
    to be had.
    """
    device = select(backend, emulate)
    device.set_threads(threads)
    device.decode_buckets = tuple(decode_buckets)
    device.int8_levels = int8_levels or device.int8_levels
    host = select_prefill(prefill_device, device)
    if host:
        host.set_threads(threads)
        host.int8_levels = device.int8_levels
    config = ModelConfig.from_folder(folder, lm_head_dtype)
    chosen = choose_kernels(config, getattr(torch, device.resolve_dtype(dtype, config.dtype)), (device, host), cpu)
    memory = None if host else memory
    left = memory.plan(Path(folder)) if memory else None
    with device.sharing(memory.file, filled=left is not None) if memory else nullcontext(False) as shared:
        plan = left if shared and left else predict(
            config, device, dtype=dtype, max_model_len=max_model_len, block_size=block_size,
            kv_cache_dtype=kv_cache_dtype, kv_cache_memory=kv_cache_memory, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, prefill=host,
        )
        if plan is not left:
            plan.require_fit()
        made: torch.dtype = getattr(torch, plan.dtype)
        weights = load_weights(folder, config, made, device, progress, there=plan is left)
    if weights.unplanned_bytes:
        cached: torch.dtype = getattr(torch, plan.kv_cache_dtype)
        plan = plan.grown(weights.unplanned_bytes, block_bytes(config, plan.block_size, cached, device))
        plan.require_fit()
    return Runner(
        device, weights, config, plan.num_blocks, plan.block_size, max_model_len=plan.max_model_len,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, kv_cache_dtype=kv_cache_dtype,
        kernel_sampling=kernel_sampling, observe=observe,
        prefill=(host, load_weights(folder, config.headless, made, host, progress)) if host else None,
        leaves=describe(Path(folder), plan) if shared and not weights.unplanned_bytes else None, cpu_kernels=chosen,
    )
