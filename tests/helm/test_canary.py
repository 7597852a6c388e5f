"""The example of a canary's analysis, whose queries promtool evaluates on a good and on a bad new pod."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.test_dashboards import sampled, selectors
from tests.helm.test_rules import promtool

EXAMPLE = Path(__file__).parents[2] / "docs/examples/canary.yaml"
NEW, OLD = "llm-npuserve-5d4b8c9f7d-x2x4q", "llm-npuserve-6c7f9-abcde"


def metrics() -> dict[str, dict[str, Any]]:
    """Return the metrics of the analysis by name, with values in place of its arguments."""
    _, template = yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8"))
    values = {"rollout": "llm-npuserve", "new": "5d4b8c9f7d", "old": "6c7f9", "prometheus": "http://p:9090"}
    text = re.sub(r"\{\{args\.(\w+)\}\}", lambda match: values[match[1]], yaml.safe_dump(template))
    return {metric["name"]: metric for metric in yaml.safe_load(text)["spec"]["metrics"]}


def query(name: str) -> str:
    return str(metrics()[name]["provider"]["prometheus"]["query"])


def bound(name: str) -> tuple[str, float]:
    """Return the comparison of a metric's success, such as ("<=", 1.3)."""
    sign, number = re.findall(r"result\[0\] ([<>]=) ([\d.]+)", metrics()[name]["successCondition"])[0]
    return sign, float(number)


def test_analysis_uses_existing_metrics() -> None:
    parser = pytest.importorskip("promql_parser")
    known = sampled()
    for name in metrics():
        for selector in selectors(parser.parse(query(name))):
            assert {matcher.name for matcher in selector.matchers.matchers} - {"pod"} <= set(known[selector.name])


def series(pod: str, metric: str, per_minute: float, **labels: str) -> dict[str, str]:
    text = ", ".join(f'{name}="{value}"' for name, value in {"pod": pod, **labels}.items())
    return {"series": f"npuserve_{metric}{{{text}}}", "values": f"0+{per_minute}x20"}


def pod(name: str, on_target: float, errors: float, kernel_seconds: float) -> list[dict[str, str]]:
    call = {"rpc": "Generate"}
    kernel = {"kernel": "linear", "phase": "decode"}
    return [
        series(name, "requests_on_target_total", on_target), series(name, "request_finish_total", 100, reason="eos"),
        series(name, "requests_total", 100 - errors, code="OK", **call),
        series(name, "requests_total", errors, code="INTERNAL", **call),
        series(name, "kernel_latency_seconds_sum", 60 * kernel_seconds, **kernel),
        series(name, "kernel_latency_seconds_count", 60, **kernel)]


@pytest.mark.slow
@pytest.mark.parametrize(("new", "passed"), [
    ((99.0, 0.0, 0.001), {"goodput", "errors", "kernels"}),
    ((80.0, 0.0, 0.001), {"errors", "kernels"}),
    ((99.0, 4.0, 0.001), {"goodput", "kernels"}),
    ((99.0, 0.0, 0.002), {"goodput", "errors"}),
])
def test_analysis_passes_what_a_good_pod_does_and_fails_the_rest(
    new: tuple[float, float, float], passed: set[str], tmp_path: Path
) -> None:
    checks = []
    for name in metrics():
        sign, limit = bound(name)
        samples = [{"labels": "{}", "value": 1}]
        checks.append({"expr": f"vector(1) and on () (({query(name)}) {sign} {limit})", "eval_time": "15m",
                       "exp_samples": samples if name in passed else []})
    (tmp_path / "case.yaml").write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [{
        "interval": "1m", "input_series": pod(NEW, *new) + pod(OLD, 99.0, 0.0, 0.001), "promql_expr_test": checks}]}))
    done = promtool("test", "rules", tmp_path / "case.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_analysis_is_empty_without_calls(tmp_path: Path) -> None:
    (tmp_path / "case.yaml").write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [{
        "interval": "1m", "input_series": pod(OLD, 99.0, 0.0, 0.001),
        "promql_expr_test": [{"expr": query(name), "eval_time": "15m", "exp_samples": []} for name in metrics()]}]}))
    done = promtool("test", "rules", tmp_path / "case.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
