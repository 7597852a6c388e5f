"""Gated delta net on CUDA beyond the cases of all kernels: both forms, captured lengths, limits of Hopper."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.causal_conv_silu import causal_conv_silu
from npuserve.kernels.gated_delta_rule import NORM_EPS, gated_delta_rule
from tests.kernels.comparison import randn
from tests.kernels.triton.hopper import Launch, compiled

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 1, 2, 24, 40
WIDTH = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
CHANNELS = 70

Rows = list[tuple[int, int]]
"""(tokens, context) of each row."""


@pytest.fixture
def launch(interpreted: ModuleType) -> ModuleType:
    from npuserve.kernels.triton import launch_gated_delta

    return launch_gated_delta


def metadata_of(rows: Rows, captured: bool = False) -> AttentionMetadata:
    """captured: the host does not know the lengths."""
    made = AttentionMetadata.from_lengths(
        torch.zeros(len(rows), 1, dtype=torch.int32), [c for _, c in rows], [n for n, _ in rows])
    return AttentionMetadata(made.block_tables, made.context_lens, made.cu_seqlens_q, [], []) if captured else made


def rule_inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    a, b = randn(2, tokens, VALUE_HEADS, seed=2, dtype=dtype)
    return randn(tokens, WIDTH, seed=1, dtype=dtype), a, b, randn(VALUE_HEADS, seed=3), randn(VALUE_HEADS, seed=4)


def states(slots: int = 6) -> Tensor:
    return randn(slots, VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=5).mul(0.3)


@pytest.mark.parametrize("rows", [[(40, 47), (17, 17), (1, 9), (150, 150)], [(16, 16), (16, 30)], [(0, 0), (65, 66)]])
def test_chunks_are_near_the_recurrence(launch: ModuleType, rows: Rows) -> None:
    """Token by token and in chunks, with rows of no tokens and a slot that held NaN."""
    tokens, slots = sum(n for n, _ in rows), torch.tensor([4, 1, 2, 0][: len(rows)])
    results = []
    for few, chunk in ((0, 32), (0, 64), (1000, 32)):
        state = states()
        fresh = [slot for slot, (n, context) in zip(slots.tolist(), rows, strict=True) if n == context and n]
        state[fresh] = torch.nan
        out = launch.gated_delta_rule(
            *rule_inputs(tokens), state, metadata_of(rows), slots, KEY_HEADS, NORM_EPS, few=few, chunk=chunk)
        results.append((out, state))
    expected = states()
    golden = gated_delta_rule(*rule_inputs(tokens), expected, metadata_of(rows), slots, KEY_HEADS)
    for out, state in results:
        torch.testing.assert_close(out, golden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)


def test_state_in_bfloat16_is_rounded_once_a_call(launch: ModuleType) -> None:
    """Results are those of the rounded state; the interpreter rounds towards zero."""
    rows, slots = [(1, 9), (3, 7), (40, 60)], torch.tensor([4, 1, 2])
    state, expected = states().bfloat16(), states().bfloat16().float()
    out = launch.gated_delta_rule(*rule_inputs(44), state, metadata_of(rows), slots, KEY_HEADS, NORM_EPS)
    golden = gated_delta_rule(*rule_inputs(44), expected, metadata_of(rows), slots, KEY_HEADS)
    torch.testing.assert_close(out, golden, rtol=1e-5, atol=1e-5)
    assert state.dtype == torch.bfloat16
    torch.testing.assert_close(state.float(), expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_chunks_of_repeated_keys_are_exact(launch: ModuleType, scale: float, chunk: int) -> None:
    """All keys are nearly equal, rates nearly 1 and decays nearly none: powers of A reach 1e17 in a chunk of 64."""
    tokens, rows = 130, [(130, 131)]
    qkv, a, b, a_log, dt_bias = rule_inputs(tokens)
    qkv[:, KEY_DIM : 2 * KEY_DIM] = randn(1, KEY_DIM, seed=7) + 0.01 * scale * randn(tokens, KEY_DIM, seed=8)
    inputs = qkv, a - 20, b + 20, a_log, dt_bias
    state, expected = states(), states()
    slots = torch.tensor([3])
    out = launch.gated_delta_rule(*inputs, state, metadata_of(rows), slots, KEY_HEADS, NORM_EPS, chunk=chunk)
    golden = gated_delta_rule(*inputs, expected, metadata_of(rows), slots, KEY_HEADS)
    torch.testing.assert_close(out, golden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [[(1, 9), (1, 1), (0, 0), (40, 40)], [(30, 41), (17, 17), (0, 0), (0, 0)], [(2, 2)]])
def test_captured_lengths_are_read_on_the_device(launch: ModuleType, rows: Rows) -> None:
    """Tokens of no row give 0; the slot of padding rows is not written, since they have no tokens."""
    tokens = sum(n for n, _ in rows) + 9
    slots = torch.tensor([4, 1, 5, 2][: len(rows)])
    weight, x = randn(CHANNELS, 4, seed=3), randn(tokens, CHANNELS, seed=9)
    found: list[list[Tensor]] = []
    for captured in (True, False):
        state, window = states(), randn(6, CHANNELS, 3, seed=6)
        metadata = metadata_of(rows, captured)
        if captured:
            out = launch.gated_delta_rule(*rule_inputs(tokens), state, metadata, slots, KEY_HEADS, NORM_EPS)
            mixed = launch.causal_conv_silu(x, weight, window, metadata, slots)
        else:
            out = gated_delta_rule(*rule_inputs(tokens), state, metadata, slots, KEY_HEADS)
            mixed = causal_conv_silu(x, weight, window, metadata, slots)
        assert not out[-9:].any()
        assert not mixed[-9:].any()
        found.append([out, state, mixed, window])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0][1][3], states()[3])


def test_bounds_of_captured_chunks_hold_for_any_lengths(launch: ModuleType) -> None:
    """Rows and chunks of lengths that the host knows never exceed the bounds of a step captured without them."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(300):
        tokens, rows = (int(torch.randint(1, most, (), generator=draw)) for most in (700, 40))
        cuts = torch.randint(0, tokens + 1, (rows,), generator=draw).sort().values.tolist()
        lengths = [end - begin for begin, end in zip([0, *cuts[:-1]], cuts, strict=True)]
        most_rows, most_chunks = launch.chunk_bounds(tokens, rows, [], launch.FEW, 64)
        long_rows, chunks = launch.chunk_bounds(tokens, rows, lengths, launch.FEW, 64)
        assert long_rows <= most_rows
        assert chunks <= most_chunks


@pytest.mark.parametrize(("changed", "message"), [
    ({"state": states().half()}, "^state: not a contiguous .* of float32 or bfloat16"),
    ({"state": states()[0]}, "^state: .* is not .slots, value heads, key_dim, value_dim"),
    ({"key_heads": 3}, "^key_heads: 3 is not from 1 to 2"),
    ({"a": randn(4, 3)}, r"^a: \[4, 3\] .* is not \[4, 2\]"),
    ({"qkv": randn(4, WIDTH + 1)}, f"^qkv: {WIDTH + 1} columns are not the {WIDTH}"),
    ({"state_slots": torch.tensor([1], dtype=torch.int32)}, "^state_slots: not a contiguous .* of int64"),
])
def test_wrong_arguments_of_the_rule_are_refused(launch: ModuleType, changed: dict[str, Any], message: str) -> None:
    qkv, a, b, a_log, dt_bias = rule_inputs(4)
    given = {"qkv": qkv, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias, "state": states(),
             "metadata": metadata_of([(4, 4)]), "state_slots": torch.tensor([1]), "key_heads": KEY_HEADS, "eps": 1e-6}
    with pytest.raises(ValueError, match=message):
        launch.gated_delta_rule(**given | changed)


def test_wrong_arguments_of_the_convolution_are_refused(launch: ModuleType) -> None:
    x, slots, metadata = randn(4, CHANNELS), torch.tensor([1]), metadata_of([(4, 4)])
    for weight, state, message in (
            (randn(CHANNELS, 1), randn(2, CHANNELS, 0), "^weight: .* is not .channels, at least 2"),
            (randn(CHANNELS, 4), randn(2, CHANNELS, 4), "^state: not a contiguous"),
            (randn(CHANNELS, 4).half(), randn(2, CHANNELS, 3), "^weight: not a contiguous .* of float32")):
        with pytest.raises(ValueError, match=message):
            launch.causal_conv_silu(x, weight, state, metadata, slots)


# Compiled for Hopper

QWEN35_27B = {"KEY_HEADS": 16, "VALUE_HEADS": 48, "KEY_DIM": 128, "BLOCK_K": 128}
HOPPER, ADA = 227 << 10, 99 << 10
"""Bytes of shared memory that a program may take."""

LENGTHS = {"context_lens": "*i32", "cu_seqlens": "*i32", "state_slots": "*i64", "rows": "i32"}
STRIDES = dict.fromkeys(("qkv_stride", "a_stride", "b_stride"), "i64/16")


def rule_launch(kernel: str, number: str, options: dict[str, int], **constants: Any) -> Launch:
    """Return a launch of a kernel of the rule at the heads of Qwen3.5-27B."""
    types = {
        **dict.fromkeys(("qkv", "a", "b", "out", "inverses", "products"), number),
        **dict.fromkeys(("a_log", "dt_bias", "state", "factors"), "*fp32"),
        **LENGTHS, **STRIDES, "tokens": "i32", "most": "i32", "least": "i32", "eps": "fp32"}
    arguments = {
        "recurrent_kernel": ("qkv a b a_log dt_bias state context_lens cu_seqlens state_slots out tokens rows most eps "
                             "qkv_stride a_stride b_stride"),
        "chunk_products_kernel": ("qkv a b a_log dt_bias cu_seqlens inverses products factors rows least eps "
                                  "qkv_stride a_stride b_stride"),
        "chunk_states_kernel": ("qkv inverses products factors state context_lens cu_seqlens state_slots out rows "
                                "least qkv_stride"),
    }[kernel].split()
    return Launch("gated_delta_rule", kernel, {name: types[name] for name in arguments},
                  QWEN35_27B | {"PDL": True} | constants, options)


@pytest.mark.parametrize("one_each", [True, False])
def test_hopper_recurrence_neither_spills_nor_reads_states_early(launch: ModuleType, one_each: bool) -> None:
    """The state is read and written in words of 16 bytes, after the previous kernel ended."""
    options = launch.options("recurrent_kernel", torch.bfloat16, HOPPER)
    (made,) = compiled([rule_launch(
        "recurrent_kernel", "*bf16", options, VALUE_DIM=128, BLOCK_V=launch.COLUMNS, ONE_EACH=one_each)])
    assert made.local == 0
    early, _, late = made.ptx.partition("griddepcontrol.wait")
    assert "cp.async.bulk.prefetch.L2" in early
    assert "st.global" not in early
    assert "ld.global.v4" not in early
    assert "ld.global.v4.b32" in late
    assert "st.global.v4.b32" in late


@pytest.mark.parametrize(("dtype", "shared"), [
    (torch.bfloat16, HOPPER), (torch.float16, HOPPER), (torch.float32, HOPPER), (torch.bfloat16, ADA)])
def test_hopper_chunks_use_tensor_cores_within_shared_memory(
    launch: ModuleType, dtype: torch.dtype, shared: int
) -> None:
    number = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    sizes = {"CHUNK": 32 if dtype == torch.float32 else 64, "ROWS": 256, "WIDE": False}
    products, advanced = compiled([
        rule_launch("chunk_products_kernel", number, launch.options("chunk_products_kernel", dtype, shared), **sizes),
        rule_launch("chunk_states_kernel", number, launch.options("chunk_states_kernel", dtype, shared),
                    VALUE_DIM=128, BLOCK_V=launch.COLUMNS, **sizes)])
    for made in (products, advanced):
        assert made.shared <= shared
        assert "st.global" not in made.ptx.partition("griddepcontrol.wait")[0]
    if dtype != torch.float32:
        assert products.local == advanced.local == 0
        assert "mma" in products.ptx
        assert "wgmma.mma_async" in advanced.ptx
        assert shared == ADA or 2 * (advanced.shared + 1024) <= 228 << 10  # two programs of a multiprocessor


@pytest.mark.parametrize("rows", [0, 256])
def test_hopper_convolution_compiles_without_spills(launch: ModuleType, rows: int) -> None:
    """At the channels of Qwen3.5-27B: a decode row, and tiles of rows of any lengths. Nothing is stored early."""
    numbers = dict.fromkeys(("x", "weight", "state", "out"), "*bf16")
    signature = numbers | LENGTHS | {"tokens": "i32", "channels": "i32/16", "x_stride": "i64/16"}
    tile, block = (16, launch.CHANNELS // 2) if rows else (1, launch.CHANNELS)
    (made,) = compiled([Launch(
        "causal_conv_silu", "causal_conv_silu_kernel", signature,
        {"TAPS": 4, "ROWS": rows, "TILE": tile, "BLOCK": block, "PDL": True}, {"num_warps": 4})])
    assert made.local == 0
    assert "st.global" not in made.ptx.partition("griddepcontrol.wait")[0]


def test_hopper_gates_load_and_store_16_bytes_at_a_time(interpreted: ModuleType) -> None:
    """At the sizes of Qwen3.5-27B: 48 groups of 128, and 24 heads of 256."""
    norm = {**dict.fromkeys(("x", "z", "out"), "*bf16"), "gamma": "*fp32", "groups": "i32/16", "size": "i32/16",
            "x_stride": "i64/16", "z_stride": "i64/16", "eps": "fp32"}
    gate = {**dict.fromkeys(("x", "gate", "out"), "*bf16"), "width": "i32/16", "x_stride": "i64/16",
            "gate_stride": "i64/16"}
    for made in compiled([
            Launch("rows", "gated_rms_norm_kernel", norm, {"GROUPS": 8, "BLOCK": 128, "PDL": True}, {"num_warps": 4}),
            Launch("rows", "sigmoid_gate_kernel", gate, {"BLOCK": 1024, "PDL": True}, {"num_warps": 4})]):
        assert made.local == 0
        assert "ld.global.v4.b32" in made.ptx
        assert "st.global.v4.b32" in made.ptx
