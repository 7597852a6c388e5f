"""Products with weights compiled for Hopper at the shapes of Qwen3-14B: instructions, registers and memory."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest

from npuserve.kernels.triton.linear_tiles import SHARED_BYTES, Form, Kind, Tiles, calculated, candidates, choose
from tests.kernels.triton.hopper import Compiled, Launch, compiled

SHAPES: tuple[tuple[Kind, int, int], ...] = (
    ("linear", 5120, 5120), ("linear", 5120, 17408), ("linear_swiglu", 34816, 5120), ("linear_argmax", 151936, 5120))
ITEMSIZES = {"bf16": 2, "fp32": 4, "i8": 1, "fp8e4nv": 1, "grouped fp8e4nv": 1, "int4 bf16": 2}
FORMS: dict[str, Form] = {"fp8e4nv": "float8", "grouped fp8e4nv": "grouped float8", "int4 bf16": "int4"}
QUANTIZED = ("i8", "fp8e4nv", "grouped fp8e4nv")


def launch(kind: Kind, name: str, tiles: Tiles, even: bool = True, int4_group: int = 32) -> Launch:
    """Return a launch. name: type of the numbers. even: tiles divide K, and rows begin at multiples of 16 bytes, as in
    a model. int4_group: columns of a group of 4 bits."""
    size = "i32/16" if even else "i32"
    number = name.rpartition(" ")[2]
    is_int4 = name.startswith("int4")
    signature = {"x": f"*{number}", "weight": "*i32" if is_int4 else f"*{number}",
                 "out": "*bf16" if name in QUANTIZED else f"*{number}",
                 "tokens": "i32", "n": size, "k": size, "x_stride": size, "ahead": "i32", "scale_stride": size}
    given = {
        ("x_scale",): "*fp32" if name in QUANTIZED else None,
        ("weight_scale",): "*fp32" if name in QUANTIZED else "*bf16" if is_int4 else None,
        ("weight_zero",): "*i8" if is_int4 else None,
        ("best",): "*fp32" if kind == "linear_argmax" else None,
        ("places", "arrived"): "*i32",
        ("partial",): "*i32" if name == "i8" else "*fp32",
        ("bias",): None,
    }
    constants: dict[str, Any] = {
        "GATED": kind == "linear_swiglu", "BLOCK_N": tiles.n, "BLOCK_M": tiles.m, "BLOCK_K": tiles.k,
        "SPLIT": tiles.split, "GROUP": 8, "EVEN": even, "ONCE": tiles.m < 256,
        "WIDE": False, "IMPRECISE": tiles.k if name == "fp8e4nv" and tiles.m <= 64 else None,
        "SCALED_K": 128 if name == "grouped fp8e4nv" else 0, "INT4_GROUP": int4_group if is_int4 else 0, "PDL": True}
    for arguments, kind_of in given.items():
        for argument in arguments:
            if kind_of is None:
                constants[argument] = None
            else:
                signature[argument] = kind_of
    return Launch("linear", "product_kernel", signature, constants,
                  {"num_warps": tiles.warps, "num_stages": tiles.stages})


def own(kind: Kind, name: str, rows: int, n: int, k: int) -> Tiles:
    """Return the tiles of the table, or where it has the library, the tiles that would replace it."""
    shape = kind, ITEMSIZES[name], rows, n, k, 132, FORMS.get(name, "")
    return choose(*shape) or calculated(*shape)


CASES = {
    (kind, name, own(kind, name, rows, n, k))
    for kind, n, k in SHAPES for name, rows in (
        ("bf16", 1), ("bf16", 64), ("fp32", 16), ("i8", 1), ("i8", 128), ("i8", 2048), ("fp8e4nv", 1), ("fp8e4nv", 64),
        ("fp8e4nv", 128), ("grouped fp8e4nv", 1), ("grouped fp8e4nv", 2048))
}


@pytest.fixture(scope="module")
def built(interpreted: ModuleType) -> dict[tuple[Kind, str, Tiles], Compiled]:
    cases = sorted(CASES, key=repr)
    made = compiled([launch(*case) for case in cases])
    return dict(zip(cases, made, strict=True))


@pytest.mark.parametrize("case", sorted(CASES, key=repr), ids=lambda c: f"{c[0]}-{c[1]}-{c[2].n}x{c[2].m}-{c[2].split}")
def test_registers_and_shared_memory_suffice(
    built: dict[tuple[Kind, str, Tiles], Compiled], case: tuple[Kind, str, Tiles]
) -> None:
    """Nothing is spilled, shared memory is as in the table, and the registers of a multiprocessor hold as many programs
    as the table assumes."""
    kind, name, tiles = case
    made = built[case]
    assert made.local == 0
    blocks = tiles.shared_bytes(kind, ITEMSIZES[name])
    least = 0 if name == "fp32" else blocks  # float32 passes through registers, so one block less is in flight
    assert least <= made.shared <= min(SHARED_BYTES, blocks + 1024)
    programs = SHARED_BYTES // (made.shared + 1024)
    if tiles.m <= 64 and name != "fp32":
        assert min(programs, 3) * tiles.warps * 32 * made.registers <= 65536


@pytest.mark.parametrize("case", sorted(CASES, key=repr), ids=lambda c: f"{c[0]}-{c[1]}-{c[2].n}x{c[2].m}-{c[2].split}")
def test_instructions(built: dict[tuple[Kind, str, Tiles], Compiled], case: tuple[Kind, str, Tiles]) -> None:
    """The weight and x are copied asynchronously in units of 16 bytes. The tensor cores read them from shared memory.
    Results are stored in words of 16 bytes. The launch overlaps the previous one."""
    kind, name, tiles = case
    ptx = built[case].ptx
    copies = re.findall(r"cp\.async\.c[ga]\.shared\.global\S* \[[^,]*, \[[^,]*, (\w+)", ptx)
    assert copies
    assert set(copies) == {"0x10"} or set(copies) == {"16"}
    assert "cp.async.bulk.prefetch.L2.global" in ptx
    assert ptx.index("cp.async.bulk.prefetch") < ptx.index("griddepcontrol.wait") < ptx.index("cp.async.cg")
    assert ptx.rindex("cp.async.cg") < ptx.index("griddepcontrol.launch_dependents")
    if name != "fp32":
        assert "wgmma.mma_async" in ptx
        assert "mma.sync" not in ptx
    assert (name == "i8") == bool(re.search(r"wgmma\S*s32\.s8\.s8", ptx))
    assert (name in FORMS) == bool(re.search(r"wgmma\S*f32\.e4m3\.e4m3", ptx))
    assert ("atom.global.gpu.acq_rel.add" in ptx) == (tiles.split > 1)
    assert not re.search(r"(atom|red)\S*\.f(16|32)|\.bf16x2\.add", ptx)
    if kind != "linear_argmax":
        assert "st.global.v4" in ptx


def test_odd_shapes_and_candidates_compile(interpreted: ModuleType) -> None:
    """Rows that begin at any address, and some candidates of a sweep."""
    odd = [launch("linear_swiglu", name, own("linear_swiglu", name, 5, 34, 33), even=False) for name in ITEMSIZES]
    swept = [launch("linear", "bf16", tiles) for tiles in candidates("linear", 2, 1, 5120, 5120, 132)[1::4] if tiles]
    made = compiled(odd + swept)
    assert all(x.shared <= SHARED_BYTES for x in made)
    assert not any(x.local for x in made[len(odd):])


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("kind", "n", "k"), SHAPES)
def test_int4_tiles_fit(interpreted: ModuleType, kind: Kind, n: int, k: int, group: int) -> None:
    """The tensor cores multiply the dequantized numbers, nothing is spilled, and blocks are copied asynchronously."""
    tiles = [own(kind, "int4 bf16", rows, n, k) for rows in (1, 64, 2048)]
    for of_rows, made in zip(tiles, compiled(
            [launch(kind, "int4 bf16", each, int4_group=group) for each in tiles]), strict=True):
        assert made.local == 0
        assert made.shared <= of_rows.shared_bytes(kind, 2)
        assert "wgmma.mma_async" in made.ptx
        assert "cp.async.cg" in made.ptx


def test_helpers_compile(interpreted: ModuleType) -> None:
    """The merge of tiles' best, and the epilogue of the library's product."""
    merge = {"best": "*fp32", "places": "*i32", "ids": "*i64", "tiles": "i32"}
    finish = {"sums": "*i32", "x_scale": "*fp32", "weight_scale": "*fp32", "bias": "*bf16", "out": "*bf16",
              "tokens": "i32", "n": "i32/16"}
    merged, finished = compiled([
        Launch("linear", "argmax_merge_kernel", merge, {"BLOCK": 4096, "PDL": True}, {}),
        Launch("linear", "finish_kernel", finish, {"GATED": True, "BLOCK": 1024, "PDL": True}, {})])
    assert merged.local == finished.local == 0
    assert "ld.global.v4" in finished.ptx
    assert "griddepcontrol.wait" in merged.ptx
