"""`npuserve bench step` on the built-in model."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from npuserve.cli import main as cli
from npuserve.cli.bench import kernel_calls
from npuserve.cli.bench.step import WARM_UP, Bench, needed_blocks, spare
from npuserve.kernels import native
from npuserve.kernels.bench import ceilings, measure
from npuserve.kernels.native.packed import packed_words
from npuserve.kernels.registry import KERNELS
from npuserve.npu.backends.base import Backend
from npuserve.npu.execution.batch import Batch
from npuserve.npu.execution.in_flight import LaunchedStep
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import Row, StepResult
from npuserve.service.config import ServerConfig
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler

DECODE = ("batch", "context", "decode_tokens_per_second", "step_ms_p50", "kernel_share", "host_us", "decode_gbs")
PREFILL = ("prompt", "prefill_tokens_per_second", "ttft_ms_p50", "prefill_gflops")
SMALL = ["--kv-cache-memory", "64MiB", "--threads", "1"]


def nbytes(n: int, k: int) -> int:
    """Return the bytes of a bfloat16 weight."""
    return 4 * packed_words(n, k, torch.bfloat16) if native.available() else 2 * n * k


def test_bench_step_json_has_one_object_per_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", "--batch", "1,3", "--context", "40", "--prompt", "70", "--tokens", "4",
                     "--max-num-batched-tokens", "32", "--json", *SMALL]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert set(row) == {*DECODE, *PREFILL, "weights_bytes", "cpu_kernels", "peak_rss_bytes"}
        assert row["context"] == 40
        assert row["prefill_tokens_per_second"] == pytest.approx(70 / row["ttft_ms_p50"] * 1e3)
        assert row["peak_rss_bytes"] > row["weights_bytes"] > 1 << 20
        assert bool(row["cpu_kernels"]) == native.available()
        if native.available():
            assert row["cpu_kernels"]["isa"] == native.library().isas[native.library().isa]
        assert 0 < row["kernel_share"] < 1
        assert 0 < row["host_us"] < 1e3 * 1e4


@pytest.mark.slow
def test_kernel_share_after_late_collection_is_at_most_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a late collection, the next step ends on the device before the host waits for it."""
    collect = Runner.collect

    def late(runner: Runner, launched: LaunchedStep) -> StepResult:
        result = collect(runner, launched)
        if not result.timed:
            time.sleep(0.05)
        return result

    monkeypatch.setattr(Runner, "collect", late)
    assert cli.main(["bench", "step", "--batch", "32", "--context", "64", "--prompt", "8", "--tokens", "16", "--json",
                     *SMALL]) == 0
    row = json.loads(capsys.readouterr().out)
    assert 0 < row["kernel_share"] < 1
    assert row["host_us"] > 0


def test_bench_step_bytes_and_operations_match_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The built-in model has 5 layers, hidden 256, 4/2 heads of 64, intermediate 512, a tied vocabulary of 2048."""
    assert cli.main(["bench", "step", "--batch", "2", "--context", "40", "--prompt", "70", "--tokens", "5",
                     "--json", *SMALL]) == 0
    row = json.loads(capsys.readouterr().out)
    layer = 256 * 512 + 256 * 256 + 256 * 1024 + 512 * 256
    products = 2 * 5 * layer * 70 + 5 * 4 * 4 * 64 * (70 * 71 // 2)
    assert row["prefill_gflops"] * 1e9 * row["ttft_ms_p50"] / 1e3 == pytest.approx(products, rel=0.01)
    step = row["decode_gbs"] * 1e9 * 2 / row["decode_tokens_per_second"]
    keys_and_values = 2 * 5 * 2 * 64 * 2 * (2 * 40)
    assert step == pytest.approx(row["weights_bytes"] + keys_and_values, rel=0.02)
    weights = 5 * (nbytes(512, 256) + nbytes(256, 256) + nbytes(1024, 256) + nbytes(256, 512)) + nbytes(2048, 256)
    assert row["weights_bytes"] == pytest.approx(weights, rel=0.01)


def test_bench_step_weights_bytes_match_the_storage(capsys: pytest.CaptureFixture[str]) -> None:
    """The LM head shares its weight with the embedding. In int8 each of its rows has a scale and a sum."""
    rows = []
    for head in ("auto", "int8"):
        assert cli.main(["bench", "step", "--batch", "1", "--context", "8", "--prompt", "8", "--tokens", "2",
                         "--lm-head-dtype", head, "--json", *SMALL]) == 0
        rows.append(json.loads(capsys.readouterr().out))
    whole, int8 = rows
    less = nbytes(2048, 256) - 2048 * (256 + 8)
    assert whole["weights_bytes"] - int8["weights_bytes"] == less
    read = [row["decode_gbs"] * 1e9 / row["decode_tokens_per_second"] for row in rows]
    assert read[0] - read[1] == pytest.approx(less, rel=0.01)


def test_bench_step_ceilings_and_lists_have_all_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "_PASS_SECONDS", 1e-4)
    monkeypatch.setattr(ceilings.Ceilings.__init__, "__defaults__", (8 << 20,))
    monkeypatch.setattr(measure, "COLD_BYTES", 1 << 20)
    assert cli.main(["bench", "step", "--batch", "1,2", "--context", "8,24", "--prompt", "16,48", "--tokens", "4",
                     "--ceilings", "--json", *SMALL]) == 0
    *rows, other = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["context"], row["batch"], row["prompt"]) for row in rows] == [
        (8, 1, 16), (8, 2, 16), (24, 1, 16), (24, 2, 16)]
    matrix, memory = {"matrix_ceiling_gflops", "matrix_share"}, {"read_ceiling_gbs", "read_share"}
    for row in rows:
        assert set(row) == {*DECODE, *PREFILL, *matrix, *memory, "weights_bytes", "cpu_kernels", "peak_rss_bytes"}
        assert row["read_share"] == pytest.approx(row["decode_gbs"] / row["read_ceiling_gbs"])
        assert row["matrix_share"] == pytest.approx(row["prefill_gflops"] / row["matrix_ceiling_gflops"])
    assert set(other) == {*PREFILL, *matrix, "weights_bytes", "cpu_kernels", "peak_rss_bytes"}
    assert other["prompt"] == 48


def test_bench_step_read_share_of_cached_weights_is_absent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "_PASS_SECONDS", 1e-4)
    monkeypatch.setattr(ceilings.Ceilings.__init__, "__defaults__", (8 << 20,))
    assert cli.main(["bench", "step", "--batch", "1", "--context", "8", "--prompt", "8", "--tokens", "4",
                     "--ceilings", "--json", *SMALL]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["weights_bytes"] < measure.COLD_BYTES
    assert row["read_share"] is None
    assert row["read_ceiling_gbs"] > 0


@pytest.mark.slow
def test_bench_step_default_lengths_fit_the_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", "--batch", "32", "--tokens", "1", "--json", *SMALL]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["context"], row["prompt"]) == (256, 256)


def test_bench_step_without_json_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", "--batch", "2", "--context", "8", "--prompt", "8", "--tokens", "2", *SMALL]) == 0
    *chosen, head, row = capsys.readouterr().out.splitlines()
    assert native.available() == any(line.startswith("CPU kernels run on ") for line in chosen)
    assert head.split()[:2] == ["batch", "context"]
    assert row.split()[:2] == ["2", "8"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--context", "600"], "max_model_len is 512"),
    (["--batch", "64", "--context", "300", "--prompt", "100", "--kv-cache-memory", "8MiB",
      "--max-num-batched-tokens", "4096"],
     "the KV cache holds"),
    (["--batch", "2", "--context", "8", "--prompt", "8", "--tokens", "2", "--block-size", "128", "--kv-cache-memory",
      "700K"], "2 rows of 16 tokens need 3 blocks of 128 tokens, and the KV cache holds 2"),
])
def test_bench_step_batch_that_does_not_fit_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "step", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("context", [15, 16, 31])
def test_needed_blocks_suffice_to_decode_all_rows(rows: int, context: int) -> None:
    """A free block is left to each running row when another one is admitted."""
    steps, budget = 20, 32
    loaded = Bench.load(ServerConfig(block_size=16, threads=1, max_model_len=128), [rows], context, 8, steps)
    ahead = spare(rows, context, budget)
    blocks = needed_blocks(rows, context, ahead, context + ahead + WARM_UP + steps, 16)
    scheduler = Scheduler(BlockManager(blocks, 16, prefix_cache=False), max_num_seqs=rows,
                          max_num_batched_tokens=budget, max_queue=0, aging_seconds=1.0)
    bench = Bench(loaded.runner, scheduler, budget, 2, [])
    assert [step.sampled for step in bench.decode(rows, context, steps)] == [rows] * steps
    assert scheduler.preemptions == 0


@pytest.mark.slow
def test_bench_step_of_ranks_reads_a_part_of_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks run in a process of their own, since the end of a rank ends it."""
    command = ["bench", "step", "--batch", "2", "--context", "40", "--prompt", "70", "--tokens", "4", "--json", *SMALL]
    assert cli.main(command) == 0
    alone = json.loads(capsys.readouterr().out)
    done = subprocess.run([sys.executable, "-m", "npuserve.cli", *command, "--tensor-parallel-size", "2"],
                          check=True, capture_output=True)
    divided = json.loads(done.stdout)
    assert divided.keys() == alone.keys()
    assert divided["decode_tokens_per_second"] > 0
    assert 0.4 * alone["weights_bytes"] < divided["weights_bytes"] < 0.7 * alone["weights_bytes"]


@pytest.mark.parametrize("batch", ["0", "1,,2", "x", "-1"])
def test_bench_step_invalid_batch_is_refused(batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "step", "--batch", batch])
    assert "must be at least 1" in capsys.readouterr().err


def test_bench_step_layers_traces_kernels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["bench", "step", "--layers", "1", "--lm-head", "skip", "--dump", str(tmp_path), "--batch", "2",
                     "--prompt", "5", "--threads", "1"]) == 0
    head, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["step", "index", "kernel", "shape", "difference", "relative", "drift"]
    calls = [line for line in lines if line[1] != "captured:"]
    assert [line[0] for line in calls] == ["prompt"] * 10 + ["decode"] * 10
    assert calls[0][1:4] == ["0", "embedding", "10x256"]
    assert calls[-1][1:4] == ["9", "add_rms_norm", "2x256"]
    assert len(list((tmp_path / "decode").iterdir())) == len(list((tmp_path / "prompt").iterdir())) == 10


def test_bench_step_trace_has_the_blocks_of_the_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = set()
    original = kernel_calls.make_batch

    def make_batch(rows: list[Row], block_size: int, backend: Backend, num_slots: int) -> Batch:
        sizes.add(block_size)
        return original(rows, block_size, backend, num_slots)

    monkeypatch.setattr(kernel_calls, "make_batch", make_batch)
    assert cli.main(["bench", "step", "--layers", "1", "--prompt", "40", "--threads", "1", "--block-size", "32"]) == 0
    assert sizes == {32}
    assert "the same hidden states" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["--kv-cache-dtype", "fp8"], "kv_cache_dtype: 'fp8' is not possible on cpu"),
    (["--block-size", "2048"], "block_size: 2048 is not in [0, 1024]"),
    (["--dump", "/dev/null/folder"], "Not a directory: '/dev/null/folder'"),
])
def test_bench_step_trace_of_impossible_settings_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "step", "--layers", "1", "--device", "cpu", "--prompt", "4", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_bench_step_trace_of_nan_is_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = KERNELS["embedding"].implementations["cpu"]

    def embedding(*args: Any) -> torch.Tensor:
        found: torch.Tensor = made.function(*args) * torch.nan
        return found

    monkeypatch.setitem(KERNELS["embedding"].implementations, "cpu", dataclasses.replace(made, function=embedding))
    assert cli.main(["bench", "step", "--layers", "1", "--lm-head", "skip", "--batch", "2", "--prompt", "5",
                     "--threads", "1", "--json"]) == 1
    first, *_ = (json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines())
    assert (first["kernel"], first["wrong"]) == ("embedding", True)
    assert (first["relative"], first["difference"]) == ("inf", "inf")


def test_bench_step_too_many_layers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", "--layers", "6"]) == 2
    assert "layers: 6 are more than the 5" in capsys.readouterr().err
