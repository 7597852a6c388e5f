"""Kernels by name, and the choice of their implementations.

A kernel is a golden function in plain torch, the cases that it is tested and timed on, and implementations by
backend, which stand beside it in its file:

    @kernel("swiglu", cases=[...])
    def swiglu(gate_up): ...

    @swiglu.implementation("npu")
    def _(gate_up): ...

A `KernelSet` is one engine's choice. It is made once and shared with nobody, so that two engines or tests with
different backends do not meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

GOLDEN = "golden"
"""The backend label of a kernel served by its golden function."""


@dataclass(frozen=True, slots=True)
class Case:
    """One shape that a kernel is tested or timed on.

    make: the kernel's arguments on the CPU, from a generator of the CPU and the dtype of its activations and weights.
    benchmark: for timing, at a real model's size; too large for the tests. head_dim: of its attention heads, which not
    every device takes in every size; 0 where there are none. int8_cache: its KV cache is in int8, which not every
    device has. zeros: its int8 has zero points, which not every device takes. tolerance: of implementations that
    compute in fewer digits than the dtype has, where that is more than a few roundings of it.
    """

    name: str
    make: Callable[[torch.Generator, torch.dtype], tuple[Any, ...]]
    benchmark: bool = False
    head_dim: int = 0
    int8_cache: bool = False
    zeros: bool = False
    tolerance: float = 0.0


Adapter = Callable[[tuple[Any, ...]], tuple[Any, ...]]
"""From arguments to arguments."""


def moved(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Tensors, and dataclasses of tensors, on that device; those that are there already, and all else, as they are."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: move(getattr(value, f.name)) for f in fields(value)})
        return value

    return tuple(map(move, args))


@dataclass(frozen=True, slots=True)
class Implementation(Generic[P, R]):
    """A kernel's function on one backend.

    adapt: the golden function's arguments in the form that this one takes (weights packed, caches in the device's
    layout), for tests and benchmarks. restore: adapted arguments in the golden form again, as a call left them.
    """

    function: Callable[P, R]
    adapt: Adapter = lambda args: args
    restore: Adapter = lambda args: args


@dataclass(slots=True)
class Kernel(Generic[P, R]):
    """A kernel's golden function, which calling it runs, and its implementations by backend.

    dtypes: of the activations that it takes; float64 is for reference alone.
    """

    name: str
    golden: Callable[P, R]
    cases: Sequence[Case]
    dtypes: tuple[torch.dtype, ...]
    implementations: dict[str, Implementation[P, R]] = field(default_factory=dict)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.golden(*args, **kwargs)

    def implementation(self, backend: str, **adapters: Adapter) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Registers the decorated function for `backend`; ValueError if there is one. adapters: of `Implementation`."""

        def register(function: Callable[P, R]) -> Callable[P, R]:
            if backend in self.implementations:
                raise ValueError(f"kernel {self.name}: a second implementation for {backend}")
            self.implementations[backend] = Implementation(function, **adapters)
            return function

        return register


KERNELS: dict[str, Kernel[..., Any]] = {}
"""All kernels, filled as `npuserve.kernels` is imported and constant from then on."""


def kernel(
    name: str, *, cases: Sequence[Case], dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Makes the decorated golden function a kernel; ValueError if the name is taken."""

    def define(golden: Callable[P, R]) -> Kernel[P, R]:
        if name in KERNELS:
            raise ValueError(f"a second kernel named {name}")
        made = Kernel(name, golden, cases, dtypes)
        KERNELS[name] = made
        return made

    return define


class Span(Protocol):
    """A stretch of time on a device's clock, begun when it was made."""

    def stop(self) -> None:
        """Marks the end, without waiting for it."""

    def read(self) -> float:
        """Seconds. On a device only after its stream was synchronized."""


class HostSpan:
    """A span of the host's clock, for devices that compute in the caller's time."""

    __slots__ = ("_begin", "_end")

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> None:
        self._end = time.perf_counter()

    def read(self) -> float:
        return self._end - self._begin


@dataclass(frozen=True, slots=True)
class KnownSpan:
    """A span that was measured already."""

    seconds: float

    def stop(self) -> None:
        return

    def read(self) -> float:
        return self.seconds


Observe = Callable[[str, str, str, float], None]
"""Takes (kernel, phase, backend label, seconds)."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The kernel calls of one timed step. `report` them once, after the step's own synchronization."""

    phase: str
    observe: Observe
    labels: dict[str, str]
    spans: list[tuple[str, Span]] = field(default_factory=list)

    def add(self, calls: Sequence[tuple[str, float]]) -> None:
        """(kernel, seconds) of calls that were timed elsewhere."""
        self.spans.extend((name, KnownSpan(seconds)) for name, seconds in calls)

    def report(self) -> None:
        for name, span in self.spans:
            self.observe(name, self.phase, self.labels[name], span.read())
        self.spans.clear()


class KernelSet:
    """All kernels as one backend serves them, as attributes: `k.rms_norm(x, gamma, eps)`.

    labels: kernel -> the backend that serves it, "golden" where `backend` has no implementation of it.
    fallbacks: the kernels that are served so.
    observe: is told every call of a timed step. start: begins a span on the backend's clock.

    Call kernels through the set each time (`k.linear(...)`), since a timed step replaces its attributes.
    """

    take_ids: Callable[..., Tensor]
    keep_ids: Callable[..., None]
    embedding: Callable[..., Tensor]
    quantize: Callable[..., Any]
    rms_norm: Callable[..., Any]
    add_rms_norm: Callable[..., tuple[Any, Tensor]]
    linear: Callable[..., Tensor]
    linear_argmax: Callable[..., Tensor]
    linear_swiglu: Callable[..., Any]
    qk_norm_rope_kv_write: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    greedy: Callable[..., Tensor]
    penalize: Callable[..., None]
    sample: Callable[..., Tensor]
    logprobs: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]

    def __init__(self, backend: str, observe: Observe | None = None, start: Callable[[], Span] = HostSpan):
        self.backend = backend
        self.labels = {name: backend if backend in k.implementations else GOLDEN for name, k in KERNELS.items()}
        self.fallbacks = [name for name, label in self.labels.items() if label == GOLDEN]
        self._observe = observe
        self._start = start
        self._functions = {
            name: k.implementations[backend].function if backend in k.implementations else k.golden
            for name, k in KERNELS.items()
        }
        self.__dict__.update(self._functions)

    @contextmanager
    def timed(self, phase: str) -> Iterator[Timings]:
        """Times each call in its body, of a step of `phase` ("prefill", "decode" or "mixed").

            with k.timed("decode") as timings:
                ...launch the step
            ...synchronize
            timings.report()

        Outside of it a call costs what the function costs.
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
            timings.spans.append((name, span))
            return result

        return call
