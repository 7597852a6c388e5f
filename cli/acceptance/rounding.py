"""Reference that takes a device's rounding of int8 activations where both directions are right.

Activations x are quantized to rint(x / scale). Where x / scale is a half up to the rounding of float32, two correct
implementations may round it in different directions: one divides by the scale, another multiplies by its reciprocal
(CANN's kernel does, CANN's own golden function divides), or their x differ in the last bit. Each such tie changes an
int8 number by 1, and with it, now and then, a token. A `FollowedRounding` records the int8 activations of a device. The
reference takes the device's number where its own value before rounding is at most MAX_TIE_DISTANCE from the half
between both, and keeps its own elsewhere. Its other numbers must equal the device's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from npuserve.cli.bench.taps import Args, Tap, TappedKernels
from npuserve.kernels.quantized import Quantized, Scheme
from npuserve.kernels.registry import KernelSet
from npuserve.kernels.weight import form_of
from npuserve.npu.execution.decoder import Model

MAX_TIE_DISTANCE = 2.0**-10
"""128 units in the last place of the largest number, 127. They cover float32 sums for x in another order: up to 9 units
in the 5 layers of the built-in model, and more in more layers. One random number in 500 is so close to a half."""

_SCHEME = {"rms_norm": 3, "add_rms_norm": 4, "linear_swiglu": 3, "experts_swiglu": 3}
"""Position of the scheme by which a kernel quantizes its result."""

_PRODUCTS = ("linear", "linear_swiglu", "experts_swiglu")
"""Kernels that quantize their first argument for an int8 weight, the second."""


@dataclass
class FollowedRounding:
    """int8 activations of a device, and their differences from those of a reference.

    numbers: number of int8 activations compared.
    ties: number of them that the reference took from the device.
    distance: largest distance of such a number's value before rounding from a half.
    others: number of them that differ and are no ties.
    """

    numbers: int = 0
    ties: int = 0
    distance: float = 0.0
    others: int = 0
    _recorded: deque[Tensor] = field(default_factory=deque)

    def device(self, model: Model) -> Model:
        """Return the device's model, which records its int8 activations."""
        return replace(model, kernels=TappedKernels(model.kernels.backend, _recording(model.kernels, self)))

    def reference(self, model: Model) -> Model:
        """Return the reference's model. It must compute the same batches as the device's, each one after it."""
        return replace(model, kernels=TappedKernels(model.kernels.backend, _following(model.kernels, self)))

    def record(self, values: Tensor) -> None:
        self._recorded.append(values.to("cpu", copy=True))

    def follow(self, x: Tensor, quantized: Quantized) -> Quantized:
        """Return `quantized`, which is x quantized, with the device's rounding of ties."""
        device = self._recorded.popleft()
        self.numbers += device.numel()
        off = (device.int() - quantized.values.int()).abs()
        if not off.any():
            return quantized
        exact = x.double() / quantized.scale.double().unsqueeze(-1)
        distance = (exact - exact.floor() - 0.5).abs()
        ties = (off == 1) & (distance <= MAX_TIE_DISTANCE)
        self.ties += int(ties.sum())
        self.others += int((off > 0).sum()) - int(ties.sum())
        self.distance = max(self.distance, float(distance.where(ties, 0.0).max()))
        return quantized.with_values(torch.where(ties, device, quantized.values))


def _recording(kernels: KernelSet, rounding: FollowedRounding) -> Tap:
    """Return a tap that records the int8 activations of each call."""

    def recorded(x: Tensor, scheme: Scheme) -> Quantized:
        quantized: Quantized = kernels.quantize(x, scheme)
        rounding.record(quantized.values)
        return quantized

    def call(name: str, function: Callable[..., Any], args: Args) -> Any:
        result = function(*_with_int8(name, args, recorded))
        if _scheme_of(name, args):
            rounding.record((result[0] if isinstance(result, tuple) else result).values)
        return result

    return call


def _following(kernels: KernelSet, rounding: FollowedRounding) -> Tap:
    """Return a tap that quantizes apart from the kernels, and takes the device's rounding of ties."""

    def followed(x: Tensor, scheme: Scheme) -> Quantized:
        return rounding.follow(x, kernels.quantize(x, scheme))

    def call(name: str, function: Callable[..., Any], args: Args) -> Any:
        args = _with_int8(name, args, followed)
        if (scheme := _scheme_of(name, args)) is None:
            return function(*args)
        place = _SCHEME[name]
        result = function(*args[:place], None, *args[place + 1 :])
        return (followed(result[0], scheme), *result[1:]) if isinstance(result, tuple) else followed(result, scheme)

    return call


def _with_int8(name: str, args: Args, quantize: Callable[[Tensor, Scheme], Quantized]) -> Args:
    """Return the arguments of a product with quantized activations, if its weight takes them."""
    if name not in _PRODUCTS or isinstance(args[0], Quantized):
        return args
    scheme = form_of(args[1]).inputs
    return args if scheme is None else (quantize(args[0], scheme), *args[1:])


def _scheme_of(name: str, args: Args) -> Scheme | None:
    place = _SCHEME.get(name, len(args))
    scheme: Scheme | None = args[place] if place < len(args) else None
    return scheme
