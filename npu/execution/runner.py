"""Execution of steps on the device.

1. `launch` removes the requests that ended and adds the new ones (the sampler keeps their sampling state).
2. The step's rows are written to a host buffer that is copied to the device in one copy, and the step's work is
   enqueued behind the previous step's. Nothing blocks.
3. `Dispatch` selects how the rows are computed: by captured steps, or kernel by kernel. A captured step is one
   dispatch, which reads the batch at fixed addresses: the decoder, and where possible LM head and sampler.
4. The sampled ids stay on the device: step n + 1 reads the ids of step n from there (its PENDING tokens). They are
   copied to one of two host buffers while step n + 1 runs, as [1 + D, n] where D drafts follow each of n samples.
   A head or a smaller model that drafts follows the sampling, by a captured step of its own where steps are captured
   (predictor.py).
5. `collect` waits for that copy.

Two steps may be in flight: step n + 1 may be launched before step n is collected.

The rest of a step is queued later if it needs results of the host (`WaitingStep`):

- If prompts are computed on the host (`prefill`), the device computes a step's decode rows while the host computes its
  chunks. The rest is queued before the next step is launched, or when the step is collected.
- If tokens are constrained, the forward pass is queued without LM head and sampler, which follow when `sample` receives
  the masks. They are not part of the dispatch then, but the decoder still is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.collectives import ALONE, Ranks
from npuserve.kernels.native.choice import CpuKernels
from npuserve.kernels.registry import KernelSet, Observe, Timings
from npuserve.npu.backends.base import Backend
from npuserve.npu.execution.batch import BatchBuffers
from npuserve.npu.execution.capture import CapturableSteps, capture_steps
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.dispatch import Dispatch, replay
from npuserve.npu.execution.expert_balance import ExpertBalance
from npuserve.npu.execution.forward import Forward
from npuserve.npu.execution.host_blocks import HostBlocks
from npuserve.npu.execution.host_prefill import DevicePrefill, HostPrefill
from npuserve.npu.execution.in_flight import (
    MISSING,
    LaunchedStep,
    Recording,
    StepOutput,
    WaitingStep,
    predicting_rows,
)
from npuserve.npu.execution.masks import Array, ConstrainedRow, MaskBuffers, num_valid
from npuserve.npu.execution.page_population import PagePopulation
from npuserve.npu.execution.predictor import Drafts, predictor_of
from npuserve.npu.execution.sampler import ArgmaxPlan, FixedPlan, Logprobs, Sampler
from npuserve.npu.execution.staged import Part, Staged
from npuserve.npu.execution.state_store import StateStore, block_bytes, slot_bytes
from npuserve.npu.execution.step_drafting import RowDrafting, SampleDrafting, StepDrafting
from npuserve.npu.execution.work import PromptRows, Work, pooled_rows, prompt_rows
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.layers.layer import Counts
from npuserve.npu.model.storage import idle_bytes, read_bytes, stored_bytes
from npuserve.npu.model.weights import ModelWeights
from npuserve.npu.step import NewRequest, Phase, Step, StepResult

DRAFTING_SPAN_STEPS = 7
"""One of so many steps is timed while it drafts, on a device where a span is further calls of its runtime. A prime,
since each second or fourth step may have prompts."""


class Runner:
    """Loaded model on a device, with its KV cache.

    backend: the device.
    num_blocks, block_size: size of the KV cache.
    num_slots: slots of fixed state; 0 for a model without such a state.
    kv_cache_dtype: "auto", "int8" or "fp8".
    max_model_len: maximum number of positions of a request.
    max_num_seqs, max_num_batched_tokens: rows and tokens of the largest step.
    max_drafts: most drafts of a step; see `Row.samples`.
    kernel_sampling: number of steps from one timed step to the next; 0 for none. `observe` gets the time of each call.
    prefill: backend that computes prompt chunks, with its weights; None if the device computes them.
    shared_weights: description of the weights in shared memory (`load.describe`), or None.
    cpu_kernels: CPU kernels in use, or None.
    ranks: group of the model's ranks. All of them launch the same steps.
    kv_offload_memory: most bytes of host memory for evicted blocks and states; 0 for none.
    draft: weights of a smaller model that drafts tokens, for `ModelConfig.draft`; None for none.
    draft_depths: numbers of tokens that can be drafted after a row where steps are captured as graphs, 0 among them;
        another number is rounded up. Any number can be elsewhere.
    capture_chunks: steps of any rows are captured where steps are (`load.chunk_obstacle`).

    Attributes beside these:

    max_drafts: 0 also where rows with drafts are much slower than decode rows.
    min_forced: least number of known tokens for which a chunk is faster than as many decode rows; 0 for none.
    host_blocks: the blocks and states in host memory; None for none.
    max_drafted_samples: most samples of a step that drafts tokens; None for any number.
    predicts: steps can draft tokens (`Row.predicts`): the model has a head for this, or there is a smaller one.
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
        shared_weights: Mapping[str, Any] | None = None,
        cpu_kernels: CpuKernels | None = None,
        ranks: Ranks = ALONE,
        num_slots: int = 0,
        max_drafts: int = 0,
        draft: ModelWeights | None = None,
        draft_depths: Sequence[int] = (0,),
        capture_chunks: bool = True,
        kv_offload_memory: int = 0,
    ):
        self.config = config
        self.cpu_kernels = cpu_kernels
        self.shared_weights = shared_weights
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.num_slots = num_slots
        dtype = weights.dtype
        self.dtype_name = str(dtype).removeprefix("torch.")
        self.backend_name = backend.name
        unplanned_bytes = sum(model.unplanned_bytes for model in (weights, draft) if model)
        self.weights_bytes = stored_bytes(config, dtype, backend) + unplanned_bytes
        self.read_bytes = read_bytes(config, dtype, backend) + weights.unplanned_reads
        can = backend.capabilities
        self.deterministic = can.deterministic
        self.backend = backend
        self.cache_dtype = backend.cache_dtype(kv_cache_dtype, dtype)
        self.token_bytes = block_bytes(config, block_size, self.cache_dtype, backend) / block_size
        self.slot_bytes = slot_bytes(config, dtype, backend)
        self._prompts: dict[int, NewRequest] = {}  # requests with prompt_logprobs
        self._kernel_sampling = kernel_sampling
        self._steps = 0
        self._sample_indexes: dict[int, int] = {}  # request -> index of its last sample in _device_ids[0]
        self._recording: Recording | None = None
        self._waiting: WaitingStep | None = None

        rows = min(max_num_seqs, max_num_batched_tokens)
        samples = min(rows + max_drafts, max_num_batched_tokens)
        max_drafts = samples - rows
        replaced = config.kernels_where(lambda kernel, sizes: backend.lacks_operator(kernel, sizes, dtype))
        self._kernels = KernelSet(
            backend.kernels, observe, backend.span, own=backend.own_kernels, layer_kernels=config.layer_kernels,
            replaced=replaced)
        model = Model.of(config, weights, max_model_len, self._kernels, backend, ranks)
        self._store = StateStore.allocate(
            config, num_blocks, block_size, self.cache_dtype, backend, num_slots, model_dtype=dtype)
        self.predicts = weights.mtp is not None or draft is not None
        depths = sorted(draft_depths) if self.predicts and can.padding_blocks else []
        depth = max(depths, default=0)
        # Ids sampled by the last step, and drafts after each. Those of two steps may be on the host.
        self._device_ids = backend.empty((1 + depth, samples), torch.int64).zero_()
        self._host_ids = [backend.host_buffer((1 + depth) * samples, dtype=torch.int64) for _ in range(2)]
        allocate = partial(
            StateStore.allocate, num_blocks=num_blocks, block_size=block_size, dtype=self.cache_dtype, backend=backend,
            model_dtype=dtype)
        predictor = predictor_of(
            model, draft, backend, allocate, block_size, self._device_ids, max_num_batched_tokens if depths else 0,
            max_num_batched_tokens)
        captured = predictor if depths else None
        self._sampler = Sampler(self._kernels, config.vocab_size, backend, max_num_seqs)
        self._masks = MaskBuffers(samples, config.vocab_size, backend)
        self._buffers = BatchBuffers(
            max_num_batched_tokens, rows, -(-max_model_len // block_size), block_size,
            num_blocks if can.padding_blocks else None, backend, config.vocab_size, num_slots, max_drafts,
            has_mtp=predictor is not None and predictor.reads_next_ids,
            following=captured.num_following(depth) if captured else None)
        most_samples = self._buffers.drafting.most_samples if self._buffers.drafting else samples
        self.max_drafted_samples = most_samples if most_samples < samples else None
        self._prefill = HostPrefill(
            *prefill, backend, self._store, config, num_blocks, block_size, max_model_len=max_model_len, max_rows=rows,
            max_tokens=max_num_batched_tokens, observe=observe) if prefill else DevicePrefill()
        self._stores = [self._store, *([predictor.store] if predictor else [])]
        paged = [tensor for store in self._stores for tensor in store.paged_tensors]
        longest = -(-max_model_len // block_size)
        self.host_blocks = (HostBlocks(backend, paged, kv_offload_memory, self._store.fixed, num_early=longest)
                            if kv_offload_memory else None)
        self._pages = PagePopulation(
            [*((backend.memory, tensor) for tensor in self._cached), *self._prefill.mirror])
        self._pages.map_first()
        self._forward = Forward(model, self._store, self._sampler, self._buffers, self._device_ids[0], captured,
                                predictor.reader if predictor else None)
        # Collectives by torch.distributed cannot be recorded on the CPU.
        is_recordable = ranks.size == 1 or not can.shares_memory or ranks.region is not None
        self._capturable = CapturableSteps(self._forward, self._buffers, samples, captured, depths)
        captures = capture_steps(
            backend, self._buffers, self._capturable, rows,
            mode=backend.settings.capture_mode if is_recordable else "off", captures_chunks=capture_chunks,
            may_drop=ranks.size == 1)
        self._dispatch = Dispatch(captures, self._buffers, can)
        self._drafting: StepDrafting | None = None
        if captured:
            self._drafting = SampleDrafting(captured, self._buffers, self._dispatch, depths)
        elif predictor:
            self._drafting = RowDrafting(predictor, self._buffers)
        continues = self._prefill.continues_answers
        self.min_forced = self._dispatch.min_forced if continues else 0
        self.max_drafts = max_drafts if continues and self._dispatch.computes_drafts else 0
        if can.compiles or (can.sampler_filters and not self._dispatch.decodes.sampled):
            self._warm_up(samples, dtype)

    @cached_property
    def expert_balance(self) -> ExpertBalance:
        """Balance of the work of the model's experts."""
        layers = [index for index, blocks in enumerate(self.config.layers) for block in blocks
                  if isinstance(block.layer.state, Counts)]
        return ExpertBalance(list(zip(layers, self._store.counters, strict=True)))

    def unread_expert_bytes(self, tokens: int) -> int:
        """Return the part of `read_bytes` that a step of `tokens` tokens does not read (`idle_bytes`)."""
        return idle_bytes(self.config, getattr(torch, self.dtype_name), self.backend, tokens)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return self.config.num_parameters

    @property
    def fallbacks(self) -> list[str]:
        """Names of the kernels that run as golden functions, or without the device's operator for them."""
        return self._kernels.fallbacks

    def is_timed(self, step: Step) -> bool:
        """Return True if `launch` will time the kernels of `step`, which is launched next."""
        if self._recording is None:
            return self._kernel_sampling > 0 and self._steps % self._kernel_sampling == 0
        return self._recording.times(step)

    def record(self, recording: Recording | None) -> None:
        """Record the steps that are launched from now on, for a profile; None for no record."""
        self._recording = recording

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache and of the slots of fixed state."""
        return sum(tensor.nbytes for tensor in self._cached)

    @property
    def _cached(self) -> list[Tensor]:
        """Tensors of the KV cache and of the fixed state, those of the head for drafts among them."""
        return [tensor for store in self._stores for tensor in store.tensors]

    @torch.inference_mode()
    def compute_largest_step(self) -> None:
        """Compute a step of as many tokens, samples and drafts as possible kernel by kernel, to measure its memory.

        Its rows have no context. The memory of attention is that of the longest one, since it depends on the tables.
        """
        self._buffers.clear()
        hidden = self._capturable.largest()
        self._forward.warm_up(hidden[: self._device_ids.shape[1]])
        self.backend.synchronize()

    def map_cache(self) -> None:
        """Map the remaining pages of the KV cache in the background. Call it once, at the end of the start."""
        self._pages.start()

    def launch(self, step: Step, timed: bool | None = None) -> LaunchedStep:
        """Start a step. `step` and its objects are read only until this returns.

        timed: `is_timed` of rank 0, since timed kernels may compute another number of rows; None to decide here.

        If a row is constrained, only the forward pass is queued. `sample` must then be called for the step, before the
        next `launch` and before `collect` of the step.

        At most two steps may be in flight. Raises ValueError for more rows or tokens than the buffers hold, KeyError
        for unknown requests, and RuntimeError if the previous step lacks its masks.
        """
        if self._recording is None:
            return self._launch(step, self.is_timed(step) if timed is None else timed)
        return self._recording.launch(step, self._launch)

    def _launch(self, step: Step, timed: bool) -> LaunchedStep:
        self._complete()
        self._update_requests(step)
        if self.host_blocks is not None and (step.saves or step.loads):
            self.host_blocks.launch(step.saves, step.loads)
        if not step.rows:
            return LaunchedStep([], self._host_ids[0][:0].view(1, 0))
        if copies := [(row.state_source, row.state_slot) for row in step.rows if row.state_source >= 0]:
            self.backend.enqueue(partial(self._store.copy_slots, copies, self.backend))
        staged = self._buffers.fill(self._prefill.parts(step.rows, self._dispatch), self._sample_indexes)
        works: list[Work] = []
        requests: list[int] = []
        constrained: list[ConstrainedRow] = []
        is_constrained = any(part.constrained for part in staged.parts)
        for part in staged.parts:
            works.append(self._plan(part, len(requests), staged, is_constrained=is_constrained, is_timed=timed))
            constrained += [ConstrainedRow(len(requests) + i, *part.samples[i]) for i in part.constrained]
            requests += [request_id for request_id, _ in part.samples]
        self._sample_indexes = {request_id: index for index, request_id in enumerate(requests)}
        phase = step.phase if timed else None
        self._steps += 1
        self._pages.begin_step()
        depth = max(work.drafts.depth if work.drafts else 0 for work in works)
        host_ids = self._host_ids[self._steps % 2][: (1 + depth) * len(requests)].fill_(MISSING)
        launched = LaunchedStep(requests, host_ids.view(1 + depth, len(requests)))
        launched.predicting = predicting_rows(staged.parts[0].rows) if depth else []
        device_ids = self._device_ids[: 1 + depth, : len(requests)]
        staged.seal()
        host_work = works.pop() if self._prefill.is_on_host(works[-1].part) else None
        self._prefill.written(works)
        if host_work is None and not constrained:
            launched.output = self.backend.enqueue(partial(self._run, staged, works, device_ids, launched.ids, phase))
            return launched
        queued = self.backend.enqueue(partial(self._begin, staged, works, phase, not constrained))
        self._waiting = WaitingStep(launched, queued, constrained, device_ids, phase)
        self._waiting.host = self._prefill.launch(host_work, phase)
        return launched

    def _update_requests(self, step: Step) -> None:
        """Remove the requests that ended, and add the new ones."""
        for request_id in step.ended:
            self._sampler.remove(request_id)
            self._prompts.pop(request_id, None)
        for request in step.new:
            self._sampler.add(request)
            if request.sampling.prompt_logprobs is not None:
                self._prompts[request.request_id] = request

    def sample(self, launched: LaunchedStep, masks: Mapping[int, Array]) -> None:
        """Queue the sampling of a step that was launched with constrained rows. Call it once.

        masks: request -> [ceil(vocabulary / 32)] int32; bit i of word j allows token 32 j + i. A row with n samples has
            up to n masks; its samples without one are not valid. They are read only until this returns. The tokens of a
            constrained row without a mask are discarded: a later step may sample the same position. Masks of other
            requests are ignored.

        allowed_token_ids and min_tokens restrict a mask, unless no id would remain. Raises ValueError for a mask of
        another form, or one that allows no id of the vocabulary; nothing is queued then. Raises RuntimeError for a step
        that needs no masks or has them.
        """
        if (waiting := self._waiting) is None or waiting.launched is not launched or not waiting.constrained:
            raise RuntimeError("the step needs no masks, or has them already")
        waiting.masks = self._masks.fill(waiting.constrained, masks, self._sampler.restrict)
        waiting.valid = {row.request_id: num_valid(masks.get(row.request_id)) for row in waiting.constrained}
        self._sampler.discard(request_id for request_id, valid in waiting.valid.items() if not valid)
        waiting.constrained = []
        if waiting.host is None:
            self._complete()

    def ready(self, launched: LaunchedStep) -> bool:
        """Return True if `collect` would not block on the step."""
        if (waiting := self._waiting) and waiting.launched is launched:
            if not waiting.is_ready():
                return False
            self._complete()
        output = launched.output
        return output is None or (output.done() and (fetched := output.wait().fetched) is not None and fetched.done())

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait for a step and return its result. Steps are collected in the order of their launch.

        Raises RuntimeError if the step lacks its masks.
        """
        if self._waiting and self._waiting.launched is launched:
            self._complete()
        if launched.output is None:
            return StepResult({}, {}, {}, 0.0)
        output = launched.output.wait()
        result = output.result(launched)
        self._pages.end_step()
        if launched.record:
            launched.record(result.device_seconds, output)
        for timings in output.timings:
            timings.report()
        return result

    def _complete(self) -> None:
        """Queue the rest of a step, after waiting for chunks that the host computes.

        Raises RuntimeError if the step lacks its masks.
        """
        if (waiting := self._waiting) is None:
            return
        if waiting.constrained:
            requests = ", ".join(str(row.request_id) for row in waiting.constrained)
            raise RuntimeError(f"`sample` was not called for the step with constrained requests {requests}")
        self._waiting = None
        if waiting.host:
            waiting.host.chunk.wait()
        waiting.launched.output = self.backend.enqueue(partial(self._finish, waiting))

    # Planning on the host

    def _plan(
        self, part: Part, first: int, staged: Staged, *, is_constrained: bool, is_timed: bool
    ) -> Work:
        """Plan a part.

        is_constrained: the step's sampling is queued later.
        is_timed: the kernels of the step are timed.
        """
        is_on_host = self._prefill.is_on_host(part)
        sampled_rows = 0 if is_constrained or is_on_host else self._dispatch.sampled_rows(part)
        inputs = self._buffers.host_sampling(sampled_rows) if sampled_rows else None
        drafts = {row.request_id: row.drafts for row in part.rows if row.samples > 1}
        plan = self._sampler.plan(part.samples, staged.put, frozenset(part.constrained), inputs, drafts)
        prompt = prompt_rows(part, self._prompts, staged.put) if self._prompts else []
        pooled = pooled_rows(part, staged.put)
        if is_on_host:
            return Work(part, first, plan, None, prompt, pooled)
        argmax = isinstance(plan, ArgmaxPlan) and not is_constrained
        filters = plan.filters if isinstance(plan, FixedPlan) else None
        selection = self._dispatch.select(part, argmax=argmax, filters=filters)
        if selection is not None and selection.padded_tokens:
            self._buffers.pad_tokens(part, selection.padded_tokens)
        planned = None
        if self._drafting is not None:
            planned = self._drafting.plan(part, first, selection, staged.put, is_timed=is_timed)
        times_drafts = self.backend.capabilities.shares_memory or self._steps % DRAFTING_SPAN_STEPS == 0
        return Work(part, first, plan, selection, prompt, pooled, planned, times_drafts)

    # Work in the device's queue

    def _run(
        self, staged: Staged, works: list[Work], device_ids: Tensor, host_ids: Tensor, phase: Phase | None
    ) -> StepOutput:
        """Compute a step.

        device_ids, host_ids: sampled ids and drafts on the device, and where they are copied to.
        phase: phase of a step whose kernels are timed; None for other steps.

        On a CPU the cores are idle while this waits for the interpreter lock: `launch` prepares as much as possible.
        """
        return self._end(self._begin(staged, works, phase), device_ids, host_ids)

    def _begin(self, staged: Staged, works: list[Work], phase: Phase | None, samples: bool = True) -> StepOutput:
        """Compute a step's parts. samples: sample them too; otherwise they are `unsampled`."""
        staged.upload()
        self.backend.deliver()
        output = StepOutput([self.backend.span()])
        with self._timed(phase, output) as timings:
            for work in works:
                hidden = self._compute(work, output, timings)
                if hidden is not None and samples:
                    self._sample(work, hidden, output)
                elif hidden is not None:
                    output.unsampled.append((work, hidden))
        output.spans[-1].stop()
        return output

    def _finish(self, waiting: WaitingStep) -> StepOutput:
        """Compute the rest of a step, whose results of the host are complete."""
        self.backend.deliver()
        span = self.backend.span()
        output = waiting.queued.wait()
        output.spans.append(span)
        if waiting.masks:
            waiting.masks.upload()
        if waiting.host:
            chunk = waiting.host.chunk.wait()
            output.unsampled.append((waiting.host.work, chunk.upload()))
            output.timings += chunk.timings
        with self._timed(waiting.phase, output):
            for work, hidden in output.unsampled:
                self._sample(work, hidden, output, waiting)
        output.unsampled.clear()
        span.stop()
        return self._end(output, waiting.device_ids, waiting.launched.ids)

    def _end(self, output: StepOutput, device_ids: Tensor, host_ids: Tensor) -> StepOutput:
        """Queue the copies of a step's results to the host."""
        output.reports = [(requests, logprobs.fetch(self.backend)) for requests, logprobs in output.reports]
        output.prompt = [(request_id, logprobs.fetch(self.backend)) for request_id, logprobs in output.prompt]
        output.pooled = [(requests, self._fetch(hidden)) for requests, hidden in output.pooled]
        output.drafted = [Drafts(requests, self._fetch(ids)) for requests, ids in output.drafted]
        output.fetched = self.backend.fetch(device_ids, host_ids)
        return output

    def _fetch(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host. The copy is complete once a later one is."""
        buffer = self.backend.host_buffer(*tensor.shape, dtype=tensor.dtype)
        self.backend.fetch(tensor, buffer)
        return buffer

    @contextmanager
    def _timed(self, phase: Phase | None, output: StepOutput) -> Iterator[Timings | None]:
        """Time the kernels called within the context if the step has a phase."""
        if phase is None:
            yield None
            return
        with self._kernels.timed(phase) as timings:
            output.timings.append(timings)
            yield timings

    def _compute(self, work: Work, output: StepOutput, timings: Timings | None) -> Tensor | None:
        """Return the hidden states of a part; None if its sampled ids are in `_device_ids`."""
        part = work.part
        selection = work.selection
        if isinstance(work.plan, FixedPlan):
            self._sampler.prepare(work.plan)
        if self._drafting is not None:
            self._drafting.prepare(part)
        hidden = replay(selection.captured, part, timings) if selection else None
        if hidden is None or selection is None:
            return self._forward.hidden(self._dispatch.batch(part, selection))[: part.tokens]
        output.captured = True
        if selection.chooses:
            output.captured_decodes += part.decodes
            self._report(work, hidden, output)
            self._predict(work, hidden, output)
            return None
        output.decoder_decodes += part.decodes
        return hidden

    def _sample(self, work: Work, hidden: Tensor, output: StepOutput, waiting: WaitingStep | None = None) -> None:
        """Sample a part; its sampled ids are then in `_device_ids`. Draft tokens after them.

        hidden: hidden states of all its tokens, or of its sampling tokens.
        waiting: the step, if its rows may have masks.
        """
        self._report(work, hidden, output)
        if work.part.samples:
            self._choose(work, hidden, output, waiting)
        self._predict(work, hidden, output)

    def _predict(self, work: Work, hidden: Tensor, output: StepOutput) -> None:
        """Draft tokens after a part whose sampled ids are in `_device_ids`, if that was planned."""
        if work.drafts is None:
            return
        span = self.backend.span() if work.times_drafts else None
        output.drafted += work.drafts.queue(hidden)
        if span is not None:
            span.stop()
            output.head_spans.append(span)

    def _choose(self, work: Work, hidden: Tensor, output: StepOutput, waiting: WaitingStep | None) -> None:
        part = work.part
        plan = work.plan
        count = len(part.samples)
        sampling = hidden if count == len(hidden) else hidden[self._buffers.batch(part).sample_tokens]
        masks = waiting.masks.of(work.first, count) if waiting and waiting.masks and part.constrained else None
        if isinstance(plan, ArgmaxPlan):
            self._forward.choose_argmax(sampling, work.first, masks)
        elif isinstance(plan, FixedPlan):
            self._forward.choose_fixed(sampling, plan.filters, work.first)
        else:
            valid = waiting.valid if waiting else {}
            logprobs = self._forward.choose_planned(sampling, plan, work.first, masks, valid)
            if logprobs and plan.reported:
                output.reports.append(([part.samples[row][0] for row in plan.reported.rows], logprobs))

    def _report(self, work: Work, hidden: Tensor, output: StepOutput) -> None:
        """Add what is wanted of a part besides its sampled ids: reports of its prompt tokens, and hidden states."""
        output.prompt += self._prompt_logprobs(hidden, work.prompt)
        if work.pooled:
            output.pooled.append((work.pooled.requests, hidden[work.pooled.tokens].float()))

    @torch.inference_mode()
    def _warm_up(self, max_samples: int, dtype: torch.dtype) -> None:
        """Call LM head and sampler for each number of samples that is compiled separately, so that no request waits.

        Without captured samplers too: the first call of an operator loads it.
        """
        hidden = self.backend.empty((max_samples, self.config.hidden_size), dtype).zero_()
        for samples in {max_samples, *(1 << n for n in range(max_samples.bit_length()))}:
            self._forward.warm_up(hidden[:samples])
        self.backend.synchronize()

    def _prompt_logprobs(self, hidden: Tensor, prompt: list[PromptRows]) -> list[tuple[int, Logprobs]]:
        reports: list[tuple[int, Logprobs]] = []
        for rows in prompt:
            predicting = hidden[rows.begin : rows.begin + len(rows.next_ids)]
            reports += [(rows.request_id, logprobs)
                        for logprobs in self._forward.prompt_logprobs(predicting, rows.next_ids, rows.n)]
        return reports
