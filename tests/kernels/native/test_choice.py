"""Choice of instruction set and of the form of weights, by given rates and times."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest
import torch

from npuserve.kernels import native
from npuserve.kernels.linear import linear
from npuserve.kernels.native import choice
from npuserve.kernels.native.choice import CpuKernels, CpuKernelSettings, choose, choose_form, choose_isa
from npuserve.kernels.native.packed import PackedWeight, compacts

BOTH = ["avx512_bf16", "avx512_vnni", "avx2", "portable"]
"""Instruction sets of a processor with the bfloat16 instruction."""

AMX = ["avx512_amx", *BOTH]
"""Instruction sets of a processor that also has AMX."""

NEON = ["neon_bf16", "neon_dotprod", "neon"]
"""Instruction sets of an Arm processor with the bfloat16 instruction."""

ISAS = native.library().isas if native.available() else []
needs_library = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
needs_two = pytest.mark.skipif(
    len({*ISAS} - {"portable"}) < 2, reason="the native kernels have one instruction set to choose here")


def rates(bf16: float, fma: float = 100.0, avx2: tuple[float, float, float] = (50.0, 50.0, 60.0)) -> choice.Rates:
    """Return rates. bf16: of the bfloat16 instruction; fma: of float32 with AVX-512; avx2: (bf16, fp32, int8)."""
    return {
        "avx512_bf16": {"bf16": bf16, "fp32": fma, "int8": 400.0},
        "avx512_vnni": {"bf16": fma, "fp32": fma, "int8": 400.0},
        "avx2": dict(zip(("bf16", "fp32", "int8"), avx2, strict=True))}


@pytest.mark.parametrize(("found", "expected"), [
    (rates(bf16=46), "avx512_vnni"),  # Emerald Rapids: the instruction has half the rate of FMA
    (rates(bf16=200), "avx512_bf16"),  # Zen 4
    (rates(bf16=100), "avx512_bf16"),  # as fast as FMA, without the instructions that widen
    (rates(bf16=81), "avx512_bf16"),
    (rates(bf16=80), "avx512_vnni"),
    (rates(bf16=200, avx2=(1000, 1000, 399)), "avx512_bf16"),  # a narrower set is not faster in int8
    (rates(bf16=200, avx2=(249, 1000, 1000)), "avx512_bf16"),
    (rates(bf16=200, avx2=(250, 125, 500)), "avx2"),
    (rates(bf16=46, avx2=(120, 120, 480)), "avx512_vnni"),
    ({}, "avx512_bf16"),
])
def test_choose_isa_by_rates(found: choice.Rates, expected: str) -> None:
    assert choose_isa(BOTH, found) == expected


@pytest.mark.parametrize(("amx", "bf16", "expected"), [
    (3000, 110, "avx512_amx"),  # Granite Rapids
    (100, 200, "avx512_bf16"), (50, 60, "avx512_vnni"), (100, 100, "avx512_amx")])
def test_choose_isa_by_rates_of_tiles(amx: float, bf16: float, expected: str) -> None:
    found = {"avx512_amx": {"bf16": amx, "fp32": 100.0, "int8": 2 * amx}, **rates(bf16)}
    assert choose_isa(AMX, found) == expected


@pytest.mark.parametrize(("bf16", "isas", "expected"), [
    (60, NEON, "neon_bf16"), (29, NEON, "neon_bf16"), (20, NEON, "neon_dotprod"), (0, NEON[1:], "neon_dotprod"),
    (0, NEON[2:], "neon")])
def test_choose_isa_by_rates_of_neon(bf16: float, isas: list[str], expected: str) -> None:
    found = {
        "neon_bf16": {"bf16": bf16, "fp32": 30.0, "int8": 120.0},
        "neon_dotprod": {"bf16": 30.0, "fp32": 30.0, "int8": 120.0}, "neon": {"bf16": 30.0, "fp32": 30.0, "int8": 30.0}}
    assert choose_isa(isas, {isa: found[isa] for isa in isas}) == expected


def test_choose_isa_prefers_products_of_bytes() -> None:
    found = {isa: {"bf16": 50.0, "fp32": 50.0, "int8": int8} for isa, int8 in (("avx2_vnni", 240.0), ("avx2", 60.0))}
    assert choose_isa(["avx2_vnni", "avx2", "portable"], found) == "avx2_vnni"


@pytest.mark.parametrize(("wanted", "isas", "expected"), [
    ("bf16", NEON, "neon_bf16"), ("fma", NEON, "neon_dotprod"), ("fma", NEON[2:], "neon"),
    ("amx", AMX, "avx512_amx"), ("bf16", AMX, "avx512_bf16"), ("bf16", BOTH, "avx512_bf16"),
    ("fma", BOTH, "avx512_vnni"), ("fma", BOTH[2:], "avx2"),
    ("fma", ["portable"], "portable"),
])
@pytest.mark.parametrize("bf16", [46, 200])
def test_choose_isa_forced_ignores_rates(wanted: choice.Gemm, isas: list[str], expected: str, bf16: float) -> None:
    assert choose_isa(isas, rates(bf16), wanted) == expected


def test_choose_isa_unsupported_gemm_raises_with_possible_values() -> None:
    with pytest.raises(ValueError, match=r"cpu_gemm: 'bf16' is not possible.* sets avx512_vnni, avx2, portable; "
                                         r"possible are auto, fma$"):
        choose_isa(BOTH[1:], {}, "bf16")


def test_choose_isa_never_takes_the_portable_set_beside_others() -> None:
    """A build for a processor with tiles lacks the wide set that widens bfloat16; the portable one does so slowly."""
    with pytest.raises(ValueError, match=r"possible are auto, amx; with NATIVE_ISAS=all .* builds kernels for more$"):
        choose_isa(["avx512_amx", "portable"], {}, "fma")


@pytest.mark.parametrize(("plain", "compact", "expected"), [
    (1.0, 0.8, "compact"), (1.0, 1.0, "compact"), (0.96, 1.0, "compact"), (0.94, 1.0, "plain"), (1.0, 3.0, "plain")])
def test_choose_form_by_times(plain: float, compact: float, expected: str) -> None:
    assert choose_form(plain, compact) == expected


@pytest.fixture
def lib() -> Iterator[native.Library]:
    found = native.library()
    before = found.isa, found.compact
    yield found
    found.isa, found.compact = before


def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("measure_rates", "measure_forms"):
        monkeypatch.setattr(choice, name, lambda *_: pytest.fail("something is measured"))


@needs_two
def test_choose_faster_set_is_used_by_all_calls(lib: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {ISAS[0]: dict.fromkeys(choice.KINDS, 10.0), ISAS[1]: dict.fromkeys(choice.KINDS, 20.0)}
    monkeypatch.setattr(choice, "measure_rates", lambda: other)
    chosen = choose(CpuKernelSettings())
    assert (chosen.isa, lib.isas[lib.isa], chosen.gflops) == (ISAS[1], ISAS[1], other)
    assert (chosen.gemm, chosen.plain_ms, chosen.measured_bytes) == (choice.gemm_of(ISAS[1]), None, 0)


@needs_two
def test_choose_kept_ignores_rates(lib: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CpuKernels(ISAS[1], choice.gemm_of(ISAS[1]), "plain", {ISAS[1]: {"bf16": 1.0}}, 2.0, 3.0, 4)
    told = CpuKernels(**json.loads(json.dumps(dataclasses.asdict(kept))))
    no_measuring(monkeypatch)
    lib.compact = True
    assert choose(CpuKernelSettings(kept=told), 1024) == kept
    assert (lib.isas[lib.isa], lib.compact) == (ISAS[1], False)


@needs_library
def test_choose_kept_unknown_set_chooses_again(lib: native.Library) -> None:
    assert choose(CpuKernelSettings(kept=CpuKernels("avx1024", "fma", "plain"))).isa in ISAS


@needs_library
@pytest.mark.parametrize(("times", "form"), [((1.0, 2.0), "plain"), ((2.0, 1.0), "compact")])
def test_choose_form_is_measured_for_large_models(
    lib: native.Library, monkeypatch: pytest.MonkeyPatch, times: tuple[float, float], form: str
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(native.Library, "usually_compact", True)
    monkeypatch.setattr(choice, "measure_forms", lambda inputs, nbytes: asked.append(inputs) or times)
    chosen = choose(CpuKernelSettings(), 1024)
    assert (chosen.weights, chosen.plain_ms, chosen.compact_ms) == (form, 1e3 * times[0], 1e3 * times[1])
    assert chosen.measured_bytes >= 64 << 20
    assert asked == [1024]
    assert compacts(1024, torch.bfloat16) == lib.compact == (form == "compact")
    assert PackedWeight.pack(torch.ones(16, 1024).bfloat16()).compact == (form == "compact")
    assert not PackedWeight.pack(torch.ones(16, 1020).bfloat16()).compact


@needs_library
@pytest.mark.parametrize("usual", [True, False])
def test_choose_form_is_not_measured_without_need(
    lib: native.Library, monkeypatch: pytest.MonkeyPatch, usual: bool
) -> None:
    """For a small model, a requested form, and a set on which compact weights are known to be slow."""
    monkeypatch.setattr(native.Library, "usually_compact", usual)
    monkeypatch.setattr(choice, "measure_forms", lambda *_: pytest.fail("the form is measured"))
    assert choose(CpuKernelSettings(), 0).weights == ("compact" if usual else "plain")
    if not usual:
        assert choose(CpuKernelSettings(), 1024).weights == "plain"
    for form in ("plain", "compact"):
        assert choose(CpuKernelSettings(weights=form), 1024).weights == form  # type: ignore[arg-type]


@needs_library
def test_measure_rates_covers_compared_sets(lib: native.Library) -> None:
    before = lib.isa
    found = choice.measure_rates()
    assert list(found) == ([isa for isa in ISAS if isa != "portable"] or ISAS)
    assert all(list(each) == ["bf16", "fp32", "int8"] and min(each.values()) > 0 for each in found.values())
    assert lib.isa == before


@needs_library
@pytest.mark.parametrize("inputs", [8, 264, 1024])
def test_measure_forms_products_equal_whole_weights(monkeypatch: pytest.MonkeyPatch, inputs: int) -> None:
    """The measured products compute the rows of the matrix that they represent, in both forms."""
    made: list[PackedWeight] = []
    allocate = PackedWeight.allocate.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(PackedWeight, "allocate", classmethod(
        lambda cls, *args: made.append(allocate(cls, *args)) or made[-1]))
    times = choice.measure_forms(inputs, 3 << 20)
    assert min(times) > 0
    plain, compact = (weight for weight in made if weight.n * inputs * 2 >= 3 << 20)
    assert (plain.compact, compact.compact) == (False, True)
    assert torch.equal(plain.dense(), compact.dense())
    x = torch.randn(1, inputs).bfloat16()
    product = linear.implementations["cpu"].function
    assert torch.equal(product(x, plain, None), product(x, compact, None))
