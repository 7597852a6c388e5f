"""Registry of kernels, and the choice of their implementations.

A kernel has a golden function in plain torch, cases for tests and timing, and implementations by backend. All of them
are in one file:

    @kernel("swiglu", cases=[...])
    def swiglu(gate_up): ...

    @native.implementation(swiglu)
    def _(gate_up): ...

A `KernelSet` is the choice of one engine. It is never shared, so that engines and tests with different backends are
independent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

GOLDEN = "golden"
"""Backend label of a kernel served by its golden function."""


@dataclass(frozen=True, slots=True)
class Case:
    """Shape on which a kernel is tested or timed.

    make: builds the kernel's arguments on the CPU from a CPU generator and the dtype of activations and weights.
    benchmark: the shape is for timing, at a real model's size, and too large for the tests.
    tolerance: maximum error of implementations that compute in lower precision than the dtype. 0 allows a few roundings
        of the dtype.

    Some devices lack what a case needs:

    head_dim: size of its attention heads; 0 without heads.
    cache: dtype of its KV cache, if that is quantized.
    zeros: its int8 numbers have zero points.
    float8: it has float8 numbers.
    int4: rows of its weight of 4 bits; 0 without one.
    w4a8: activations beside the weight of 4 bits are int8.
    ragged: groups of 4 bits do not divide the columns of experts.
    """

    name: str
    make: Callable[[torch.Generator, torch.dtype], tuple[Any, ...]]
    benchmark: bool = False
    head_dim: int = 0
    cache: torch.dtype | None = None
    zeros: bool = False
    float8: bool = False
    int4: int = 0
    w4a8: bool = False
    ragged: bool = False
    tolerance: float = 0.0


Adapter = Callable[[tuple[Any, ...]], tuple[Any, ...]]
"""Function from arguments to arguments."""


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply `change` to the leaves of a value, in tuples, lists and dataclasses, which are rebuilt."""
    if isinstance(value, tuple | list):
        return type(value)(map_leaves(change, x) for x in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: map_leaves(change, getattr(value, f.name)) for f in fields(value)})
    return change(value)


def moved(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Move tensors, also in sequences and dataclasses, to the device; other values are unchanged."""
    made: tuple[Any, ...] = map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, args)
    return made


def to_host(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move tensors, also in sequences and dataclasses, to the host."""
    return moved(args, "cpu")


@dataclass(frozen=True, slots=True)
class Implementation(Generic[P, R]):
    """Function of a kernel on one backend.

    adapt: converts golden arguments to this implementation's form, such as packed weights or the device's cache
        layout. Tests and benchmarks use it.
    restore: converts adapted arguments back to the golden form, after a call.
    result: converts a result to the golden form, before `restore`.
    """

    function: Callable[P, R]
    adapt: Adapter = lambda args: args
    restore: Adapter = lambda args: args
    result: Callable[[Any], Any] = lambda result: result


@dataclass(slots=True)
class Kernel(Generic[P, R]):
    """Kernel: a golden function and implementations by backend. Calling the kernel runs the golden function.

    dtypes: supported dtypes of activations; float64 serves only as reference.
    optional: it fuses other kernels. On a backend without an implementation these are called instead.
    by_layer: only the layers that name it (`Layer.kernels`) call it.
    """

    name: str
    golden: Callable[P, R]
    cases: Sequence[Case]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False
    by_layer: bool = False
    implementations: dict[str, Implementation[P, R]] = field(default_factory=dict)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.golden(*args, **kwargs)

    def implementation(self, backend: str, **adapters: Adapter) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register the decorated function for `backend`, with the adapters of `Implementation`.

        Raises ValueError if the backend has one already.
        """

        def register(function: Callable[P, R]) -> Callable[P, R]:
            if backend in self.implementations:
                raise ValueError(f"kernel {self.name}: a second implementation for {backend}")
            self.implementations[backend] = Implementation(function, **adapters)
            return function

        return register


KERNELS: dict[str, Kernel[..., Any]] = {}
"""All kernels, filled by importing `npuserve.kernels` and constant after that."""


def kernel(
    name: str, *, cases: Sequence[Case], dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    optional: bool = False, by_layer: bool = False,
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Register the decorated golden function as a kernel. Raises ValueError if the name is taken."""

    def define(golden: Callable[P, R]) -> Kernel[P, R]:
        if name in KERNELS:
            raise ValueError(f"a second kernel named {name}")
        made = Kernel(name, golden, cases, dtypes, optional, by_layer)
        KERNELS[name] = made
        return made

    return define


class Span(Protocol):
    """Time span on a device's clock. It begins when it is created."""

    def stop(self) -> None:
        """Mark the end, without waiting for it."""

    def read(self) -> float:
        """Return seconds. On a device, call it only after the stream is synchronized."""


class HostSpan:
    """Time span on the host's clock, for devices that compute synchronously. begin: of time.perf_counter."""

    __slots__ = ("_end", "begin")

    def __init__(self) -> None:
        self.begin = time.perf_counter()

    def stop(self) -> None:
        self._end = time.perf_counter()

    def read(self) -> float:
        return self._end - self.begin


@dataclass(frozen=True, slots=True)
class KnownSpan:
    """Time span with a given duration. begin: of time.perf_counter."""

    seconds: float
    begin: float = 0.0

    def stop(self) -> None:
        return

    def read(self) -> float:
        return self.seconds


Observe = Callable[[str, str, str, float], None]
"""Callback with (kernel, phase, backend label, seconds)."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Kernel calls of one timed step. Call `report` once, after the step is synchronized."""

    phase: str
    observe: Observe
    labels: dict[str, str]
    spans: list[tuple[str, Span]] = field(default_factory=list)

    def add(self, calls: Sequence[tuple[str, float]], begin: float = 0.0) -> None:
        """Add (kernel, seconds) of calls that were timed elsewhere and ran one after the other.

        begin: start of the first call, in seconds of time.perf_counter.
        """
        for name, seconds in calls:
            self.spans.append((name, KnownSpan(seconds, begin)))
            begin += seconds

    def calls(self) -> list[tuple[str, float, float]]:
        """Return (kernel, begin, seconds) of the calls on the host's clock. Call it before `report`."""
        return [(name, span.begin, span.read()) for name, span in self.spans if isinstance(span, HostSpan | KnownSpan)]

    def report(self) -> None:
        """Pass the seconds of each call to `observe`."""
        for name, span in self.spans:
            self.observe(name, self.phase, self.labels[name], span.read())
        self.spans.clear()


class KernelSet:
    """Set of all kernels as one backend serves them, as attributes: `k.rms_norm(x, gamma, eps)`.

    labels: kernel -> backend that serves it; "golden" if `backend` has no implementation of it.
    fallbacks: kernels served by their golden functions, without those that no layer of the model calls, and `replaced`.

    own: functions of the backend in place of its registered implementations (`Backend.own_kernels`).
    layer_kernels: kernels that the model's layers name (`Layer.kernels`).
    replaced: kernels whose implementation computes this model without the device's operator
        (`Backend.lacks_operator`).
    fuse: use optional kernels. Without it, or without an implementation, an optional kernel is in neither and returns
        None.

    observe: called for each call of a timed step.
    start: begins a span on the backend's clock.

    Read the attribute at each call (`k.linear(...)`), since a timed step replaces the attributes.
    """

    decoder_layers: Callable[..., Tensor | None]
    take_ids: Callable[..., Tensor]
    keep_ids: Callable[..., None]
    keep_rows: Callable[..., None]
    embedding: Callable[..., Tensor]
    quantize: Callable[..., Any]
    rms_norm: Callable[..., Any]
    add_rms_norm: Callable[..., tuple[Any, Tensor]]
    linear: Callable[..., Tensor]
    linear_argmax: Callable[..., Tensor]
    linear_swiglu: Callable[..., Any]
    all_reduce: Callable[..., Tensor]
    all_gather: Callable[..., Tensor]
    embedding_shard: Callable[..., Tensor]
    linear_argmax_shard: Callable[..., Tensor]
    qk_norm_rope_kv_write: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    sigmoid_gate: Callable[..., Tensor]
    causal_conv_silu: Callable[..., Tensor]
    gated_delta_rule: Callable[..., Tensor]
    gated_rms_norm: Callable[..., Tensor]
    route_experts: Callable[..., Any]
    experts_swiglu: Callable[..., Any]
    experts_sum: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    greedy: Callable[..., Tensor]
    mask_logits: Callable[..., None]
    penalize: Callable[..., None]
    sample: Callable[..., Tensor]
    logprobs: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]

    def __init__(
        self, backend: str, observe: Observe | None = None, start: Callable[[], Span] = HostSpan, *, fuse: bool = True,
        own: Mapping[str, Callable[..., Any]] | None = None, layer_kernels: Collection[str] = (),
        replaced: Collection[str] = (),
    ):
        self.backend = backend
        self.labels = {name: backend if backend in k.implementations else GOLDEN for name, k in KERNELS.items()
                       if not k.optional or (fuse and backend in k.implementations)}
        self.fallbacks = [name for name, label in self.labels.items()
                          if name in replaced or (
                              label == GOLDEN and (name in layer_kernels or not KERNELS[name].by_layer))]
        self._observe = observe
        self._start = start
        self._functions = {
            name: k.implementations[backend].function if backend in k.implementations else k.golden
            for name, k in KERNELS.items() if name in self.labels
        } | dict(own or {})
        self.__dict__.update(dict.fromkeys(KERNELS.keys() - self.labels.keys(), lambda *_: None))
        self.__dict__.update(self._functions)

    @property
    def served_labels(self) -> dict[str, str]:
        """`labels` without the kernels of particular layers that the backend has no implementation of."""
        return {name: label for name, label in self.labels.items() if label != GOLDEN or not KERNELS[name].by_layer}

    @contextmanager
    def timed(self, phase: str) -> Iterator[Timings]:
        """Time each kernel call in the body, which is a step of `phase` ("prefill", "decode" or "mixed").

            with k.timed("decode") as timings:
                ...launch the step
            ...synchronize
            timings.report()

        Untimed calls have no overhead.
        """
        timings = Timings(phase, self._observe or (lambda *_: None), self.labels)
        self.__dict__.update({name: self._spanned(name, f, timings) for name, f in self._functions.items()})
        try:
            yield timings
        finally:
            self.__dict__.update(self._functions)

    def _spanned(self, name: str, function: Callable[..., Any], timings: Timings) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            span = self._start()
            result = function(*args, **kwargs)
            span.stop()
            if result is not None or not KERNELS[name].optional:
                timings.spans.append((name, span))
            return result

        return call
