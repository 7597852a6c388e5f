"""The alert rules: promtool's verdict, and that every alert says what people need."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.test_dashboards import sampled, selectors

ROOT = Path(__file__).parents[2]
RULES = ROOT / "helm/npuserve/rules/npuserve.yaml"
CASES = Path(__file__).with_name("rules.test.yaml")
OPERATIONS = ROOT / "docs/operations.md"


def rules(kind: str) -> list[dict[str, Any]]:
    """kind: alert or record."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


ALERTS = {rule["alert"]: rule for rule in rules("alert")}


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if not program:
        pytest.skip("no promtool (Debian's package prometheus)")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)


def test_prometheus_takes_them() -> None:
    done = promtool("check", "rules", RULES)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_fires_when_it_must_and_only_then() -> None:
    done = promtool("test", "rules", CASES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_alert_that_never_fires_is_found(tmp_path: Path) -> None:
    """The unit tests can fail: with another threshold they do."""
    text = RULES.read_text(encoding="utf-8")
    assert text.count("> 60\n") == 1
    (tmp_path / "rules.yaml").write_text(text.replace("> 60\n", "> 6000\n"))
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    cases["rule_files"] = ["rules.yaml"]
    cases["tests"] = [case for case in cases["tests"] if "silent" in case["name"]]
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases))
    done = promtool("test", "rules", tmp_path / "cases.yaml")
    assert done.returncode != 0
    assert "NpuserveEngineDown" in done.stdout + done.stderr


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    fired = {check["alertname"] for case in cases for check in case["alert_rule_test"] if check["exp_alerts"]}
    assert fired == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_says_what_people_need(name: str) -> None:
    alert = ALERTS[name]
    assert re.fullmatch(r"Npuserve[A-Z]\w+", name)
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"


@pytest.mark.parametrize("name", ALERTS)
def test_each_runbook_is_there(name: str) -> None:
    headings = re.findall(r"^#+ *(.*?) *$", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert name in headings


def test_they_ask_for_metrics_that_there_are() -> None:
    parser = pytest.importorskip("promql_parser")
    recorded = {rule["record"]: None for rule in rules("record")}
    known = sampled()
    for rule in [*rules("alert"), *rules("record")]:
        for selector in selectors(parser.parse(rule["expr"])):
            if selector.name == "up" or selector.name in recorded:
                continue
            assert selector.name in known, selector.name
            assert {matcher.name for matcher in selector.matchers.matchers} <= set(known[selector.name])
