"""Convolution and recurrence of the gated delta net: against transformers, and rows that depend on themselves alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from npuserve.kernels import native
from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.causal_conv_silu import causal_conv_silu
from npuserve.kernels.gated_delta_rule import gated_delta_rule
from npuserve.kernels.gated_rms_norm import gated_rms_norm
from npuserve.kernels.norm import rms_norm
from npuserve.kernels.registry import Kernel
from tests.kernels.comparison import randn
from tests.kernels.native.conftest import isa  # noqa: F401
from tests.kernels.variants import ISAS

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 32, 40
WIDTH = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
CHANNELS, TAPS = 70, 4

Run = Callable[[Sequence[Tensor], Tensor, Sequence[tuple[int, int]], Sequence[int]], Tensor]
"""Function of (inputs of all tokens, states, (tokens, context) of each row, slots), which advances the states."""


def metadata_of(rows: Sequence[tuple[int, int]]) -> AttentionMetadata:
    tables = torch.zeros(len(rows), 1, dtype=torch.int32)
    return AttentionMetadata.from_lengths(tables, [c for _, c in rows], [n for n, _ in rows])


def function_of(kernel: Kernel[..., Any], label: str) -> Callable[..., Any]:
    return kernel.golden if label == "golden" else kernel.implementations["cpu"].function


def inputs_of_rule(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Return qkv, a and b."""
    return [randn(tokens, WIDTH, seed=1, dtype=dtype), *randn(2, tokens, VALUE_HEADS, seed=2, dtype=dtype)]


def rule(label: str) -> Run:
    a_log, dt_bias = randn(VALUE_HEADS, seed=3), randn(VALUE_HEADS, seed=4)

    def run(inputs: Sequence[Tensor], state: Tensor, rows: Sequence[tuple[int, int]], slots: Sequence[int]) -> Tensor:
        out: Tensor = function_of(gated_delta_rule, label)(
            *inputs, a_log, dt_bias, state, metadata_of(rows), torch.tensor(slots), KEY_HEADS)
        return out

    return run


def convolution(label: str, dtype: torch.dtype) -> Run:
    weight = randn(CHANNELS, TAPS, seed=3, dtype=dtype)

    def run(inputs: Sequence[Tensor], state: Tensor, rows: Sequence[tuple[int, int]], slots: Sequence[int]) -> Tensor:
        out: Tensor = function_of(causal_conv_silu, label)(
            *inputs, weight, state, metadata_of(rows), torch.tensor(slots))
        return out

    return run


def cases(tokens: int, dtype: torch.dtype, label: str) -> list[tuple[Run, list[Tensor], Tensor]]:
    """Return (function, inputs, state of 5 slots) of both kernels."""
    return [
        (rule(label), inputs_of_rule(tokens, dtype), randn(5, VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=5)),
        (convolution(label, dtype), [randn(tokens, CHANNELS, seed=1, dtype=dtype)],
         randn(5, CHANNELS, TAPS - 1, seed=5, dtype=dtype))]


# Against transformers


@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_gated_delta_rule_against_transformers(tokens: int) -> None:
    """Both forms of transformers, from zeros and from a state."""
    qkv, a, b = inputs_of_rule(tokens, torch.float32)
    a_log, dt_bias = randn(VALUE_HEADS, seed=3), randn(VALUE_HEADS, seed=4)
    state = randn(2, VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=5)
    sizes = [KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM]
    q, k, v = (x.view(1, tokens, -1, dim) for x, dim in zip(
        qkv.split(sizes, dim=1), (KEY_DIM, KEY_DIM, VALUE_DIM), strict=True))
    g, beta = -a_log.exp() * F.softplus(a + dt_bias), b.sigmoid()
    for initial, context in ((None, tokens), (state[1:].clone(), tokens + 3)):
        expected = [
            theirs(q, k, v, g=g[None], beta=beta[None], initial_state=initial, output_final_state=True,
                   use_qk_l2norm_in_kernel=True)
            for theirs in (modeling_qwen3_5.torch_recurrent_gated_delta_rule,
                           modeling_qwen3_5.torch_chunk_gated_delta_rule)]
        for label in ("golden", "cpu") if native.available() else ("golden",):
            own = state.clone()
            out = rule(label)([qkv, a, b], own, [(tokens, context)], [1])
            assert torch.equal(own[0], state[0])
            for result, final in expected:
                torch.testing.assert_close(out, result[0].flatten(1), rtol=1e-4, atol=2e-5)
                torch.testing.assert_close(own[1], final[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_causal_conv_silu_against_transformers(tokens: int) -> None:
    """From a state by the update of transformers, and from zeros by its convolution."""
    x, weight, state = randn(tokens, CHANNELS), randn(CHANNELS, TAPS, seed=3), randn(3, CHANNELS, TAPS - 1, seed=5)
    final = state[2:].clone()
    continued = modeling_qwen3_5.causal_conv1d_update(x.T[None], final, weight, None, "silu")
    begun = modeling_qwen3_5.causal_conv1d_fn(x.T[None], weight, None, "silu")
    for label in ("golden", "cpu") if native.available() else ("golden",):
        for expected, context in ((continued, tokens + 5), (begun, tokens)):
            own = state.clone()
            out = convolution(label, torch.float32)([x], own, [(tokens, context)], [2])
            torch.testing.assert_close(out, expected[0].T, rtol=1e-5, atol=1e-5)
            assert torch.equal(own[:2], state[:2])
            last = final[0] if context > tokens else F.pad(x.T, (TAPS - 1, 0))[:, -(TAPS - 1):]
            assert torch.equal(own[2], last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide_gamma", [False, True])
def test_gated_rms_norm_equals_transformers_bit_for_bit(dtype: torch.dtype, wide_gamma: bool) -> None:
    x, z = randn(2, 5, 48, seed=1, dtype=dtype)
    theirs = modeling_qwen3_5.Qwen3_5RMSNormGated(16, eps=1e-5)
    with torch.no_grad():
        theirs.weight.copy_(randn(16, seed=2))
        theirs.weight.data = theirs.weight.to(torch.float32 if wide_gamma else dtype)
        expected = theirs(x.view(-1, 16), z.view(-1, 16)).view(5, 48)
        assert torch.equal(gated_rms_norm(x, z, theirs.weight.detach(), 1e-5), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_centered_norm_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    x, theirs = randn(5, 48, seed=1, dtype=dtype), modeling_qwen3_5.Qwen3_5RMSNorm(48, eps=1e-5).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(randn(48, seed=2))
        assert torch.equal(rms_norm(x, 1.0 + theirs.weight.float(), 1e-5), theirs(x))


# A row's numbers depend on the row alone


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [[1] * 75, [2] * 37 + [1], [33, 1, 41], [7, 60, 8]])
def test_chunks_do_not_change_bits(isa: str, dtype: torch.dtype, chunks: list[int]) -> None:  # noqa: F811
    tokens = sum(chunks)
    for threads in (1, 3):
        native.library().set_threads(threads)
        for run, inputs, state in cases(tokens, dtype, "cpu"):
            whole = state.clone()
            expected = run(inputs, whole, [(tokens, tokens)], [2])
            begin, parts, own = 0, [], state.clone()
            for count in chunks:
                part = [x[begin : begin + count].contiguous() for x in inputs]
                parts.append(run(part, own, [(count, begin + count)], [2]))
                begin += count
            assert torch.equal(torch.cat(parts), expected)
            assert torch.equal(own, whole)


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_change_each_others_bits(isa: str, dtype: torch.dtype) -> None:  # noqa: F811
    """Rows of a step equal the same rows alone, in slots of any order. Other slots keep their contents."""
    rows, slots = [(1, 9), (40, 40), (0, 3), (3, 70)], [3, 0, 4, 1]
    tokens = sum(n for n, _ in rows)
    for run, inputs, state in cases(tokens, dtype, "cpu"):
        together = state.clone()
        out = run(inputs, together, rows, slots)
        begin = 0
        for row, slot in zip(rows, slots, strict=True):
            if row[0] == 0:
                assert torch.equal(together[slot], state[slot])
                continue
            part, own = [x[begin : begin + row[0]].contiguous() for x in inputs], state.clone()
            alone = run(part, own, [row], [slot])
            assert torch.equal(out[begin : begin + row[0]], alone)
            assert torch.equal(own[slot], together[slot])
            begin += row[0]
        assert torch.equal(together[2], state[2])


@pytest.mark.parametrize("label", ["golden", "cpu"])
@pytest.mark.parametrize("tokens", [1, 2, 35])
def test_row_from_zero_ignores_contents_of_its_slot(tokens: int, label: str) -> None:
    if label == "cpu" and not native.available():
        pytest.skip("the native kernels are not built")
    for run, inputs, state in cases(tokens, torch.float32, label):
        clean, dirty = torch.zeros_like(state), torch.full_like(state, torch.nan)
        expected = run(inputs, clean, [(tokens, tokens)], [1])
        assert torch.equal(run(inputs, dirty, [(tokens, tokens)], [1]), expected)
        assert torch.equal(dirty[1], clean[1])


@pytest.mark.parametrize("label", ["golden", "cpu"])
def test_tokens_of_no_row_give_zeros(label: str) -> None:
    if label == "cpu" and not native.available():
        pytest.skip("the native kernels are not built")
    for run, inputs, state in cases(5, torch.float32, label):
        out = run(inputs, state, [(3, 3)], [1])
        assert out[:3].any()
        assert not out[3:].any()


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built")
def test_recorded_program_reads_rows_when_it_runs(isa: str) -> None:  # noqa: F811
    """A program recorded for 12 tokens and 4 rows runs steps of fewer tokens and rows; padding rows have no tokens."""
    conv, delta = (k.implementations["cpu"].function for k in (causal_conv_silu, gated_delta_rule))
    qkv, a, b = (torch.zeros_like(x) for x in inputs_of_rule(12, torch.float32))
    weight, a_log, dt_bias = randn(WIDTH, TAPS, seed=3), randn(VALUE_HEADS, seed=3), randn(VALUE_HEADS, seed=4)
    shapes = (5, WIDTH, TAPS - 1), (5, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    states = [randn(*shape, seed=5) for shape in shapes]
    own = [state.clone() for state in states]
    contexts, starts = torch.zeros(4, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    slots = torch.full((4,), 4)
    captured = AttentionMetadata(torch.zeros(4, 1, dtype=torch.int32), contexts, starts, [], [])

    def step(x: Tensor, a: Tensor, b: Tensor, states: list[Tensor], rows: AttentionMetadata, slots: Tensor) -> Tensor:
        mixed = conv(x, weight, states[0], rows, slots)
        out: Tensor = delta(mixed, a, b, a_log, dt_bias, states[1], rows, slots, KEY_HEADS)
        return out

    program = native.record(lambda: step(qkv, a, b, own, captured, slots))
    for seed, rows in enumerate([[(12, 12)], [(1, 13), (1, 1), (1, 5)], [(4, 6), (1, 14), (5, 5)]]):
        tokens, count = sum(n for n, _ in rows), len(rows)
        for x in (qkv, a, b):
            x.copy_(randn(*x.shape, seed=seed))
        made, used = metadata_of(rows), torch.tensor([0, 2, 3][:count])
        contexts.zero_()[:count] = made.context_lens
        starts.fill_(tokens)[: count + 1] = made.cu_seqlens_q
        slots.fill_(4)[:count] = used
        expected = step(qkv[:tokens], a[:tokens], b[:tokens], states, made, used)
        assert torch.equal(program.replay(12)[:tokens], expected)
        assert all(map(torch.equal, own, states))
