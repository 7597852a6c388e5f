"""Choice of what computes linear attention: operators of CANN, Triton kernels, or operators of torch.

The operators are called once for each dtype (delta_check.py). A Triton kernel is compared with operators of torch, for
each size and dtype, before its first use. A captured step has run once before its capture, so both are done by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels import ascend, ascend_delta
from npuserve.kernels.ascend_delta import DeltaLaunches, DeltaOperators
from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.causal_conv_silu import causal_conv_silu
from npuserve.kernels.gated_delta_rule import NORM_EPS, by_operators
from npuserve.kernels.gated_rms_norm import gated_rms_norm
from npuserve.npu.backends.ascend.delta_check import working_operators

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.06}
"""Largest difference from operators of torch, for values of up to about 5 that both sides round."""

ROWS = ([(1, 4), (1, 1), (1, 9)], [(5, 5), (0, 4), (2, 6), (1, 1)])
"""Rows (tokens, context) of the comparisons: a decode step, and a step with chunks. Some begin from no state."""

NO_OPERATORS = DeltaOperators(recurrent=False, chunk=False)


class DeltaKernels:
    """Kernels of linear attention on a device.

    launches: of Triton kernels; None without triton-ascend.
    """

    def __init__(self, device: torch.device, launches: DeltaLaunches | None):
        self._device = device
        self._launches = launches
        self._operators: dict[torch.dtype, DeltaOperators] = {}
        self._agrees: dict[tuple[Any, ...], bool] = {}
        self._logged: set[tuple[Any, ...]] = set()
        self.own: dict[str, Callable[..., Any]] = {"gated_delta_rule": self.gated_delta_rule}
        if launches:
            self.own |= {"causal_conv_silu": self.causal_conv_silu, "gated_rms_norm": self.gated_rms_norm}

    def operators(self, dtype: torch.dtype) -> DeltaOperators:
        """Return the operators that take activations and states of `dtype`."""
        if dtype not in self._operators:
            self._operators[dtype] = working_operators(dtype, self._device)
        return self._operators[dtype]

    def has_operators(self, sizes: Sequence[int], dtype: torch.dtype, state_dtype: torch.dtype) -> bool:
        """Return True if the operators compute both decode rows and chunks. sizes: of `DeltaOperators.can_recur`."""
        if dtype != state_dtype:
            return False
        key_heads, value_heads, key_dim, value_dim = sizes
        operators = self.operators(dtype)
        return (operators.can_recur(key_heads, value_heads, key_dim, value_dim)
                and operators.can_chunk(key_heads, value_heads, key_dim, value_dim))

    def has_rule(self, sizes: Sequence[int], dtype: torch.dtype, state_dtype: torch.dtype) -> bool:
        """Return True if a Triton kernel computes the rule where an operator does not."""
        return self._rule(sizes, dtype, state_dtype) is not None

    def log_fallback(self, sizes: Sequence[int], dtype: torch.dtype, state_dtype: torch.dtype) -> None:
        """Log once, for sizes that an operator does not compute, what computes them."""
        if (key := (*sizes, dtype, state_dtype)) in self._logged:
            return
        self._logged.add(key)
        log.warning(
            "CANN's operators do not compute all of linear attention with %d heads of keys and %d of values, of %d and "
            "%d numbers, with activations in %s and states in %s: %s", *key,
            "a Triton kernel computes the rest, token by token" if self.has_rule(sizes, dtype, state_dtype) else
            "torch's operators compute the rest, token by token, and steps with chunks are not captured")

    def gated_delta_rule(
        self, qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
        metadata: AttentionMetadata, state_slots: Tensor, key_heads: int,
    ) -> Tensor:
        """Run the kernel gated_delta_rule."""
        sizes = key_heads, *state.shape[1:]
        rule = None
        if not self.has_operators(sizes, qkv.dtype, state.dtype):
            rule = self._rule(sizes, qkv.dtype, state.dtype)
        result: Tensor = by_operators(
            qkv, a, b, a_log, dt_bias, state, metadata, state_slots, key_heads, self.operators(qkv.dtype), rule,
            self._gates(a.dtype, a.shape[1]))
        return result

    def causal_conv_silu(self, x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        """Run the kernel causal_conv_silu."""
        plain = causal_conv_silu.implementations[ascend.LABEL].function
        launch = self._convolution(plain, x.dtype, weight.shape)
        return launch(x, weight, *others)  # type: ignore[no-any-return]

    def gated_rms_norm(self, x: Tensor, z: Tensor, gamma: Tensor, eps: float) -> Tensor:
        """Run the kernel gated_rms_norm."""
        plain = gated_rms_norm.implementations[ascend.LABEL].function
        launch = self._norm(plain, x.dtype, gamma.dtype, x.shape[1], len(gamma))
        return launch(x, z, gamma, eps)  # type: ignore[no-any-return]

    def _convolution(
        self, plain: Callable[..., Tensor], dtype: torch.dtype, shape: Sequence[int]
    ) -> Callable[..., Tensor]:
        """Return the launch of the convolution, or `plain` where it does not agree with that."""

        def run(function: Callable[..., Tensor], step: _Step) -> list[Tensor]:
            channels, taps = shape
            state = self._normal(step.slots_in_all, channels, taps - 1, dtype=dtype)
            x = self._columns(step.tokens, channels, dtype)
            weight = self._normal(channels, taps, dtype=dtype)
            return [function(x, weight, state, step.metadata, step.slots), state]

        launch = self._checked("conv_silu_kernel", (dtype, *shape), lambda launches: launches.convolution, plain, run)
        return launch or plain

    def _gates(self, dtype: torch.dtype, heads: int) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the launch of the gates, or the function of operators of torch."""

        def run(function: Callable[..., tuple[Tensor, Tensor]], step: _Step) -> list[Tensor]:
            a, b = (self._columns(step.tokens, heads, dtype) for _ in "ab")
            weights = [self._normal(heads, dtype=torch.float32) for _ in "ab"]
            forget = self._normal(step.tokens, 1, dtype=torch.float32) if step.is_decode else None
            return [*function(a, b, *weights, forget)]

        plain = ascend_delta.gates
        return self._checked("delta_gates_kernel", (dtype, heads), lambda launches: launches.gates, plain, run) or plain

    def _rule(
        self, sizes: Sequence[int], dtype: torch.dtype, state_dtype: torch.dtype
    ) -> Callable[..., Tensor] | None:
        """Return the launch of the rule; None where there is none that agrees with operators of torch."""
        key_heads, value_heads, key_dim, value_dim = sizes
        # A state in float32 has the rounding of queries and keys in narrower dtypes, which the kernel does not round.
        rounded = min(dtype, state_dtype, key=lambda each: each.itemsize)

        def run(function: Callable[..., Tensor], step: _Step) -> list[Tensor]:
            qkv = self._normal(step.tokens, 2 * key_heads * key_dim + value_heads * value_dim, dtype=dtype)
            a, b = (self._columns(step.tokens, value_heads, dtype) for _ in "ab")
            weights = [self._normal(value_heads, dtype=torch.float32) for _ in "ab"]
            state = self._normal(step.slots_in_all, value_heads, key_dim, value_dim, dtype=state_dtype)
            result = function(qkv, a, b, *weights, state, step.metadata, step.slots, key_heads, NORM_EPS)
            return [result, state.to(rounded)]

        def plain(*args: Any) -> Tensor:
            result: Tensor = by_operators(*args[:-1], NO_OPERATORS)
            return result

        return self._checked(
            "delta_rule_kernel", (dtype, state_dtype, *sizes), lambda launches: launches.rule, plain, run)

    def _norm(
        self, plain: Callable[..., Tensor], dtype: torch.dtype, gamma_dtype: torch.dtype, width: int, size: int
    ) -> Callable[..., Tensor]:
        """Return the launch of the gated norm, or `plain` where it does not agree with that."""

        def run(function: Callable[..., Tensor], step: _Step) -> list[Tensor]:
            x = self._normal(step.tokens, width, dtype=dtype)
            z = self._columns(step.tokens, width, dtype)
            return [function(x, z, self._normal(size, dtype=gamma_dtype), 1e-6)]

        key = dtype, gamma_dtype, width, size
        return self._checked("gated_rms_norm_kernel", key, lambda launches: launches.norm, plain, run) or plain

    def _checked(
        self, name: str, key: tuple[Any, ...], choose: Callable[[DeltaLaunches], Callable[..., Any]],
        plain: Callable[..., Any], run: Callable[[Callable[..., Any], _Step], list[Tensor]],
    ) -> Callable[..., Any] | None:
        """Return the launch that `choose` takes, if it agrees with `plain`, compared once for each key.

        run: calls a function for the rows of a step, with numbers of `_normal`, and returns its results.
        """
        if self._launches is None:
            return None
        launch = choose(self._launches)
        case = (name, *key)
        if case not in self._agrees:
            reason: object = "its results differ from those of torch's operators"
            try:
                agrees = all(self._agree(launch, plain, run, _Step(rows, self._device)) for rows in ROWS)
            except Exception as error:  # of a compiler that has never met this machine
                agrees = False
                reason = error
            if not agrees:
                log.warning("%s is not used for %s: %s", name, ", ".join(map(str, key)), reason)
            self._agrees[case] = agrees
        return launch if self._agrees[case] else None

    def _agree(
        self, launch: Callable[..., Any], plain: Callable[..., Any],
        run: Callable[[Callable[..., Any], _Step], list[Tensor]], step: _Step,
    ) -> bool:
        results = []
        for function in (launch, plain):
            self._generator = torch.Generator().manual_seed(0)
            results.append([tensor.cpu() for tensor in run(function, step)])
        return all(bool(((a.float() - b.float()).abs() <= TOLERANCE[b.dtype] * (1 + b.float().abs())).all())
                   for a, b in zip(*results, strict=True))

    def _columns(self, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return columns of a wider matrix, as the parts of a layer's product are (`Capabilities.stacks`)."""
        return self._normal(tokens, 2 * width, dtype=dtype)[:, width:]

    def _normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype).to(self._device)


class _Step:
    """Rows of a comparison: their metadata and slots on the device."""

    def __init__(self, rows: Sequence[tuple[int, int]], device: torch.device):
        lengths = [tokens for tokens, _ in rows]
        tables = torch.zeros(len(rows), 1, dtype=torch.int32)
        self.tokens = sum(lengths)
        self.is_decode = max(lengths) == 1
        self.slots_in_all = len(rows) + 1
        (self.metadata, self.slots) = ascend.to_device(
            (AttentionMetadata.from_lengths(tables, [context for _, context in rows], lengths),
             torch.arange(len(rows)).flip(0)))
