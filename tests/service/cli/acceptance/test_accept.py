"""`npuserve check --accept` on the CPU: what is right passes, and each wrong thing is found by its part."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.kernels import native, registry
from npuserve.kernels.bench import measure
from npuserve.kernels.registry import KERNELS, Implementation
from npuserve.npu.backends.base import BackendError
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.runner import Runner
from npuserve.service.cli import main as cli
from npuserve.service.cli.acceptance import accept
from npuserve.service.cli.acceptance import tokens as accept_tokens
from npuserve.service.cli.acceptance.accept import Finding
from npuserve.service.cli.acceptance.tokens import agreement
from tests.support.models import random_model, saved

Capture = pytest.CaptureFixture[str]

built = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Little of everything, and the threads of before at the end."""
    from npuserve.kernels.bench import ceilings
    from npuserve.npu.diagnostics import acceptance

    for module, name, value in (
        (acceptance, "READ_BYTES", 8 << 20), (ceilings, "_PASS_SECONDS", 1e-4), (measure, "COLD_BYTES", 1 << 16),
        (measure, "_PASS_SECONDS", 1e-4), (accept, "BATCHES", (1, 9)), (accept, "STEPS", 2),
        (accept_tokens, "ANSWER", 20), (accept_tokens, "BUDGET", 32),
    ):
        monkeypatch.setattr(module, name, value)
    threads, of_torch = native.library().threads if native.available() else 0, torch.get_num_threads()
    yield
    torch.set_num_threads(of_torch)
    if native.available():
        native.library().set_threads(threads)


@pytest.fixture
def no_large_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept.Measured, "kernels", lambda *_: iter(()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(random_model("qwen3", max_position_embeddings=256), tmp_path)


def accepted(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["check", "--accept", "--device", "cpu", "--threads", "1", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)["acceptance"]


def of(report: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    return {x["name"]: x for x in report["findings"] if x["part"] == part}


@built
@pytest.mark.usefixtures("no_large_cases")
def test_what_is_right_passes(folder: Path, capsys: Capture) -> None:
    code, report = accepted(capsys, str(folder), "--dtype", "bfloat16", "--block-size", "16")
    assert (code, report["passed"]) == (0, True)
    kernels = of(report, "kernels")
    assert {"linear float32", "linear bfloat16", "paged_attention bfloat16"} <= set(kernels)
    assert kernels["linear bfloat16"]["figures"]["cases"] == sum(not c.benchmark for c in KERNELS["linear"].cases)
    tokens = of(report, "tokens")
    exact = tokens["beside the CPU, float32"]["figures"]
    assert (exact["equal_tokens"], exact["equal_argmax"]) == (1.0, 1.0)
    assert exact["tokens"] == len(accept_tokens.TEXTS) * 20 + 20
    rounded = tokens["beside the CPU, bfloat16"]["figures"]
    assert exact["largest_logit_difference"] < 1e-3 < rounded["largest_logit_difference"]
    assert tokens["overlapped and not, float32"]["passed"]
    assert "equal steps" in tokens["overlapped and not, bfloat16"]["said"]
    assert tokens["captured decodes, bfloat16"]["figures"] == {"share": 1.0}
    assert [x["figures"]["difference"] for x in of(report, "capture").values()] == [0.0]
    steps = {name: x["passed"] for name, x in of(report, "latency").items()}
    assert steps == {"decode step, batch 1, context 64": None, "decode step, batch 9, context 64": None}


@built
@pytest.mark.usefixtures("no_large_cases")
def test_a_wrong_kernel_is_found_by_itself_and_by_its_tokens(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = KERNELS["add_rms_norm"].implementations["cpu"]

    def off(x: Tensor, residual: Tensor, gamma: Tensor, eps: float, *scheme: Any) -> Any:
        return made.function(x, residual, gamma, 100 * eps + 0.5, *scheme)

    monkeypatch.setitem(KERNELS["add_rms_norm"].implementations, "cpu", dataclasses.replace(made, function=off))
    code = cli.main(["check", str(folder), "--accept", "--device", "cpu", "--threads", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    failed = [x for x in lines if x.startswith("FAILED ")]
    assert any(x.startswith("FAILED kernels, add_rms_norm float32") for x in failed)
    assert any(x.startswith("FAILED tokens, beside the CPU, float32") and "bench step" in x for x in failed)
    assert not any("rms_norm" in x and "add_" not in x for x in failed)
    assert not any("overlapped" in x for x in failed)
    judged, passed = lines[-1].split()[2], lines[-1].split()[0]
    assert int(judged) - int(passed) == len(failed) > 0


def oracle(monkeypatch: pytest.MonkeyPatch, function: Any, name: str = "swiglu") -> Finding:
    kernel = KERNELS[name]
    made = kernel.implementations["cpu"]
    wrong = Implementation(function(made.function), made.adapt, made.restore)
    monkeypatch.setitem(kernel.implementations, "cpu", wrong)
    return accept._kernel(kernel, torch.float32, CpuBackend())


@built
@pytest.mark.parametrize("wrong", [lambda x: x + 1e-3, lambda x: x.index_fill(0, torch.tensor([0]), torch.nan)])
def test_numbers_that_are_off_or_none(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = oracle(monkeypatch, lambda right: lambda x: wrong(right(x)))
    assert found.passed is False
    assert found.figures["wrong"] == [c.name for c in KERNELS["swiglu"].cases if not c.benchmark]
    assert "compare the versions" in found.advice


@built
def test_other_ids_than_the_golden_function(monkeypatch: pytest.MonkeyPatch) -> None:
    found = oracle(monkeypatch, lambda right: lambda logits, vocabulary: right(logits, vocabulary) ^ 1, "greedy")
    assert found.passed is False
    assert found.figures["other_ids"] > found.figures["golden_other_ids"] == 0


@built
def test_a_kernel_that_is_refused_fails_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("aclnnSwiGlu failed, error code is 161002\nand more")

    found = oracle(monkeypatch, lambda right: refuse)
    assert (found.passed, found.figures["fault"]) == (False, "engine")
    assert found.said.endswith(": RuntimeError: aclnnSwiGlu failed, error code is 161002")
    assert "and more" in found.figures["traceback"]


def test_heads_that_the_device_does_not_take_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_128(self: CpuBackend, head_dim: int) -> None:
        if head_dim != 128:
            raise BackendError("device: no such heads")

    monkeypatch.setattr(CpuBackend, "check_heads", only_128)
    backend = CpuBackend(native=False)
    for name in ("paged_attention", "qk_norm_rope_kv_write"):
        assert accept._kernel(KERNELS[name], torch.float32, backend).figures["cases"] == 2  # one of them of int8
    monkeypatch.setattr(KERNELS["paged_attention"], "cases", KERNELS["paged_attention"].cases[:2])
    none = accept._kernel(KERNELS["paged_attention"], torch.float32, backend)
    assert (none.passed, none.figures["cases"]) == (False, 0)


@pytest.mark.parametrize("device", [{"int8_zeros": True}, {"int8_zeros": False, "int8_levels": 127.0}])
def test_int8_is_tried_as_the_device_has_it(monkeypatch: pytest.MonkeyPatch, device: dict[str, Any]) -> None:
    for name, value in device.items():
        monkeypatch.setattr(CpuBackend, name, value)
    cases = list(accept._cases(KERNELS["quantize"], CpuBackend(native=False), benchmark=False))
    schemes = [case.make(torch.Generator(), torch.float32)[1] for case in cases]
    assert {scheme.levels for scheme in schemes} == {device.get("int8_levels", 127.5)}
    assert any(scheme.has_zero for scheme in schemes) == device["int8_zeros"]
    assert any(scheme.scale is None for scheme in schemes)


@built
@pytest.mark.usefixtures("no_large_cases")
def test_steps_that_disturb_each_other(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step that is launched beside another sees of it is the next token's id."""
    launch, collect, flying = Runner.launch, Runner.collect, []

    def launched(self: Runner, step: Any) -> Any:
        if flying:
            self._backend.enqueue(lambda: self._last.add_(1).remainder_(100))
        flying.append(step)
        return launch(self, step)

    def collected(self: Runner, handle: Any) -> Any:
        flying.pop()
        return collect(self, handle)

    monkeypatch.setattr(Runner, "launch", launched)
    monkeypatch.setattr(Runner, "collect", collected)
    code, report = accepted(capsys, str(folder))
    assert code == 1
    found = of(report, "tokens")["overlapped and not, float32"]
    assert (found["passed"], found["said"].split()[0]) == (False, "OTHER")
    assert "--no-double-buffering" in found["advice"]


def test_the_end_of_a_device_ends_the_check(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from npuserve.npu.backends.base import Fault

    def lost(*_: Any) -> Iterator[Finding]:
        yield Finding("kernels", "linear", "", True)
        raise RuntimeError("the device is gone\nwhere: here")

    monkeypatch.setattr(accept, "kernels", lost)
    for fault, more in ((Fault.NODE, 0), (Fault.ENGINE, 0), (Fault.RETRYABLE, 1), (None, 1)):
        monkeypatch.setattr("npuserve.npu.backends.fault", lambda _, fault=fault: fault)
        monkeypatch.setattr(accept, "model", lambda *_: iter([Finding("model", "it", "went on", True)]))
        monkeypatch.setattr(accept.Measured, "kernels", lambda *_: iter(()))
        code, report = accepted(capsys, str(folder))
        assert code == 1
        (error,) = [x for x in report["findings"] if x["name"] == "error"]
        assert error["said"] == "RuntimeError: the device is gone"
        assert len(of(report, "model")) == more


# Tokens, by hand


@built
@pytest.mark.parametrize("own", [994, 996])
@pytest.mark.usefixtures("no_large_cases")
def test_accept_verdict_is_the_same_on_both_sides_of_the_least_share(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, own: int
) -> None:
    """989 of 1,000 positions equal on the device; the CPU itself has slightly less, or more, than 0.995."""
    real, equal = accept_tokens.agreement, iter([1000, 989, own])

    def agreement(*arguments: Any) -> accept_tokens.Agreement:
        return dataclasses.replace(real(*arguments), positions=1000, equal=next(equal))

    monkeypatch.setattr(accept_tokens, "agreement", agreement)
    monkeypatch.setattr(accept, "kernels", lambda *_: iter(()))
    _, report = accepted(capsys, str(folder), "--dtype", "bfloat16")
    found = of(report, "tokens")["beside the CPU, bfloat16"]
    assert (found["figures"]["equal_argmax"], found["passed"]) == (0.989, True)


@pytest.mark.parametrize("positions", [100, 200, 800, 1000, 20_000])
def test_least_share_is_continuous_and_allows_less_for_fewer_positions(positions: int) -> None:
    """No step of the CPU's own share by a tenth of a position moves the limit by more than half a position."""
    shares = [number / (10 * positions) for number in range(9 * positions, 10 * positions + 1)]
    limits = [accept.least_share(positions, own) for own in shares]
    steps = [after - before for before, after in pairwise(limits)]
    assert 0 <= min(steps) <= max(steps) < 0.5 / positions
    assert max(limits) == accept.least_share(positions) < accept.LEAST_EQUAL
    assert accept.least_share(positions) < accept.least_share(2 * positions)
    assert accept.least_share(10**9) == pytest.approx(accept.LEAST_EQUAL, abs=1e-5)


@pytest.mark.parametrize(("positions", "own", "share", "passes"), [
    (800, 0.9951, 0.9914, True),  # an emulated NPU with AVX2 alone
    (800, 0.9951, 0.98, False),
    (10_000, 0.9951, 0.9914, False),
    (1000, 0.9949, 0.9882, True),
    (1000, 0.9951, 0.9884, True),  # the rule used to differ between these two
    (1000, 0.9949, 0.9860, False),
    (1000, 1.0, 0.9885, True),
    (1000, 1.0, 0.988, False),
])
def test_least_share_judges(positions: int, own: float, share: float, passes: bool) -> None:
    assert (share >= accept.least_share(positions, own)) == passes


def logits(*best: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(best), 5).float()


def test_agreement_counts_positions_tokens_and_gaps() -> None:
    prompts, tokens = [[0, 1], [2]], [[3, 4, 1], [0]]
    # Rows are positions: what stands at len(prompt) - 1 and after predicts the answer.
    reference = [logits(0, 3, 4, 1, 2), logits(0, 1)]
    same = agreement(reference, reference, prompts, tokens)
    assert (same.positions, same.equal, same.tokens, same.likeliest) == (7, 7, 4, 4)
    assert (same.difference, same.gap, same.worst) == (0.0, 0.0, None)
    other = agreement(reference, [logits(0, 3, 4, 1, 2) * 0.5, logits(4, 1)], prompts, [[3, 2, 1], [0]])
    assert (other.positions, other.equal, other.tokens, other.likeliest) == (7, 6, 4, 3)
    assert (other.difference, other.gap, other.worst) == (1.0, 1.0, (0, 1, 2, 4))
    nan = agreement(reference, [x * torch.nan for x in reference], prompts, tokens)
    assert nan.difference == float("inf")


@built
def test_prompts_come_in_chunks_and_share_a_prefix(folder: Path) -> None:
    from npuserve.npu import storyteller
    from npuserve.npu.diagnostics import acceptance

    prompts = accept_tokens.prompts_of(storyteller.FOLDER, 2048, 400)
    assert len(prompts[0]) > 128 > accept_tokens.BUDGET
    assert prompts[-1][: len(prompts[0])] == prompts[0]
    assert max(map(len, accept_tokens.prompts_of(storyteller.FOLDER, 2048, 9))) == 9
    without = accept_tokens.prompts_of(folder, 100, 200)
    assert all(ids and max(ids) < 100 for ids in without)
    backend = CpuBackend()
    backend.set_threads(1)
    runner = acceptance.load(folder, backend, "auto", max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64,
                             block_size=16).runner
    made = accept_tokens.answers(runner, without, 20, 2)
    assert [len(x) for x in made.tokens] == [20] * len(without)
    assert any(1 in step and max(step) > 1 for step in made.steps)  # chunks beside decode rows
    computed = sum(map(sum, made.steps))
    assert computed < sum(map(len, without)) + 19 * len(without)  # blocks of the first prompt were found again
    assert accept_tokens.answers(runner, without, 20, 1) == made  # the runner has forgotten the requests


# Latencies


@pytest.mark.parametrize(("judged", "judge", "passed"), [
    (None, True, None), (0.5, True, True), (0.51, True, False), (0.51, False, None),
])
def test_a_latency_is_judged_by_its_share_of_the_floor(judged: float | None, judge: bool, passed: bool | None) -> None:
    found = accept.Measured(False, judged, speed=100.0).latency("step", 4.0, 200.0, "do this", judge)
    assert (found.passed, found.figures) == (passed, {"seconds": 4.0, "floor_seconds": 2.0, "share": 0.5})


@built
def test_kernels_beside_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", {"swiglu": KERNELS["swiglu"]})
    backend = CpuBackend()
    found = list(accept.Measured(False, 0.0, speed=1.0).kernels(backend))
    assert [x.name for x in found] == [f"swiglu {c.name}" for c in KERNELS["swiglu"].cases if c.benchmark]
    assert all(x.passed and x.figures["seconds"] > 0 for x in found)
    assert all(x.passed is None for x in accept.Measured(False, 0.0, speed=1e30).kernels(backend))  # launches
    assert len(list(accept.Measured(True, None, speed=1.0).kernels(backend))) == 1
    made = KERNELS["swiglu"].implementations["cpu"]
    monkeypatch.setitem(KERNELS["swiglu"].implementations, "cpu", Implementation(lambda x: made.function(x) + 1))
    wrong = [x for x in accept.Measured(False, None, speed=1.0).kernels(backend) if x.part == "kernels"]
    assert len(wrong) == len(found)
    assert not any(x.passed for x in wrong)


@pytest.mark.parametrize("share", ["-0.1", "1.1", "x"])
def test_a_share_is_one(share: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["check", "--accept", "--least-share", share])
    assert "must be in [0.0, 1.0]" in capsys.readouterr().err


def test_a_share_of_nothing(capsys: Capture) -> None:
    assert cli.main(["check", "--least-share", "0.5"]) == 2
    assert "least_share: nothing is computed; --accept does" in capsys.readouterr().err


@pytest.mark.usefixtures("no_large_cases")
def test_without_a_bandwidth_nothing_is_timed(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> float:
        raise TypeError("copy_() takes no such argument")

    monkeypatch.setattr("npuserve.npu.diagnostics.acceptance.bandwidth", broken)
    monkeypatch.setattr(accept, "kernels", lambda *_: iter(()))
    code, report = accepted(capsys, str(folder))
    assert code == 1
    assert of(report, "memory")["error"]["said"] == "TypeError: copy_() takes no such argument"
    assert of(report, "tokens")
    assert not of(report, "latency")


def test_nothing_is_computed_for_a_model_that_cannot_be_served(folder: Path, capsys: Capture) -> None:
    assert cli.main(["check", str(folder), "--accept", "--device", "cpu", "--max-model-len", "999", "--json"]) == 1
    assert "acceptance" not in json.loads(capsys.readouterr().out)
