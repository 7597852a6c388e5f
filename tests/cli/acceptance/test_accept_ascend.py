"""`npuserve check --accept` on an emulated NPU: all parts, with the built-in model and small settings."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from npuserve.cli import main as cli
from npuserve.cli.acceptance import captures, kernels, latency, model, replays, variants
from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance.latency import LatencyCheck
from npuserve.kernels import ascend
from npuserve.kernels.bench import measure
from npuserve.kernels.registry import KERNELS
from npuserve.npu import storyteller
from npuserve.npu.backends import machine
from tests.cli.acceptance.running import few_checks, few_tokens, few_wide_tokens, narrow_lm_heads
from tests.npu.emulator.child import emulated, needs_npu, run

RELAX = ("fp32", "small_heads")


def accepted(*arguments: str) -> tuple[int, dict[str, Any]]:
    out = io.StringIO()
    # In this relaxed emulation the operators of the gated delta rule take float32, and return bfloat16 as ever.
    registered = mock.patch.object(machine, "served_kernel", lambda backend, kernel: kernel)
    with registered, contextlib.redirect_stdout(out):
        code = cli.main(["check", "--accept", "--device", "npu", "--emulate", "--emulate-relax", ",".join(RELAX),
                         "--json", *arguments])
    return code, json.loads(out.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [pytest.param(True, marks=pytest.mark.full), False])
@emulated(relax=RELAX)
def test_check_accept_emulated_device_passes(is_whole: bool) -> None:
    """By default with few cases of each part: tests/kernels/test_ascend.py has all cases of kernels."""
    with (
        mock.patch.multiple(accept_tokens, ANSWER=16, STEPS_APART=1),
        contextlib.nullcontext() if is_whole else few_checks(),
        mock.patch.object(latency, "BATCHES", (1, 8)),
        mock.patch.object(latency, "READ_BYTES", 1 << 20), narrow_lm_heads(), few_wide_tokens(),
        mock.patch.object(LatencyCheck, "kernels", return_value=[]),
        mock.patch.object(captures, "CHUNK_TOKENS", 130),
    ):
        code, report = accepted("--decode-buckets", "2,8", "--max-num-batched-tokens", "130", "--least-share", "1",
                                "--soak", "0.005")
    failed = [x for x in report["acceptance"]["findings"] if x["passed"] is False]
    assert (code, failed) == (0, []), failed
    assert report["emulated"]
    assert report["backends"]["npu"]["available"]
    assert set(report["backends"]["npu"]["kernels"].values()) == {ascend.LABEL}
    found = {(x["part"], x["name"]): x for x in report["acceptance"]["findings"]}
    own = {name for name, kernel in KERNELS.items() if ascend.LABEL in kernel.implementations}
    assert {name.split()[0] for part, name in found if part == "kernels"} == own
    cases = sum(not (case.benchmark or case.zeros or case.float8 or case.int4 % 8 or case.w4a8)
                for case in KERNELS["linear"].cases)
    assert cases == 15
    assert found["kernels", "linear float16"]["figures"]["cases"] == (cases if is_whole else 4)
    exact = found["tokens", "beside the CPU, float32"]["figures"]
    assert (exact["equal_tokens"], exact["equal_argmax"]) == (1.0, 1.0)
    rounded = found["tokens", "beside the CPU, bfloat16"]["figures"]
    assert 0.98 < rounded["least_equal_argmax"] <= rounded["equal_argmax"]
    assert found["tokens", "captured decodes, bfloat16"]["figures"]["share"] == 1.0
    assert found["sampling", "captured steps, bfloat16"]["figures"]["share"] == 1.0
    assert [name for part, name in found if part == "capture"] == [
        "8 rows", "2 rows", *(f"{tokens} tokens" for tokens in (64, 128, 130))]
    counts = {"sizes": 11, "sampling": 28, "variants": 24} if is_whole else {"sizes": 2, "sampling": 8, "variants": 6}
    for part, count in {**counts, "contexts": 6, "soak": 1}.items():
        assert sum(of == part for of, _ in found) == count, part
    assert all("reduced" in x["said"] for (part, _), x in found.items() if part in ("sizes", "contexts"))
    latencies = [x for x in report["acceptance"]["findings"] if x["part"] == "latency"]
    assert {x["passed"] for x in latencies} == {None}  # the speed of an emulated device is not judged
    samplers = [*latency.SAMPLERS] if is_whole else [*latency.SAMPLERS][:1]
    assert [x["name"] for x in latencies if x["name"].startswith("sampler")] == [
        f"sampler, {latency.SAMPLED_ROWS} rows, {name}" for name in samplers]
    assert [x["figures"]["updater"] for x in latencies if x["name"].startswith("lengths")] == ["C++", "C++"]
    assert all(x["figures"]["lags"] for x in latencies if x["name"].startswith("lengths"))


@emulated(relax=RELAX)
def test_latency_kernels_are_timed_on_the_device() -> None:
    from npuserve.npu.backends import select

    few = {name: KERNELS[name] for name in ("swiglu", "qk_norm_rope_kv_write")}
    with mock.patch.object(latency, "KERNELS", few), mock.patch.object(measure, "_PASS_SECONDS", 1e-4):
        found = list(LatencyCheck(True, None, bytes_per_second=1e9).kernels(select("npu", RELAX)))
    assert [x.name.split()[0] for x in found] == list(few)
    assert all(x.figures["seconds"] > 0 and x.passed is None for x in found)


@pytest.mark.full  # test_captures_ascend.py has the check of captures
@emulated(relax=RELAX)
def test_check_accept_wrong_lengths_fail_tokens_and_capture() -> None:
    """The graphs run, but their tokens differ from the CPU's."""
    from npuserve.npu.backends.ascend.captured_graph import Lengths
    from npuserve.npu.backends.ascend.native_lengths import NativeLengths

    put = NativeLengths.put

    def off(self: Any, graph: Any, lengths: Lengths, *more: Any) -> None:
        contexts = lengths["actual_seq_lengths_kv"]
        if len(lengths) == 1 and len(contexts) > 1:  # of decode rows
            lengths = {"actual_seq_lengths_kv": [max(1, n - 1) for n in contexts]}
        put(self, graph, lengths, *more)

    with (
        mock.patch.object(latency, "BATCHES", (1, 8)), few_tokens(),
        mock.patch.object(latency, "READ_BYTES", 1 << 20), mock.patch.object(NativeLengths, "put", off),
        mock.patch.object(kernels, "check_kernels", return_value=[]),
        mock.patch.object(kernels, "check_sizes", return_value=[]),
        mock.patch.object(variants, "check_variants", return_value=[]),
        mock.patch.object(model, "check_sampling", return_value=[]),
        mock.patch.object(model, "check_contexts", return_value=[]),
        mock.patch.object(LatencyCheck, "kernels", return_value=[]),
        mock.patch.object(captures, "CHUNK_TOKENS", 64),
    ):
        code, report = accepted("--decode-buckets", "8", "--max-num-batched-tokens", "64")
    failed = {(x["part"], x["name"]) for x in report["acceptance"]["findings"] if x["passed"] is False}
    assert code == 1
    # In bfloat16 the fault is visible only if it exceeds the rounding, which depends on the processor.
    assert ("tokens", "beside the CPU, float32") in failed
    assert ("capture", "8 rows") in failed


@pytest.mark.full  # test_captures_and_contexts_of_a_hybrid_pass
@pytest.mark.parametrize(("place", "operators"), [
    (0, True), (-1, True), (0, False)])
@needs_npu
def test_variants_of_a_hybrid_pass(place: int, operators: bool) -> None:
    """Without the operators of the delta rule its Triton kernel, here the stand-in, computes decode rows and chunks."""
    with pytest.MonkeyPatch.context() as patch:
        if not operators:
            patch.setenv("EMULATED_CANN_WITHOUT", "aclnnRecurrentGatedDeltaRule aclnnChunkGatedDeltaRule")
        run(check_variants_of_a_hybrid, {"place": place}, {"relax": RELAX, "triton": not operators},
            fresh=not operators)


def check_variants_of_a_hybrid(place: int) -> None:
    """In bfloat16 alone, with states in it: the CPU's rounded reference has the same."""
    from npuserve.npu.backends import select

    with mock.patch.object(accept_tokens, "ANSWER", 16), \
            mock.patch.object(variants, "VARIANTS", (variants.VARIANTS[place],)):
        found = {x.name: x for x in variants.check_variants(select("npu"), 1, hybrid=True)}
    assert [name for name, finding in found.items() if finding.passed is False] == []
    name = variants.VARIANTS[place].name
    assert set(found) == {f"{name}: beside the CPU, bfloat16", f"{name}: overlapped and not, bfloat16",
                          f"{name}: captured decodes, bfloat16"}
    assert found[f"{name}: captured decodes, bfloat16"].figures["share"] == 1.0


@pytest.mark.full
@pytest.mark.parametrize("hybrid", [pytest.param(False, id="Qwen3Moe"), pytest.param(True, id="Qwen3.5")])
@emulated()
def test_variants_of_experts_pass(hybrid: bool) -> None:
    """In bfloat16 and W8A8, without relaxation."""
    from npuserve.npu.backends import select

    with mock.patch.object(accept_tokens, "ANSWER", 16), \
            mock.patch.object(variants, "VARIANTS", variants.VARIANTS[:1]):
        found = {x.name: x for x in variants.check_variants(select("npu"), 1, hybrid=hybrid, experts=True)}
    assert [name for name, finding in found.items() if finding.passed is False] == []
    name = variants.VARIANTS[0].name
    assert set(found) == {f"{name}: beside the CPU, bfloat16", f"{name}: overlapped and not, bfloat16",
                          f"{name}: captured decodes, bfloat16"}


@pytest.mark.slow
@emulated()
def test_captures_and_contexts_of_a_hybrid_pass(tmp_path: Path) -> None:
    """Replays over contexts of 1,000 and 12,000 tokens, and chunks, beside the kernels called one by one."""
    from npuserve.cli.acceptance.reference import load
    from npuserve.npu.backends import select
    from npuserve.npu.backends.base import DeviceSettings

    variants.write_hybrid(storyteller.FOLDER, tmp_path / "hybrid")
    backend = select("npu", settings=DeviceSettings(decode_buckets=(2, 4)))
    loaded = load(tmp_path / "hybrid", backend, "bfloat16", max_model_len=300, max_num_seqs=4,
                  max_num_batched_tokens=130)
    assert loaded.runner.fallbacks == []
    with mock.patch.object(captures, "CHUNK_TOKENS", 130), mock.patch.object(replays, "BATCHES", (2,)):
        found = [*captures.check_captures(loaded, 4), *replays.check_contexts(loaded, quick=True)]
    assert [x.name for x in found if x.passed is not True] == []
    assert len(found) == 2 + 3 + 2
