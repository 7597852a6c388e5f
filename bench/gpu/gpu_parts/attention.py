"""Attention of long prompts: the kernel's configurations beside the libraries that come with torch.

An option that a version of torch or a GPU does not have is a row with the error. Each option is compared with a float32
computation of some rows. Its output is poisoned by the option before it, since torch reuses the memory.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_parts.shapes import SHAPES
from gpu_parts.worker import Context, Units, lost
from npuserve.kernels.bench.ceilings import timed
from npuserve.kernels.kv_cache import QUANTIZED, quantize_heads
from npuserve.kernels.triton import LABEL

SIZE = 32
"""Tokens of a block."""

COMPARED = 24
"""Queries that are compared with the float32 computation."""

WORST = {"": 5e-2, "int8": 5e-2, "fp8": 0.25}
"""Maximum difference of the kernel's outputs by cache; the first ones are single values of up to 4."""

PASS_SECONDS = 0.002
COMPILERS = 6
OWN = "paged_attention"

Job = tuple[int, int]
"""(queries, context): causal, the queries are the last tokens of the context."""


@dataclass
class Inputs:
    """Random queries [n, Hq, D], and keys and values in a paged cache and in order ([n, Hkv, D])."""

    q: Tensor
    caches: tuple[Tensor, Tensor]
    ordered: tuple[Tensor, Tensor]
    table: Tensor
    _expected: dict[Job, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def make(cls, context: Context) -> Inputs:
        shape, longest, device = SHAPES[context.args.shape], max(c for _, c in jobs(context)), context.backend.device
        heads, kv_heads, dim = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        generator = torch.Generator(device).manual_seed(context.args.seed)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, device=device, generator=generator, dtype=torch.bfloat16)

        blocks = -(-longest // SIZE)
        table = torch.randperm(blocks, device=device, generator=generator).int()
        keys, values = randn(blocks, SIZE, kv_heads, dim), randn(blocks, SIZE, kv_heads, dim)
        return cls(randn(longest, heads, dim), (keys, values),
                   (keys[table.long()].flatten(0, 1), values[table.long()].flatten(0, 1)), table[None])

    def difference(self, job: Job, made: Tensor) -> float:
        """Return the largest difference of some rows from a float32 computation. made: [queries, Hq, D]."""
        if job not in self._expected:
            n, context = job
            rows = torch.linspace(0, n - 1, min(n, COMPARED), device=self.q.device).long()
            keys, values = (x[:context].float().transpose(0, 1) for x in self.ordered)
            q = self.q[rows].float().unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
            scores = q @ keys[:, None].transpose(2, 3) * q.shape[-1] ** -0.5
            hidden = torch.arange(context, device=rows.device) > context - n + rows[:, None]
            weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
            self._expected[job] = rows, (weights @ values[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
        rows, expected = self._expected[job]
        return float((made[rows].float() - expected).abs().max())


Prepare = Callable[[Inputs, Job], Callable[[], Tensor]]
"""Returns a call that computes [queries, Hq, D]. Raises ValueError for a job that the option does not take."""


def jobs(context: Context) -> list[Job]:
    if context.toy:
        return [(40, 40), (24, 72)]
    whole = (512, 2048, 8192) if context.quick else (512, 2048, 4096, 8192, 32768)
    return [*((n, n) for n in whole), (512, 8192), (2048, 8192), *([] if context.quick else [(2048, 32768)])]


def units(context: Context) -> Units:
    if context.backend.kernels != LABEL:
        return
    if context.gpu:
        yield "compilation", _compilation(context)
    for name, prepare in _options(context).items():
        yield name, _unit(context, name, prepare)
    yield "gather", _gather(context)
    yield "new lengths", _new_lengths(context)


def _options(context: Context) -> dict[str, Prepare]:
    from npuserve.kernels.triton.launch_attention import CONFIGS

    found: dict[str, Prepare] = {
        OWN: _own(None), "cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION, False),
        "cuDNN, expanded keys": _sdpa(SDPBackend.CUDNN_ATTENTION, True),
        "FlashAttention of torch": _sdpa(SDPBackend.FLASH_ATTENTION, True),
        "FlashAttention of torch, variable lengths": _variable, "cuDNN in two parts": _two_parts}
    found |= {f"{OWN} {config}": _own(config) for config in CONFIGS[True][: 1 if context.toy else None]}
    return found | {f"{OWN}, {name}": _own(None, name) for name in QUANTIZED}


def _own(config: Any, cached: str = "") -> Prepare:
    def prepare(inputs: Inputs, job: Job) -> Callable[[], Tensor]:
        from npuserve.kernels.triton import launch_attention

        (n, context), device = job, inputs.q.device
        caches: Any = [quantize_heads(x, values=QUANTIZED[cached]) if cached else x for x in inputs.caches]
        lengths, starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([context], [0, n]))
        return lambda: launch_attention.paged_attention(
            inputs.q[:n], *caches, inputs.table, lengths, starts, inputs.q.shape[-1] ** -0.5, False, chunks=config
        ).view_as(inputs.q[:n])

    return prepare


def _heads_first(inputs: Inputs, job: Job, expand: bool) -> list[Tensor]:
    """Return queries, keys and values [1, heads, tokens, D], views of [tokens, heads, D]."""
    n, context = job
    group = inputs.q.shape[1] // inputs.ordered[0].shape[1]
    keys, values = (x[:context].repeat_interleave(group, 1) if expand else x[:context] for x in inputs.ordered)
    return [x.transpose(0, 1)[None] for x in (inputs.q[:n], keys, values)]


def _sdpa(backend: SDPBackend, expand: bool) -> Prepare:
    def prepare(inputs: Inputs, job: Job) -> Callable[[], Tensor]:
        if job[0] != job[1]:
            raise ValueError("scaled_dot_product_attention aligns causal masks to the first key")
        q, k, v = _heads_first(inputs, job, expand)

        def call() -> Tensor:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not expand)
            return out[0].transpose(0, 1)

        return call

    return prepare


def _variable(inputs: Inputs, job: Job) -> Callable[[], Tensor]:
    (n, context), device = job, inputs.q.device
    starts = [torch.tensor([0, x], dtype=torch.int32, device=device) for x in job]
    q, (k, v) = inputs.q[:n], (x[:context] for x in inputs.ordered)
    function = torch.ops.aten._flash_attention_forward
    return lambda: function(q, k, v, *starts, n, context, 0.0, True, False, scale=q.shape[-1] ** -0.5)[0]


def _two_parts(inputs: Inputs, job: Job) -> Callable[[], Tensor]:
    """Return a call that merges attention to the tokens before the queries with causal attention among the queries."""
    n, context = job
    if n == context:
        raise ValueError("a whole prompt is one part")
    q, k, v = _heads_first(inputs, job, False)
    before = context - n

    def part(tokens: slice, causal: bool) -> tuple[Tensor, Tensor]:
        made = torch.ops.aten._cudnn_attention_forward(
            q, k[:, :, tokens], v[:, :, tokens], None, None, None, n, len(range(context)[tokens]), True, 0.0, causal,
            False, scale=q.shape[-1] ** -0.5)
        return made[0], made[1].view(1, q.shape[1], n, 1)

    def call() -> Tensor:
        (a, in_a), (b, in_b) = part(slice(before), False), part(slice(before, context), True)
        return torch.lerp(b.float(), a.float(), torch.sigmoid(in_a - in_b)).bfloat16()[0].transpose(0, 1)

    return call


def _unit(context: Context, name: str, prepare: Prepare) -> Callable[[], Iterator[dict[str, Any]]]:
    @torch.inference_mode()
    def measured(job: Job) -> dict[str, Any]:
        inputs = context.only("attention", lambda: Inputs.make(context))
        try:
            call = prepare(inputs, job)
            difference = inputs.difference(job, call())
            seconds, captured = _seconds(context, call)
        except Exception as error:
            if lost(error):
                raise
            return {"said": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"}
        n, all_keys = job
        shape = inputs.q.shape
        operations = 4 * shape[1] * shape[2] * (n * (all_keys - n) + n * (n + 1) // 2)
        return {"us": seconds * 1e6, "TFLOP/s": operations / seconds / 1e12, "captured": captured,
                "largest difference": difference,
                **({"ok": difference <= WORST.get(name.partition(", ")[2], WORST[""])} if name.startswith(OWN) else {})}

    def run() -> Iterator[dict[str, Any]]:
        said = ""
        for job in jobs(context):
            row = measured(job)
            if "said" not in row or row["said"] != said:
                yield {"table": "Attention of prompts", "option": name, "queries": job[0], "context": job[1], **row}
            said = row.get("said", said)

    return run


def _seconds(context: Context, call: Callable[[], Tensor]) -> tuple[float, bool]:
    """Return the median seconds of a warm call, and True if a graph can hold it."""
    first = timed(context.machine, call)
    count = 1 if context.toy else max(1, min(50, int(PASS_SECONDS / first)))

    def calls() -> Tensor:
        for _ in range(count):
            made = call()
        return made

    try:
        replay = context.machine.record(calls)
    except Exception as error:
        if lost(error):
            raise
        replay = None
    seconds = sorted(timed(context.machine, replay or calls) for _ in range(3 if context.toy else 7))
    return seconds[len(seconds) // 2] / count, replay is not None


def _gather(context: Context) -> Callable[[], Iterator[dict[str, Any]]]:
    @torch.inference_mode()
    def run() -> Iterator[dict[str, Any]]:
        inputs = context.only("attention", lambda: Inputs.make(context))
        for tokens in sorted({c for _, c in jobs(context)}):
            blocks = inputs.table[0, : -(-tokens // SIZE)].long()

            def copies(blocks: Tensor = blocks) -> Tensor:
                return torch.stack([x.index_select(0, blocks) for x in inputs.caches])

            seconds, _ = _seconds(context, copies)
            moved = 2 * copies().nbytes  # index_select and stack each write
            yield {"table": "Gather of keys and values", "context": tokens, "us": seconds * 1e6,
                   "GB/s": 2 * moved / seconds / 1e9}

    return run


def _new_lengths(context: Context) -> Callable[[], Iterator[dict[str, Any]]]:
    """Time the first call at lengths that no call had, for which cuDNN plans anew."""

    @torch.inference_mode()
    def run() -> Iterator[dict[str, Any]]:
        inputs = context.only("attention", lambda: Inputs.make(context))
        for name, prepare in (("cuDNN", _sdpa(SDPBackend.CUDNN_ATTENTION, False)),
                              ("FlashAttention of torch, variable lengths", _variable)):
            for n in (30,) if context.toy else (1999, 2029):
                try:
                    call = prepare(inputs, (n, n))
                    context.backend.synchronize()
                    began = time.perf_counter()
                    call()
                    context.backend.synchronize()
                except Exception as error:
                    if lost(error):
                        raise
                    break
                yield {"table": "First call at a new length", "option": name, "tokens": n,
                       "ms": (time.perf_counter() - began) * 1e3}

    return run


def _compilation(context: Context) -> Callable[[], Iterator[dict[str, Any]]]:
    """Compile the configurations in processes side by side; Triton's cache on disk keeps the results."""

    def run() -> Iterator[dict[str, Any]]:
        from npuserve.kernels.triton.launch_attention import CONFIGS

        shape, began = SHAPES[context.args.shape], time.perf_counter()
        heads = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
        with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
            failed = [pool.submit(_compile, heads, config) for config in (None, *CONFIGS[True])]
            errors = [repr(each.exception()) for each in failed if each.exception()]
        yield {"table": "Compilation", "seconds": time.perf_counter() - began, "said": "; ".join(errors)[:300]}

    return run


def _compile(heads: tuple[int, int, int], config: Any) -> None:
    from npuserve.kernels.triton import launch_attention

    device, (q_heads, kv_heads, dim) = torch.device("cuda"), heads
    q, cache = (torch.zeros(*size, device=device, dtype=torch.bfloat16) for size in (
        (2, q_heads, dim), (1, SIZE, kv_heads, dim)))
    table, lengths, starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0]], [2], [0, 2]))
    launch_attention.paged_attention(q, cache, cache, table, lengths, starts, 1.0, False, chunks=config)
