"""Ceilings: they count what they do. Their values depend on the machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from npuserve.kernels import native
from npuserve.kernels.bench import ceilings as module
from npuserve.kernels.bench.ceilings import Ceilings

SMALL = 8 << 20
needs_library = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


@pytest.fixture(params=[pytest.param(True, marks=needs_library), False], ids=["native", "torch"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the native kernels; passes are as short as possible."""
    monkeypatch.setattr(module, "_PASS_SECONDS", 1e-4)
    monkeypatch.setattr(module, "_TORCH_SIZES", (64, 64))
    if not request.param:
        monkeypatch.setattr("npuserve.kernels.native.shared_library._LIBRARY", None)


@pytest.mark.usefixtures("either")
def test_best_has_all_ceilings_above_zero() -> None:
    found = Ceilings(SMALL).best()
    assert list(found) == ["read_gbs", "bf16_gflops", "int8_gops", "fp32_gflops"]
    assert all(value > 0 for value in found.values())


@pytest.mark.usefixtures("either")
def test_read_bytes_are_whole_pieces() -> None:
    assert Ceilings(SMALL - 1).read_bytes == SMALL


def test_peak_of_narrow_numbers_uses_faster_wide_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor whose bf16 instruction is half as fast as its fp32 and int8 instructions, which are equally fast."""
    seconds = {torch.float32: 1.0, torch.bfloat16: 2.0, torch.int8: 1.0}
    ran: list[torch.dtype] = []

    def computer(self: Ceilings, dtype: torch.dtype, isa: int) -> tuple[Callable[[], object], int]:
        return lambda: ran.append(dtype), 100

    def clock(machine: module.Machine, run: Callable[[], object]) -> float:
        ran.clear()
        run()
        return seconds[ran[0]] if ran else 1.0

    monkeypatch.setattr(Ceilings, "_computer", computer)
    monkeypatch.setattr(module, "timed", clock)
    made = Ceilings(SMALL)
    assert [made.peak(kind) for kind in ("fp32", "bf16", "int8")] == [100.0, 100.0, 100.0]  # type: ignore[arg-type]
    best = made.best()
    assert best["int8_gops"] == best["bf16_gflops"] == best["fp32_gflops"] == 100.0 / 1e9


@needs_library
def test_peak_with_other_set_in_use_takes_fastest_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The set with the bf16 instruction is the fastest, while the kernels use a set without it."""
    lib = native.library()
    dtypes = {lib.kernel(f"peak/{name}"): name for name in ("bfloat16", "int8", "float32")}
    ran: list[tuple[int, str | None]] = []

    class Spy:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def npuserve_run(self, isa: int, ops: bytes, *rest: object) -> int:
            ran.append((isa, dtypes.get(int.from_bytes(ops[:4], "little"))))
            return int(real.npuserve_run(isa, ops, *rest))

    def clock(machine: module.Machine, run: Callable[[], object]) -> float:
        ran.clear()
        run()
        return 1.0 if ran == [(0, "bfloat16")] else 1e6

    real = lib._lib
    with native.using(lib.isas[-1]):
        monkeypatch.setattr(module, "timed", clock)
        monkeypatch.setattr(lib, "_lib", Spy())
        made = Ceilings(SMALL)
        for kind in ("bf16", "int8"):
            made.peak(kind)  # type: ignore[arg-type]
            assert ran == [(0, "bfloat16")]
        made.peak("fp32")
        assert ran[0][1] == "float32"


@needs_library
def test_read_covers_every_byte() -> None:
    """The xor of a piece's words depends on each of its bytes."""
    pieces, size = 3, 1536
    memory = torch.randint(256, (pieces, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = torch.empty(pieces, dtype=torch.int32)
    for isa in native.library().isas:
        with native.using(isa):
            native.call("read", ("read", torch.int8, [memory, found.zero_()], [pieces, size]))
        for piece, got in zip(memory.view(torch.int32).tolist(), found.tolist(), strict=True):
            expected = 0
            for word in piece:
                expected ^= word
            assert got == expected, isa


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32])
def test_peak_operations_grow_with_iterations(dtype: torch.dtype) -> None:
    done = torch.zeros(2, 2, dtype=torch.int64)
    for isa in native.library().isas:
        with native.using(isa):
            for row, iterations in zip(done, (10, 30), strict=True):
                native.call("peak", ("peak", dtype, [row], [2, iterations]))
        assert (done[1] == 3 * done[0]).all(), isa
        assert (done[0] >= 10 * 2 * native.LANES).all(), isa
