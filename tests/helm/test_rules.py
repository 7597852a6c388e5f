"""The alert rules: promtool's tests, and the texts that operators need."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.helm.chart import Loader, find, needs_helm, render, template
from tests.helm.test_dashboards import sampled, selectors

ROOT = Path(__file__).parents[2]
RULES = ROOT / "helm/npuserve/rules/npuserve.yaml"
CASES = Path(__file__).with_name("rules.test.yaml")
SITUATIONS = Path(__file__).with_name("situations.test.yaml")
TESTS: list[dict[str, Any]] = [
    test for file in (CASES, SITUATIONS) for test in yaml.load(file.read_text(encoding="utf-8"), Loader)["tests"]]
OPERATIONS = ROOT / "docs/operations.md"
DASHBOARDS = ROOT / "helm/npuserve/dashboards"


def rules(kind: str) -> list[dict[str, Any]]:
    """Return the rules of a kind, "alert" or "record"."""
    groups = yaml.load(RULES.read_text(encoding="utf-8"), Loader)["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


ALERTS = {rule["alert"]: rule for rule in rules("alert")}


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if not program:
        pytest.skip("no promtool (Debian's package prometheus)")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)


def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", RULES)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("case", TESTS, ids=[test["name"][:40] for test in TESTS])
def test_promtool_unit_test_passes(case: dict[str, Any], tmp_path: Path) -> None:
    """Evaluate only the alerts that the case names, and the recording rules of their groups: some cases span a day."""
    named = {check["alertname"] for check in case["alert_rule_test"]}
    groups = [
        {**group, "rules": [rule for rule in group["rules"] if rule.get("alert") in {None, *named}]}
        for group in yaml.load(RULES.read_text(encoding="utf-8"), Loader)["groups"]
        if named & {rule.get("alert") for rule in group["rules"]}]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(
        {"rule_files": ["rules.yaml"], "evaluation_interval": "30s", "tests": [case]}))
    done = promtool("test", "rules", tmp_path / "case.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_unit_tests_can_fail(tmp_path: Path) -> None:
    """With another threshold the unit tests fail."""
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


def seconds(time: str) -> int:
    """Return a duration of Prometheus, such as 5m30s, in seconds."""
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in re.findall(r"(\d+)([hms])", time))


@pytest.mark.parametrize("name", ALERTS)
def test_alert_is_tested_at_its_first_evaluation_and_the_one_before(name: str) -> None:
    found = []
    for case in TESTS:
        checks = {seconds(check["eval_time"]): len(check["exp_alerts"]) for check in case["alert_rule_test"]
                  if check["alertname"] == name}
        found += [time for time, count in checks.items() for before in (time - 30, time - 60)
                  if count > checks.get(before, count)]
    assert found


def test_alert_on_refusals_is_tested_while_a_burst_is_in_its_range() -> None:
    """A burst at 5m30 was once enough from 7m30 to 10m."""
    (case,) = [case for case in TESTS
               if "a queue that refuses" in case["name"]]
    times = [seconds(check["eval_time"]) for check in case["alert_rule_test"]]
    assert max(b - a for a, b in pairwise(time for time in times if 330 <= time <= 660)) <= 60


@pytest.mark.parametrize("name", ALERTS)
def test_alert_has_a_severity_a_summary_and_a_description(name: str) -> None:
    alert = ALERTS[name]
    assert re.fullmatch(r"Npuserve[A-Z]\w+", name)
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert set(alert["annotations"]) == {"summary", "description"}


def rendered(**values: str) -> dict[str, dict[str, Any]]:
    """Return the alerts of the chart's PrometheusRule by name. values: of rules."""
    rule = find(render({"rules": {"enabled": True, **values}}), "PrometheusRule")
    return {alert["alert"]: alert for group in rule["spec"]["groups"] for alert in group["rules"] if "alert" in alert}


@needs_helm
def test_chart_gives_every_alert_the_url_of_its_runbook() -> None:
    base = "https://git.example.com/npuserve/blob/v0.1.0/docs/operations.md"
    for name, alert in rendered(runbookBaseUrl=base).items():
        url = urlsplit(alert["annotations"].pop("runbook_url"))
        assert (url.scheme, url.netloc, url.fragment) == ("https", "git.example.com", name.lower())
        assert url.path.endswith("/docs/operations.md")
        assert alert == ALERTS[name]


def test_critical_alerts_are_those_of_users() -> None:
    critical = {name for name, alert in ALERTS.items() if alert["labels"]["severity"] == "critical"}
    assert critical == {
        "NpuserveNoReadyServer", "NpuserveErrorsBurn", "NpuserveRefusalsBurn", "NpuserveCertificateExpired",
        "NpuserveDrainStuck"}


@needs_helm
@pytest.mark.parametrize("grafana", ["", "https://grafana.example.com/monitoring"])
def test_chart_links_each_alert_by_default_to_its_panel_of_the_runbooks_dashboard(grafana: str) -> None:
    board = json.loads((DASHBOARDS / "npuserve-runbooks.json").read_text(encoding="utf-8"))
    titles = {panel["id"]: panel["title"] for panel in board["panels"]}
    for name, alert in rendered(grafanaUrl=grafana).items():
        path, _, number = alert["annotations"].pop("runbook_url").partition("?viewPanel=")
        assert path == f"{grafana}/d/{board['uid']}"
        assert titles[int(number)] == name
        assert alert == ALERTS[name]


@needs_helm
def test_chart_refuses_a_path_as_the_runbooks_address() -> None:
    done = template({"rules": {"enabled": True, "runbookBaseUrl": "docs/operations.md"}})
    assert done.returncode != 0
    assert "runbookBaseUrl" in done.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_each_runbook_exists(name: str) -> None:
    headings = re.findall(r"^#+ *(.*?) *$", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert name in headings


def test_rules_use_existing_metrics() -> None:
    parser = pytest.importorskip("promql_parser")
    recorded = {rule["record"]: None for rule in rules("record")}
    known = sampled()
    for rule in [*rules("alert"), *rules("record")]:
        for selector in selectors(parser.parse(rule["expr"])):
            if selector.name in ("up", *recorded) or selector.name.startswith("kube_"):
                continue
            assert selector.name in known, selector.name
            assert {matcher.name for matcher in selector.matchers.matchers} <= set(known[selector.name])
