"""Choice of instruction set and weight form of the CPU kernels, by measurements on this processor.

Instruction set: sets of one width differ in how they multiply bfloat16 or int8. Tile registers (AMX) multiply both.
Other sets have a vector instruction for two products, or widen to float32 in registers and take one FMA a product. The
fastest set depends on the processor. The whole process runs on one set, so that a row's results are the same in every
batch.

Form of bfloat16 weights: plain, or compact (gemm/compact.h). Compact weights have a quarter less bytes to read and
are unpacked for each product. Both forms give the same results.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from npuserve.kernels import native
from npuserve.kernels.native.caches import cache_bytes
from npuserve.kernels.native.packed import PackedWeight

Gemm = Literal["auto", "amx", "bf16", "fma"]
Form = Literal["auto", "plain", "compact"]

Rates = Mapping[str, Mapping[str, float]]
"""Instruction set -> {"bf16", "fp32", "int8"} -> 10**9 operations a second of one thread; a product and its sum are two
operations."""

KINDS = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8}

BF16_ISAS = "avx512_bf16", "neon_bf16"
"""Instruction sets whose kernels multiply bfloat16 by a vector instruction for it."""

AMX_ISA = "avx512_amx"
"""Instruction set whose kernels multiply bfloat16 and int8 by tile registers."""

MIN_SPEEDUP = 1.25
"""Minimum ratio of rates for a narrower set. At equal rates the wider set is faster, since it needs fewer instructions
beside the products."""

MAX_PLAIN_RATIO = 0.95
"""Maximum ratio of times, plain to compact, for plain weights, which need more memory."""

SMALL_BYTES = 128 << 20
"""Plain bytes of weights below which a model may fit a cache, so that the form is not measured for it."""

_ITERATIONS, _ROUNDS = 2000, 8
_MIN_BYTES, _MAX_BYTES = 64 << 20, 128 << 20
_PASSES = 5
_SOURCE_ROWS = 256


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """Instruction set and weight form of the CPU kernels of this process.

    isa: instruction set.
    gemm: how it multiplies bfloat16: "amx" by tiles, "bf16" by a vector instruction, "fma" widened to fp32.
    weights: "plain" or "compact".
    gflops: rates by which `isa` was chosen.
    plain_ms, compact_ms: milliseconds of a product of one row with weights in each form. The plain weights have
        `measured_bytes`. None if the form was not measured.
    """

    isa: str
    gemm: str
    weights: str
    gflops: Rates = field(default_factory=dict)
    plain_ms: float | None = None
    compact_ms: float | None = None
    measured_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CpuKernelSettings:
    """Settings of the choice.

    gemm, weights: settings cpu_gemm and cpu_weights.
    kept: earlier choice to apply unchanged, so that numbers stay the same; None to choose.
    """

    gemm: Gemm = "auto"
    weights: Form = "auto"
    kept: CpuKernels | None = None


AUTO = CpuKernelSettings()


def gemm_of(isa: str) -> str:
    """Return how the kernels of an instruction set multiply bfloat16: "amx", "bf16" or "fma"."""
    return "bf16" if isa in BF16_ISAS else "amx" if isa == AMX_ISA else "fma"


def choose(wanted: CpuKernelSettings, inputs: int = 0) -> CpuKernels:
    """Choose instruction set and weight form, and apply them to all later calls of this process.

    Weights that are packed already keep their form, and are multiplied right by any instruction set.

    inputs: K of the weights for measuring the form; 0 takes the usual form without measuring.

    Raises ValueError, which names the setting, for a setting that this processor does not support.
    """
    lib = native.library()
    kept = wanted.kept
    if kept is not None and kept.isa in lib.isas:
        lib.isa = lib.isas.index(kept.isa)
        lib.compact = kept.weights == "compact"
        return kept
    _require(lib.isas, wanted.gemm)
    rates = measure_rates()
    lib.isa = lib.isas.index(choose_isa(lib.isas, rates, wanted.gemm))
    isa = lib.isas[lib.isa]
    times, size = None, 0
    if wanted.weights != "auto":
        lib.compact = wanted.weights == "compact"
    else:
        lib.compact = lib.usually_compact
        if inputs and lib.compact:
            size = min(max(_MIN_BYTES, cache_bytes()), _MAX_BYTES)
            times = measure_forms(inputs, size)
            lib.compact = choose_form(*times) == "compact"
    plain, compact = times or (None, None)
    return CpuKernels(
        isa, gemm_of(isa), "compact" if lib.compact else "plain", rates,
        plain and 1e3 * plain, compact and 1e3 * compact, size)


def choose_isa(isas: Sequence[str], rates: Rates, wanted: Gemm = "auto") -> str:
    """Return the widest set that `wanted` allows, unless another is faster by MIN_SPEEDUP.

    isas: instruction sets of the processor, the widest first.
    rates: rates of some of these sets. A set without rates never replaces a wider one.

    Raises ValueError if no set multiplies as `wanted`.
    """
    _require(isas, wanted)
    chosen, *others = [isa for isa in _candidates(isas) if wanted in ("auto", gemm_of(isa))]
    for other in others:
        if other in rates and chosen in rates and _is_faster(other, chosen, rates):
            chosen = other
    return chosen


def _candidates(isas: Sequence[str]) -> Sequence[str]:
    """Return the sets that may be chosen: not the portable one, which is never the fastest, beside others."""
    return [isa for isa in isas if isa != "portable"] or isas


def _require(isas: Sequence[str], wanted: Gemm) -> None:
    possible = dict.fromkeys(gemm_of(isa) for isa in _candidates(isas))
    if wanted not in ("auto", *possible):
        # On a processor with tiles the sets for others are not built by default.
        hint = "; with NATIVE_ISAS=all the installation builds kernels for more" if AMX_ISA in isas else ""
        raise ValueError(
            f"cpu_gemm: {wanted!r} is not possible: the kernels and this processor have the instruction sets "
            f"{', '.join(isas)}; possible are auto, {', '.join(possible)}{hint}")


def _is_faster(other: str, chosen: str, rates: Rates) -> bool:
    """Compare sets of one width by bfloat16; sets of other widths must be faster in all kinds."""
    same_width = other.partition("_")[0] == chosen.partition("_")[0]
    return all(rates[other][kind] >= MIN_SPEEDUP * rates[chosen][kind] for kind in (["bf16"] if same_width else KINDS))


def measure_rates() -> dict[str, dict[str, float]]:
    """Return the rates of one thread on every instruction set that may be chosen, in about 2 ms."""
    lib = native.library()
    measured = [(lib.isas.index(isa), isa) for isa in _candidates(lib.isas)]
    done, seconds = torch.zeros(1, dtype=torch.int64), (ctypes.c_double * 1)()
    ops = {kind: lib.pack("peak", dtype, [done], [1, _ITERATIONS]) for kind, dtype in KINDS.items()}
    best = {isa: dict.fromkeys(KINDS, 0.0) for _, isa in measured}
    for _ in range(_ROUNDS):  # round-robin, so that a disturbance affects all sets
        for number, isa in measured:
            for kind, op in ops.items():
                lib.run(op, 1, seconds=seconds, isa=number)
                best[isa][kind] = max(best[isa][kind], int(done) / max(seconds[0], 1e-9) / 1e9)
    return best


def choose_form(plain_seconds: float, compact_seconds: float) -> str:
    """Return the faster form, or "compact" if plain gains less than 5 %."""
    return "plain" if plain_seconds < MAX_PLAIN_RATIO * compact_seconds else "compact"


def measure_forms(inputs: int, nbytes: int) -> tuple[float, float]:
    """Return the seconds of a product of one row with weights [N, inputs]: (plain, compact).

    The product runs with all threads on the instruction set in use.

    nbytes: bytes of the plain weights, more than the caches hold.
    """
    lib = native.library()
    generator = torch.Generator().manual_seed(0)
    source = (torch.randn(_SOURCE_ROWS, inputs, generator=generator) / 50).bfloat16()
    copies = -(-nbytes // source.nbytes)
    rows = copies * _SOURCE_ROWS
    x = source[:1].clone()
    out = torch.empty(1, rows, dtype=torch.bfloat16)
    ops = []
    keep = []
    for compact in (False, True):
        piece = PackedWeight.pack(source, compact)
        whole = PackedWeight.allocate(rows, inputs, torch.bfloat16, compact, native.Arena().empty)
        whole.words.view(copies, -1).copy_(piece.words)  # a multiple of whole panels
        ops.append(lib.pack(whole.op("linear"), torch.bfloat16, [x, whole.words, None, out, None], [1, inputs, rows]))
        keep.append(whole)
    best = [float("inf"), float("inf")]
    for _ in range(_PASSES):
        for form, op in enumerate(ops):
            # Not the library's clock, which starts with the caller: other threads may start earlier.
            began = time.perf_counter()
            lib.run(op, 1)
            best[form] = min(best[form], time.perf_counter() - began)
    return best[0], best[1]


def missing_text(missing: Sequence[str]) -> str:
    """Return the warning about a library that is not built for all instruction sets of this processor.

    missing: `Library.missing_isas`, at least one.
    """
    return (f"the CPU kernels are not built for {', '.join(missing)}, which this processor has, so they may be slow; "
            "install the package again on this machine, or with NATIVE_ISAS=all, by a compiler that knows them")


def describe(chosen: CpuKernels, isas: Sequence[str] = ()) -> list[str]:
    """Return the choice, the available instruction sets and the measurements as lines of text."""
    others = f" (of {', '.join(isas)})" if isas else ""
    lines = [f"CPU kernels run on {chosen.isa}{others}, bfloat16 products by {chosen.gemm}, {chosen.weights} weights"]
    lines += [f"one thread on {isa}: bf16 {found['bf16']:.0f} GFLOP/s, fp32 {found['fp32']:.0f} GFLOP/s, "
              f"int8 {found['int8']:.0f} GOP/s" for isa, found in chosen.gflops.items()]
    if chosen.plain_ms and chosen.compact_ms:
        lines.append(f"one row with {chosen.measured_bytes >> 20} MiB of weights: {chosen.plain_ms:.2f} ms plain, "
                     f"{chosen.compact_ms:.2f} ms compact")
    return lines
