"""`npuserve bench kernels` on cases that are small enough to count by hand."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.cli import main as cli
from npuserve.cli.bench import kernels as bench_kernels
from npuserve.kernels import native
from npuserve.kernels.bench import ceilings, measure
from npuserve.kernels.bench.ceilings import Ceilings
from npuserve.kernels.bench.costs import COSTS, Cost
from npuserve.kernels.linear import linear
from npuserve.kernels.native import choice
from npuserve.kernels.registry import GOLDEN, KERNELS, Case, Implementation, Kernel
from tests.support.command import npuserve

Capture = pytest.CaptureFixture[str]
FIELDS = {"kernel", "case", "dtype", "backend", "error", "other_ids", "seconds", "bytes_per_second",
          "operations_per_second", "bound", "share", "others"}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the passes and shrink the memory. Restore threads and choice of kernels at the end."""
    monkeypatch.setattr(ceilings.Ceilings.__init__, "__defaults__", (8 << 20,))
    for module, name, value in (
        (ceilings, "_PASS_SECONDS", 1e-4), (measure, "COLD_BYTES", 1 << 16), (measure, "_PASS_SECONDS", 1e-4),
        (measure, "_MOST_PASSES", 5), (measure, "_SECONDS", 0.0),
        (choice, "_MAX_BYTES", 1 << 20),
    ):
        monkeypatch.setattr(module, name, value)
    torch_threads = torch.get_num_threads()
    lib = native.library() if native.available() else None
    before = (lib.isa, lib.compact, lib.threads) if lib else None
    yield
    torch.set_num_threads(torch_threads)
    if lib and before:
        lib.isa, lib.compact, threads = before
        lib.set_threads(threads)


def bench(*arguments: str, capsys: Capture) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run with --json. Return the first object, which has the ceilings, and the rows."""
    assert cli.main(["bench", "kernels", *arguments, "--threads", "1", "--json"]) == 0
    first, *rows = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    return first, rows


def test_bench_kernels_prints_the_chosen_kernels(
    doubled: Kernel[..., Any], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.available() or len(isas := native.library().isas) < 2:
        pytest.skip("the native kernels have no choice here")
    rates = {isas[0]: dict.fromkeys(choice.KINDS, 1.0), isas[1]: dict.fromkeys(choice.KINDS, 2.0)}
    monkeypatch.setattr(choice, "measure_rates", lambda: rates)
    found = bench("--kernel", "doubled", capsys=capsys)[0]["cpu_kernels"]
    assert (found["isa"], found["gflops"]) == (isas[1], rates)
    assert native.library().isas[native.library().isa] == isas[1]
    assert found["plain_ms"] > 0
    assert found["compact_ms"] > 0
    found = bench("--kernel", "doubled", "--isa", isas[0], capsys=capsys)[0]["cpu_kernels"]
    assert (found["isa"], found["gemm"], found["plain_ms"]) == (isas[0], choice.gemm_of(isas[0]), None)


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> Kernel[..., Any]:
    """Kernel that doubles its argument in place and returns the argmax. The implementation "off" adds 0.25 and returns
    the argmin."""

    def golden(x: Tensor) -> Tensor:
        return x.mul_(2).argmax(dim=-1)

    def off(x: Tensor) -> Tensor:
        return x.mul_(2).add_(0.25).argmin(dim=-1)

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor]:
        return (torch.arange(20.0).to(dtype).view(4, 5),)

    cases = [Case("4x5", make, True), Case("small", make)]
    kernel: Kernel[..., Any] = Kernel("doubled", golden, cases, (torch.float32,))
    kernel.implementations["off"] = Implementation(off)
    monkeypatch.setitem(KERNELS, "doubled", kernel)
    monkeypatch.setitem(COSTS, "doubled", lambda x: Cost(2 * x.nbytes, x.numel(), "fp32"))
    return kernel


def test_bench_kernels_errors_include_changed_arguments(doubled: Kernel[..., Any], capsys: Capture) -> None:
    _, rows = bench("--kernel", "doubled", "--golden", capsys=capsys)
    assert [(row["backend"], row["error"], row["other_ids"]) for row in rows] == [("off", 0.25, 4), (GOLDEN, 0.0, 0)]
    for row in rows:
        assert set(row) == FIELDS
        assert (row["case"], row["dtype"], row["bound"], row["share"]) == ("4x5", "float32", "cache", None)
        assert row["bytes_per_second"] * row["seconds"] == pytest.approx(2 * 20 * 4)
        assert row["operations_per_second"] * row["seconds"] == pytest.approx(20)


def test_measure_share_belongs_to_the_binding_ceiling(capsys: Capture) -> None:
    """With few rows, a real kernel is bound by its weight, which is read from successive copies."""
    case = Case("2x64x64", linear.cases[2].make, True)
    bench, ceilings = measure.Bench(linear, case, torch.bfloat16), Ceilings()
    found = bench.measure(GOLDEN, ceilings, {
        "read_gbs": 1e-3, "bf16_gflops": 1e6, "int8_gops": 1e6, "fp32_gflops": 1e6})
    assert found.bound == "memory"
    assert found.error < 0.05
    assert found.share
    assert found.share > 0
    nothing = {"read_gbs": 1e6, "bf16_gflops": 1e-3, "int8_gops": 1e6, "fp32_gflops": 1e6}
    assert bench.measure(GOLDEN, ceilings, nothing).bound == "matrix"


def test_measure_share_of_memory_counts_only_cold_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel and the memory read take one second each. The weight is cold; as many bytes again are cached."""

    def golden(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.ones(4, 64), torch.ones(64, 64)

    monkeypatch.setitem(COSTS, "half", lambda x, weight: Cost(2 * weight.nbytes - 4, 1, "fp32", cold=(1,)))
    monkeypatch.setattr(measure, "timed", lambda machine, run: 1.0)
    monkeypatch.setattr(Ceilings, "read", lambda self: 64 * 64 * 4.0)
    half: Kernel[..., Any] = Kernel("half", golden, [Case("4x64", make, True)], (torch.float32,))
    found = measure.Bench(half, half.cases[0], torch.float32).measure(GOLDEN, Ceilings(), {
        "read_gbs": 1e-6, "bf16_gflops": 1e6, "int8_gops": 1e6, "fp32_gflops": 1e6})
    assert (found.bound, found.share) == ("memory", 1.0)


def check_rows(best: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    assert min(best["int8_gops"], best["bf16_gflops"], best["fp32_gflops"], best["read_gbs"]) > 0
    assert {row["bound"] for row in rows} >= {"cache", "memory"}
    assert all((row["share"] is None) == (row["bound"] == "cache") for row in rows)


@pytest.mark.slow
def test_bench_kernels_prints_ceilings_and_shares(capsys: Capture) -> None:
    check_rows(*bench("--kernel", "rms_norm", "linear", "--case", "1x1024", capsys=capsys))


@pytest.mark.full
def test_bench_kernels_ceilings_are_in_order() -> None:
    """Run as a process, the ceiling of a narrow dtype is not below that of a wide dtype."""
    done = npuserve("bench", "kernels", "--kernel", "rms_norm", "linear", "--case", "1x1024", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    best, *rows = (json.loads(line) for line in done.stdout.splitlines())
    assert best["int8_gops"] >= best["bf16_gflops"] >= best["fp32_gflops"]
    check_rows(best, rows)


def test_cache_bytes_sums_the_last_level_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three level-3 caches belong to usable CPUs; each cache is shared by two CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 9})
    for cpu, sharing in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3"), (4, "4-5")):
        for index, level, size, shared in ((0, 1, "32K", str(cpu)), (3, 3, "327680K", sharing)):
            folder = tmp_path / f"cpu{cpu}/cache/index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{text}\n")
    assert measure.cache_bytes(tmp_path) == 2 * 320 << 20
    assert measure.cache_bytes(tmp_path / "none") == 0


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
def test_calls_programs_include_each_call() -> None:
    x = torch.ones(4, 8)
    seen: list[int] = []

    def function(value: Tensor) -> Any:
        seen.append(1)
        return KERNELS["swiglu"].implementations["cpu"].function(value)

    calls = measure._calls(function, [(x,)] * 6, ceilings.HOST)
    assert len(seen) == 6
    calls()
    assert len(seen) == 6  # the program calls no Python
    measure._calls(function, [(x,)] * 6, None)()
    assert len(seen) == 12


def test_bench_kernels_without_json_prints_a_table(doubled: Kernel[..., Any], capsys: Capture) -> None:
    assert cli.main(["bench", "kernels", "--kernel", "doubled", "--golden", "--threads", "1"]) == 0
    *top, legend, _, head, golden, off = capsys.readouterr().out.splitlines()
    first, rows = top[0], [golden, off]
    assert native.available() == any(line.startswith("CPU kernels run on ") for line in top)
    assert first.startswith("ceilings: memory read ")
    assert legend.endswith("absent for caches, which are not measured")
    assert all(row.split()[-3:-1] == ["–", "cache"] for row in rows)
    assert head.split()[:5] == ["kernel", "case", "dtype", "backend", "error"]
    assert [row.split()[:5] for row in rows] == [
        ["doubled", "4x5", "float32", "off", "4"], ["doubled", "4x5", "float32", "golden", "0.0e+00"]]


def test_bench_kernels_times_no_golden_function_by_default(
    doubled: Kernel[..., Any], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rows = bench("--kernel", "doubled", capsys=capsys)
    assert [row["backend"] for row in rows] == ["off"]
    monkeypatch.delitem(doubled.implementations, "off")  # a kernel without another implementation is served by it
    _, rows = bench("--kernel", "doubled", capsys=capsys)
    assert [row["backend"] for row in rows] == [GOLDEN]


def test_bench_kernels_shows_its_progress_on_a_terminal(
    doubled: Kernel[..., Any], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["bench", "kernels", "--kernel", "doubled", "--threads", "1"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert cli.main(["bench", "kernels", "--kernel", "doubled", "--golden", "--threads", "1"]) == 0
    shown = capsys.readouterr().err.split("\r\x1b[K")
    assert "measuring the machine's ceilings, then 2 measurements" in shown
    assert shown[-4:] == ["1 of 2: doubled 4x5 off", "", "2 of 2: doubled 4x5 golden", ""]


def test_bench_kernels_backend_selects_implementations(doubled: Kernel[..., Any], capsys: Capture) -> None:
    for backend in ("off", GOLDEN):
        _, rows = bench("--kernel", "doubled", "--backend", backend, capsys=capsys)
        assert [row["backend"] for row in rows] == [backend]


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
def test_bench_kernels_isa_selects_each_instruction_set(doubled: Kernel[..., Any], capsys: Capture) -> None:
    before = native.library().isa
    for isa in native.library().isas:
        found, _ = bench("--kernel", "doubled", "--isa", isa, capsys=capsys)
        assert set(found) == {"read_gbs", "bf16_gflops", "int8_gops", "fp32_gflops", "cpu_kernels"}
        assert found["cpu_kernels"]["isa"] == isa
    assert native.library().isa == before


@pytest.mark.parametrize(("arguments", "message"), [
    (["--kernel", "linear", "sing"], "kernel: 'sing' is not one of"),
    (["--kernel", "linear", "--case", "7x7"], "case: no benchmark case of linear contains '7x7'"),
    (["--isa", "vax"], "isa: 'vax' is not one of"),
    (["--backend", "abacus"], "backend: 'abacus' is not one of"),
])
def test_bench_kernels_unknown_name_is_refused(arguments: list[str], message: str, capsys: Capture) -> None:
    assert cli.main(["bench", "kernels", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_line_of_each_case_has_a_space_between_case_and_dtype() -> None:
    row: dict[str, Any] = {
        "dtype": "bfloat16", "backend": "cpu", "error": 0.0, "other_ids": 0, "seconds": 1e-6, "bytes_per_second": 1e9,
        "operations_per_second": 1e9, "share": 0.5, "bound": "memory", "others": 0.0}
    for kernel in KERNELS.values():
        for case in kernel.cases:
            if case.benchmark:
                line = bench_kernels._line({**row, "kernel": kernel.name, "case": case.name})
                assert line.split()[:-9] == f"{kernel.name} {case.name}".split(), case.name
