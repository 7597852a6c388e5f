"""A step taken apart, to find the first kernel that is wrong.

1. A prompt step and a decode step of random tokens are executed on golden functions alone, from end to end.
2. The same steps on the backend's kernels. The results of each call are compared with those of the golden function for
   the very same arguments, and with those of the first pass.
3. The same steps as the backend captures them, which must give the same hidden states to the last bit.

A step may be cut short: to the first layers, without LM head, or with the logits of one row alone.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from npuserve.kernels.bench.accuracy import QUANTIZED
from npuserve.kernels.bench.tensors import tensors
from npuserve.kernels.native.choice import AUTO, Wanted
from npuserve.kernels.quantized import Int8
from npuserve.kernels.registry import GOLDEN, KERNELS, Implementation, KernelSet, Span, moved
from npuserve.npu.backends import select
from npuserve.npu.backends.base import Backend, Captured
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.batch import Batch, BatchBuffers, make_batch
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.kv_cache import KVCache
from npuserve.npu.model.config import HeadDtype, ModelConfig, ModelError
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.rope import cos_sin_table
from npuserve.npu.model.weights import choose_kernels
from npuserve.npu.step import Row

LmHead = Literal["full", "skip", "single"]

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of a call's `relative`: a few roundings of the dtype."""

REPLAYS = 5

Args = tuple[Any, ...]
Results = dict[str, Tensor]
"""result.0, ...: what a call returned, int8 being followed by its scale. argument.N: what its N-th argument was
afterwards, if it changed that; of int8 argument.N.scale, too."""


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel's call, compared.

    step: "prompt" or "decode". index: of the call in its step. shape: of its first result. difference: the largest, of
    any number. relative: the largest difference / (the golden number's size + the root mean square of its line); of
    whole numbers, the part that are others, but of quantized ones the largest difference. drift: `relative` against the
    golden pass. wrong: `relative` is not within the tolerance.
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
    """A captured step. same: its hidden states are those of the single calls, to the last bit. seconds: of the decoder,
    the median. in_kernels: of its kernels alone, added up, 0 where they cannot be timed."""

    step: str
    same: bool
    seconds: float
    in_kernels: float


@dataclass(frozen=True)
class Trace:
    """Of `rows` requests with prompts of so many tokens.

    lm_head: logits of all rows, of none, or of the first one alone.
    kv_cache_dtype: auto or int8.
    dump: a folder for STEP/INDEX-KERNEL.safetensors, each with a call's `Results`, with the golden function's for the
    same arguments ("golden." before the names) and with those of the golden pass ("pass."). Caches are in the golden
    layout.
    """

    model: Model
    backend: Backend
    rows: int
    prompt: int
    lm_head: LmHead
    dump: Path | None = None
    kv_cache_dtype: str = "auto"

    def run(self) -> Iterator[Call | Replay]:
        """The calls of both steps, and after those of each its replay, where the backend captures it."""
        config, size, dtype = self.model.config, self.backend.block_size, self.model.weights.norm.dtype
        blocks = -(-(self.prompt + 1) // size)
        total = self.rows * blocks
        cached = self.backend.cache_dtype(self.kv_cache_dtype, dtype)
        golden_cache = KVCache.allocate(config, total, size, cached, CpuBackend(native=False))
        cache, captured_cache = (
            KVCache.allocate(config, total, size, cached, self.backend) for _ in range(2))
        buffers = BatchBuffers(
            self.rows * self.prompt, self.rows, blocks, size, total if self.backend.padding_blocks else None,
            self.backend)
        captured_decode: Captured | None = None
        with torch.no_grad():
            if self.backend.padding_blocks:
                captured_decode = self.backend.capture(
                    lambda rows: self.model.hidden(buffers.decode(rows), captured_cache), self.rows, decode=True)
                buffers.clear()
            captured = self.backend.capture(
                lambda tokens: self.model.hidden(buffers.tokens(tokens), captured_cache), self.rows * self.prompt,
                decode=False)
        for step, rows in self._steps(blocks):
            calls, hidden = self.backend.enqueue(partial(self._single, step, rows, golden_cache, cache)).wait()
            yield from calls
            replayed = captured if step == "prompt" else captured_decode or captured
            if replayed and sum(len(row.token_ids) for row in rows) <= replayed.largest:
                yield self._replay(step, rows, hidden, buffers, replayed)
            else:  # what a replay would have left there
                for own, other in zip(captured_cache.tensors, cache.tensors, strict=True):
                    own.copy_(other)

    @torch.no_grad()
    @torch.inference_mode(False)  # in which tensors count what is written to them
    def _single(
        self, step: str, rows: list[Row], golden_cache: KVCache, cache: KVCache
    ) -> tuple[list[Call], Tensor]:
        """A step's calls, one by one, and its hidden states."""
        batch = make_batch(rows, self.backend.block_size, self.backend)
        expected: list[Results] = []
        self._forward(_Tapped(GOLDEN, _golden_call(expected)), batch, golden_cache)
        calls: list[Call] = []
        hidden = self._forward(_Tapped(self.backend.kernels, self._compared(step, expected, calls)), batch, cache)
        if self.lm_head != "skip":
            calls.append(self._argmax(step, len(calls), self._sampling(hidden, batch)))
        return calls, hidden

    def _replay(
        self, step: str, rows: list[Row], hidden: Tensor, buffers: BatchBuffers, captured: Captured
    ) -> Replay:
        count = sum(len(row.token_ids) for row in rows)
        staged = buffers.fill([(rows, captured.size(count) if step == "decode" else len(rows))])
        part = staged.parts[0]
        if step == "prompt" and self.backend.padding_blocks:
            buffers.pad(part, captured.size(count))

        def replay() -> tuple[bool, list[Span], list[tuple[str, float]]]:
            staged.upload()
            same = torch.equal(captured.replay(part.tokens, part.context_lens), hidden)
            spans = []
            for _ in range(REPLAYS):
                spans.append(self.backend.span())
                captured.replay(part.tokens, part.context_lens)
                spans[-1].stop()
            timed = captured.replay_timed(part.tokens, part.context_lens)
            return same, spans, timed[1] if timed else []

        same, spans, calls = self.backend.enqueue(replay).wait()
        self.backend.synchronize()
        return Replay(step, same, statistics.median(span.read() for span in spans), sum(s for _, s in calls))

    def _steps(self, blocks: int) -> Iterator[tuple[str, list[Row]]]:
        ids = torch.randint(self.model.config.vocab_size, (self.rows, self.prompt + 1),
                            generator=torch.Generator().manual_seed(0)).tolist()
        own = [list(range(row * blocks, (row + 1) * blocks)) for row in range(self.rows)]
        yield "prompt", [Row(r, ids[r][:-1], 0, own[r], True) for r in range(self.rows)]
        yield "decode", [Row(r, ids[r][-1:], self.prompt, own[r], True) for r in range(self.rows)]

    def _forward(self, kernels: KernelSet, batch: Batch, cache: KVCache) -> Tensor:
        model = dataclasses.replace(self.model, kernels=kernels)
        hidden = model.hidden(batch, cache)
        if self.lm_head != "skip":
            kernels.greedy(model.logits(self._sampling(hidden, batch)), model.config.vocab_size)
        return hidden

    def _sampling(self, hidden: Tensor, batch: Batch) -> Tensor:
        tokens = batch.sample_tokens if self.lm_head == "full" else batch.sample_tokens[:1]
        return hidden[tokens.to(hidden.device)]

    def _argmax(self, step: str, index: int, hidden: Tensor) -> Call:
        """The fused LM head against the backend's own logits: two that are nearly equal are none of its faults."""
        ids = self.model.kernels.greedy(self.model.logits(hidden), self.model.config.vocab_size)[:, :1]
        others = _relative(self.model.likeliest(hidden)[:, :1], ids)
        return Call(step, index, "linear_argmax", tuple(ids.shape), 0.0, others, 0.0, others > 0)

    def _compared(self, step: str, expected: list[Results], calls: list[Call]) -> _Tap:
        """Makes calls, comparing them with `expected`, from which it takes what it used."""

        def call(name: str, function: Callable[..., Any], args: Args) -> Any:
            made = KERNELS[name].implementations.get(self.backend.kernels) or Implementation(KERNELS[name].golden)
            golden: list[Results] = []
            _golden_call(golden)(name, KERNELS[name].golden, _cloned(made.restore(args)))
            result = function(*args)
            got = _results(result, made.restore(args), list(golden[0]))
            of_pass = expected.pop(0)
            errors = [_relative(got[key], want) for key, want in golden[0].items()]
            tolerance = [_tolerance(x.dtype) for x in got.values()]
            wrong = any(not error <= most for error, most in zip(errors, tolerance, strict=True))
            difference = max(_difference(got[key], want) for key, want in golden[0].items())
            drift = max(_relative(got[key], want) for key, want in of_pass.items())
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
    layers: int = 0, emulate: Sequence[str] | None = None, lm_head_dtype: HeadDtype = "auto", cpu: Wanted = AUTO,
) -> tuple[Model, Backend]:
    """The model in `folder` without a runner, of its first `layers` layers; 0: of all. max_model_len: positions.

    Raises ModelError and BackendError as `load_runner` does, and ModelError for more layers than there are.
    cpu: of the CPU kernels.
    """
    device = select(backend, emulate)
    device.set_threads(threads)
    config = ModelConfig.from_folder(folder, lm_head_dtype)
    if layers > config.num_layers:
        raise ModelError(f"layers: {layers} are more than the {config.num_layers} that the model has")
    made: torch.dtype = getattr(torch, device.resolve_dtype(dtype, config.dtype))
    choose_kernels(config, made, [device], cpu)
    weights = load_weights(folder, config, made, device)
    layers = layers or config.num_layers
    return Model(
        dataclasses.replace(config, num_layers=layers),
        dataclasses.replace(weights, layers=weights.layers[:layers]),
        cos_sin_table(config.rope, config.head_dim, max_model_len or config.context_length, device.device),
        KernelSet(device.kernels),
    ), device


_Tap = Callable[[str, Callable[..., Any], Args], Any]
"""Makes a call: takes the kernel's name, its function, and the arguments."""


class _Tapped(KernelSet):
    """Kernels whose calls go through `tap`."""

    def __init__(self, backend: str, tap: _Tap):
        super().__init__(backend)

        def tapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: tap(name, function, args)

        self.__dict__.update({name: tapped(name, getattr(self, name)) for name in KERNELS})


def _golden_call(made: list[Results]) -> _Tap:
    """Makes calls in the golden layout, on the host, adding their results to `made`."""

    def call(name: str, function: Callable[..., Any], args: Args) -> Any:
        args = moved(args, "cpu")
        before = {name: x._version for name, x in _arguments(args).items()}
        result = function(*args)
        changed = [name for name, x in _arguments(args).items() if x._version > before[name]]
        made.append(_results(result, args, changed))
        return result

    return call


def _arguments(args: Args) -> Results:
    """The tensors among them that a kernel may change."""
    made: Results = {}
    for i, x in enumerate(args):
        if isinstance(x, Int8):
            made |= {f"argument.{i}": x.values, f"argument.{i}.scale": x.scale}
        elif isinstance(x, Tensor):
            made[f"argument.{i}"] = x
    return made


def _results(result: Any, args: Args, names: list[str]) -> Results:
    """What was returned, and those of the arguments that `names` names, copied; on the host."""
    made = {f"result.{i}": x.cpu() for i, x in enumerate(tensors(result))}
    return made | {name: x.cpu().clone() for name, x in _arguments(args).items() if name in names}


def _cloned(args: Args) -> Args:
    def cloned(x: Any) -> Any:
        if isinstance(x, Int8):
            return dataclasses.replace(x, values=cloned(x.values), scale=cloned(x.scale))
        return x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x

    return tuple(map(cloned, args))


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE[dtype] if dtype.is_floating_point else float(dtype in QUANTIZED)


def _difference(got: Tensor, want: Tensor) -> float:
    if not want.numel():
        return 0.0
    return float(torch.where(got == want, 0.0, (got.double() - want.double()).abs()).max())


def _relative(got: Tensor, want: Tensor) -> float:
    if not want.numel():
        return 0.0
    if want.dtype in QUANTIZED:
        return _difference(got, want)
    if not want.is_floating_point():
        return float((got != want).double().mean())
    wide = want.double()
    size = wide.abs() + wide.square().mean(-1, keepdim=True).sqrt()
    return float(torch.where(got == want, 0.0, (got.double() - wide).abs() / size).max())
