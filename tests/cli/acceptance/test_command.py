"""`npuserve check --accept` on the CPU: a correct device passes, and each fault fails in its part."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from npuserve.cli import main as cli
from npuserve.cli.acceptance import command, kernels, model
from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance.latency import LatencyCheck
from npuserve.cli.acceptance.report import Finding
from npuserve.kernels.registry import KERNELS
from tests.cli.acceptance.running import Capture, accepted, built, part_of

pytestmark = pytest.mark.usefixtures("small")


@pytest.mark.slow
@built
@pytest.mark.usefixtures("no_large_cases")
def test_check_accept_correct_device_passes(folder: Path, capsys: Capture) -> None:
    code, report = accepted(capsys, str(folder), "--dtype", "bfloat16", "--block-size", "16")
    assert (code, report["passed"]) == (0, True)
    kernels = part_of(report, "kernels")
    assert {"linear float32", "linear bfloat16", "paged_attention bfloat16"} <= set(kernels)
    assert kernels["linear bfloat16"]["figures"]["cases"] == sum(
        not (c.benchmark or c.float8) for c in KERNELS["linear"].cases)
    tokens = part_of(report, "tokens")
    exact = tokens["beside the CPU, float32"]["figures"]
    assert (exact["equal_tokens"], exact["equal_argmax"]) == (1.0, 1.0)
    assert exact["tokens"] == len(accept_tokens.TEXTS) * 20 + 20
    rounded = tokens["beside the CPU, bfloat16"]["figures"]
    assert exact["largest_logit_difference"] < 1e-3 < rounded["largest_logit_difference"]
    assert tokens["overlapped and not, float32"]["passed"]
    assert "equal steps" in tokens["overlapped and not, bfloat16"]["said"]
    assert tokens["captured decodes, bfloat16"]["figures"] == {"share": 1.0}
    assert [x["figures"]["difference"] for x in part_of(report, "capture").values()] == [0.0]
    steps = {name: x["passed"] for name, x in part_of(report, "latency").items() if not name.startswith("sampler")}
    assert steps == {"decode step, batch 1, context 64": None, "decode step, batch 9, context 64": None}


@pytest.mark.slow
@built
@pytest.mark.usefixtures("no_large_cases")
def test_check_accept_wrong_kernel_fails_kernels_and_tokens(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = KERNELS["add_rms_norm"].implementations["cpu"]

    def off(x: Tensor, residual: Tensor, gamma: Tensor, eps: float, *scheme: Any) -> Any:
        return right.function(x, residual, gamma, 100 * eps + 0.5, *scheme)

    monkeypatch.setitem(KERNELS["add_rms_norm"].implementations, "cpu", dataclasses.replace(right, function=off))
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


@pytest.mark.usefixtures("no_large_cases")
def test_findings_fatal_fault_ends_the_check(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from npuserve.npu.backends.faults import Fault

    def lost(*_: Any) -> Iterator[Finding]:
        yield Finding("kernels", "linear", "", True)
        raise RuntimeError("the device is gone\nwhere: here")

    monkeypatch.setattr(kernels, "check_kernels", lost)
    for fault, more in ((Fault.NODE, 0), (Fault.ENGINE, 0), (Fault.RETRYABLE, 1), (None, 1)):
        monkeypatch.setattr("npuserve.npu.backends.fault", lambda _, fault=fault: fault)
        monkeypatch.setattr(model, "check_model", lambda *_, **__: iter([Finding("model", "it", "continued", True)]))
        monkeypatch.setattr(LatencyCheck, "kernels", lambda *_: iter(()))
        code, report = accepted(capsys, str(folder))
        assert code == 1
        (error,) = [x for x in report["findings"] if x["name"] == "error"]
        assert error["said"] == "RuntimeError: the device is gone"
        assert len(part_of(report, "model")) == more


@pytest.mark.parametrize("json_wanted", [True, False])
def test_check_accept_interrupt_reports_findings_so_far(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, json_wanted: bool
) -> None:
    def interrupted(*_: Any) -> Iterator[Finding]:
        yield Finding("kernels", "linear", "right", True)
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "check_kernels", interrupted)
    code = cli.main(["check", str(folder), "--accept", "--device", "cpu", "--threads", "1",
                     *(["--json"] if json_wanted else [])])
    out = capsys.readouterr().out
    assert code == 130
    if json_wanted:
        report = json.loads(out)["acceptance"]
        assert (report["passed"], report["complete"]) == (False, False)
        assert part_of(report, "kernels")["linear"]["passed"]
    else:
        assert out.splitlines()[-1] == (
            "1 of 1 judged findings passed; the check was interrupted, other findings are missing")


def test_check_accept_json_has_no_infinity(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Finding("kernels", "linear", "", False, {"error": float("inf"), "share": float("nan"), "cases": 2})]
    monkeypatch.setattr(command, "findings", lambda *_: iter(found))
    assert cli.main(["check", str(folder), "--accept", "--device", "cpu", "--threads", "1", "--json"]) == 1
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["acceptance"]
    assert part_of(report, "kernels")["linear"]["figures"] == {"error": "inf", "share": "nan", "cases": 2}


@pytest.mark.slow
@built
@pytest.mark.usefixtures("no_large_cases")
def test_findings_failed_step_names_part_and_dtype_and_the_check_continues(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Iterator[Finding]:
        raise RuntimeError("refused")
        yield

    monkeypatch.setattr(kernels, "check_kernels", lambda *_: iter(()))
    for name in ("check_sampling", "check_contexts"):
        monkeypatch.setattr(model, name, lambda *_, **__: broken())
    code, report = accepted(capsys, str(folder), "--dtype", "bfloat16", "--block-size", "16")
    assert code == 1
    errors = [(x["part"], x["name"]) for x in report["findings"] if x["passed"] is False]
    assert errors == [("sampling", "float32: error"), ("sampling", "bfloat16: error"), ("contexts", "bfloat16: error")]
    assert part_of(report, "tokens").keys() >= {"beside the CPU, float32", "beside the CPU, bfloat16"}
    assert part_of(report, "latency")


@built
@pytest.mark.usefixtures("no_large_cases")
def test_soak_without_capture_is_reported(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((kernels, "check_kernels"), (model, "check_tokens"), (model, "check_sampling")):
        monkeypatch.setattr(module, name, lambda *_: iter(()))
    code, report = accepted(capsys, str(folder), "--capture", "off", "--soak", "1", "--block-size", "16")
    assert code == 0
    assert part_of(report, "soak")["captured steps"]["said"] == "nothing is captured: capture is off"


@pytest.mark.slow
@pytest.mark.usefixtures("no_large_cases")
def test_findings_no_bandwidth_skips_latency(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> float:
        raise TypeError("copy_() takes no such argument")

    monkeypatch.setattr("npuserve.cli.acceptance.latency.bandwidth", broken)
    monkeypatch.setattr(kernels, "check_kernels", lambda *_: iter(()))
    code, report = accepted(capsys, str(folder))
    assert code == 1
    assert part_of(report, "memory")["error"]["said"] == "TypeError: copy_() takes no such argument"
    assert part_of(report, "tokens")
    assert not part_of(report, "latency")


@pytest.mark.parametrize("share", ["-0.1", "1.1", "x"])
def test_least_share_out_of_range_is_refused(share: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["check", "--accept", "--least-share", share])
    assert "must be in [0.0, 1.0]" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("--soak", "-1"), ("--soak", "10081"), ("--sizes", "huge")])
def test_accept_option_out_of_range_is_refused(option: str, value: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["check", "--accept", option, value])
    said = capsys.readouterr().err
    assert ("must be in [0.0, 10080.0]" if option == "--soak" else "choose from") in said


def test_soak_without_accept_is_refused(capsys: Capture) -> None:
    assert cli.main(["check", "--soak", "1"]) == 2
    assert "soak: needs --accept" in capsys.readouterr().err


def test_least_share_without_accept_is_refused(capsys: Capture) -> None:
    assert cli.main(["check", "--least-share", "0.5"]) == 2
    assert "least_share: needs --accept" in capsys.readouterr().err


def test_check_accept_model_that_cannot_be_served_is_not_run(folder: Path, capsys: Capture) -> None:
    assert cli.main(["check", str(folder), "--accept", "--device", "cpu", "--max-model-len", "999", "--json"]) == 1
    assert "acceptance" not in json.loads(capsys.readouterr().out)
