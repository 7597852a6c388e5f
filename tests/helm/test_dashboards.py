"""The dashboards as read by Grafana and Prometheus, checked against the existing metrics.

Grafana's SDK and a parser of PromQL read them: packages of `npuserve[dev]`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.service.test_metrics import DOCUMENT, documented

HELM = Path(__file__).parents[2] / "helm"
FILES = sorted((HELM / "npuserve/dashboards").glob("*.json"))
RUNBOOKS = HELM / "npuserve/dashboards/npuserve-runbooks.json"
BOARDS = [file for file in FILES if file != RUNBOOKS]
RULES = HELM / "npuserve/rules/npuserve.yaml"
VARIABLES = {"namespace": ".*", "model": ".*", "instance": ".*", "kernel": ".*", "phase": ".*", "baseline": "1h",
             "__rate_interval": "1m"}


FIRST_ROW = ("Ready", "Refused", "Refused, by reason", "TTFT", "ITL", "Errors", "Restarts in 1 h", "Firing alerts")


def load(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels with queries, those of collapsed rows included."""
    shown = [panel for outer in dashboard["panels"] for panel in (outer, *outer.get("panels", ()))]
    return [panel for panel in shown if panel["type"] not in ("row", "text")]


def queries() -> Iterator[tuple[str, str, str]]:
    """Yield (dashboard, panel, query) of all queries."""
    for file in FILES:
        for panel in panels(load(file)):
            for target in panel["targets"]:
                yield file.stem, panel["title"], target["expr"]


def filled(query: str) -> str:
    """Return the query with values in place of Grafana's variables."""
    return re.sub(r"\$(\w+)", lambda match: VARIABLES[match[1]], query)


def selectors(node: Any) -> Iterator[Any]:
    """Yield all vector selectors of a parsed expression."""
    import promql_parser

    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("vector_selector", "expr", "lhs", "rhs", "param"):
        child = getattr(node, name, None)
        if child is not None:
            yield from selectors(child)
    for argument in getattr(node, "args", ()):
        yield from selectors(argument)


def sampled() -> dict[str, list[str]]:
    """Return metric name as in a query -> labels."""
    found: dict[str, list[str]] = {}
    for name, (kind, labels) in documented().items():
        if kind == "histogram":
            found |= {f"{name}_bucket": [*labels, "le"], f"{name}_sum": labels, f"{name}_count": labels}
        else:
            found[name] = labels
    text = DOCUMENT.read_text()
    return found | {name: ["model_name", "engine"] for name in re.findall(r"`(vllm:\w+)`", text)} | {
        name: ["id"] for name in re.findall(r"`(npu_chip_info_\w+)`", text)} | {
        name: ["Hostname", "gpu"] for name in re.findall(r"`(DCGM_FI_DEV_\w+)`", text)} | {
        name: [] for name in re.findall(r"record: (npuserve:\w+)", RULES.read_text(encoding="utf-8"))} | {
        "ALERTS": ["alertname", "alertstate", "severity"]}


def test_dashboard_files_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, HELM / "dashboards.py", "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [file.stem for file in FILES] == ["npuserve-kernels", "npuserve-operators", "npuserve-runbooks"]
    assert all("\n" not in file.read_text(encoding="utf-8").strip() for file in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_grafana_knows_every_field(file: Path) -> None:
    """Reading and writing by Grafana's own types changes nothing."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    dashboard = load(file)

    def again(what: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(JSONEncoder().encode(models.Dashboard.from_json(what)))
        return found

    def known(ours: Any, theirs: Any, path: str = "") -> None:
        if isinstance(ours, dict):
            assert set(ours) <= set(theirs), path
            for key, value in ours.items():
                known(value, theirs[key], f"{path}/{key}")
        elif isinstance(ours, list):
            assert len(ours) == len(theirs), path
            for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
                known(mine, other, f"{path}/{number}")
        else:
            assert ours == theirs, path

    known(dashboard, again(dashboard))
    panel = (panels(dashboard) or dashboard["panels"])[0]
    parts = [panel, panel["options"]]
    if file != RUNBOOKS:
        parts += [panel["targets"][0], panel["fieldConfig"]["defaults"]]
    for part in parts:
        part["nonsense"] = 1
        with pytest.raises(AssertionError):
            known(dashboard, again(dashboard))
        del part["nonsense"]


def check_places(group: list[dict[str, Any]]) -> None:
    """Check that panels lie within the width and beside each other."""
    taken: set[tuple[int, int]] = set()
    for panel in group:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("file", BOARDS, ids=lambda file: file.stem)
def test_dashboard_is_usable(file: Path) -> None:
    dashboard = load(file)
    assert dashboard["schemaVersion"] >= 41
    assert dashboard["uid"] == file.stem
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables)[:4] == ["datasource", "namespace", "model", "instance"]
    assert variables["datasource"]["type"] == "datasource"
    assert 'model=~"$model"' in variables["instance"]["query"]["query"]
    names = set(variables) | {"__rate_interval"}
    assert set(re.findall(r"\$(\w+)", json.dumps(dashboard["panels"]))) <= names
    rows = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
    assert [row["collapsed"] for row in rows] == [False, *[True] * (len(rows) - 1)]
    assert all(row["panels"] for row in rows[1:])
    ids = [panel["id"] for panel in (*rows, *panels(dashboard))]
    assert len(set(ids)) == len(ids)
    for group in (dashboard["panels"], *(row["panels"] for row in rows)):
        check_places(group)
    for panel in panels(dashboard):
        assert panel["targets"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_every_query_uses_existing_metrics() -> None:
    """Queries parse, name existing metrics and labels, and select the chosen servers."""
    parser = pytest.importorskip("promql_parser")
    known = sampled()
    count = 0
    for where in queries():
        found = list(selectors(parser.parse(filled(where[2]))))
        assert found, where
        for selector in found:
            count += 1
            assert selector.name in known, (where, selector.name)
            labels = {matcher.name for matcher in selector.matchers.matchers}
            if selector.name.startswith(("npu_chip_info_", "DCGM_")):  # the exporters' labels name nodes
                assert not labels, where
                continue
            # The first row is about all servers, dead ones included, which the variable `instance` does not offer.
            chosen = {"namespace"} if where[1] in FIRST_ROW else {"namespace", "instance"}
            assert labels & {"namespace", "instance"} == chosen, where
            assert labels - {"namespace", "instance"} <= set(known[selector.name]), where
    assert count > 90


@pytest.mark.parametrize("query", [
    "sum(rate(npuserve_requests_total[1m])", "sum by (x npuserve_requests_running", "a b"])
def test_a_wrong_query_is_refused(query: str) -> None:
    parser = pytest.importorskip("promql_parser")
    with pytest.raises(ValueError, match=r"."):
        parser.parse(query)


def test_legends_name_labels_that_their_query_keeps() -> None:
    parser = pytest.importorskip("promql_parser")
    for file in FILES:
        for panel in panels(load(file)):
            for target in panel["targets"]:
                wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                node = parser.parse(filled(target["expr"]))
                if isinstance(node, parser.VectorSelector):
                    assert wanted <= {*sampled()[node.name], "instance"}, panel["title"]
                    continue
                kept = set(re.findall(r"\w+", " ".join(re.findall(r" by \(([^)]*)\)", target["expr"]))))
                assert wanted <= kept, panel["title"]


def panel(title: str, dashboard: str = "operators") -> dict[str, Any]:
    """Return the panel of a dashboard with this title, not the one in the first row."""
    (found,) = [panel for panel in panels(load(HELM / f"npuserve/dashboards/npuserve-{dashboard}.json"))
                if panel["title"] == title and panel["type"] != "stat"]
    return found


def matchers(query: str, metric: str) -> set[frozenset[str]]:
    """Return the matchers of every selector of a metric in a query, apart from Grafana's variables."""
    parser = pytest.importorskip("promql_parser")
    return {frozenset(f"{m.name} {m.op} {m.value}" for m in selector.matchers.matchers
                      if m.name not in ("namespace", "instance"))
            for selector in selectors(parser.parse(filled(query))) if selector.name == metric}


def rule(name: str) -> str:
    """Return the expression of an alert or a recording rule."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    (found,) = [rule["expr"] for group in groups for rule in group["rules"]
                if name in (rule.get("alert"), rule.get("record"))]
    return str(found)


def test_dashboard_error_panels_count_what_the_alerts_count() -> None:
    counted = matchers(rule("NpuserveErrorRate"), "npuserve_requests_total")
    assert matchers(rule("job:npuserve_errors:rate5m"), "npuserve_requests_total") < counted
    (stat,) = [query for _, title, query in queries() if title == "Errors"]
    assert matchers(stat, "npuserve_requests_total") == counted
    assert "vector" not in stat  # without calls there is no share of errors
    drawn = matchers(panel("Errors and refusals")["targets"][0]["expr"], "npuserve_requests_total")
    assert drawn < counted
    assert "DEADLINE_EXCEEDED" not in str(counted)


@pytest.mark.slow
@pytest.mark.parametrize("metric", [
    "npuserve_queue_rejections_total", "npuserve_preparation_rejections_total", "npuserve_requests_total"])
def test_dashboard_refusals_are_those_of_the_alert(metric: str) -> None:
    counted = matchers(rule("job:npuserve_refusals:rate5m"), metric)
    (stat,) = [query for _, title, query in queries() if title == "Refused"]
    calls = matchers(rule("job:npuserve_calls:rate5m"), metric)
    assert matchers(stat, metric) == counted | calls
    reasons = [found for _, title, query in queries() if title == "Refused, by reason"
               for found in matchers(query, metric)]
    assert set(reasons) == counted


def test_dashboard_first_row_is_what_an_operator_looks_for() -> None:
    row, *shown = load(HELM / "npuserve/dashboards/npuserve-operators.json")["panels"][: len(FIRST_ROW) + 1]
    assert (row["type"], row["collapsed"]) == ("row", False)
    assert tuple(panel["title"] for panel in shown) == FIRST_ROW
    assert {panel["gridPos"]["y"] for panel in shown} == {1}
    assert sum(panel["gridPos"]["w"] for panel in shown) == 24
    assert all(target["instant"] for panel in shown for target in panel["targets"])


def test_dashboard_runbooks_are_those_of_the_operations_guide() -> None:
    guide = (HELM.parent / "docs/operations.md").read_text(encoding="utf-8")
    for panel in load(RUNBOOKS)["panels"]:
        text = panel["options"]["content"]
        assert text.splitlines()[0].split("](")[0].split("[")[0] in guide.split(f"### {panel['title']}\n")[1]
        assert "](" not in text


@pytest.mark.parametrize("title", [
    "Requests", "KV-cache blocks", "KV cache in use", "Saturation", "Ready by server", "Resident memory"])
def test_dashboard_state_is_shown_by_instance(title: str) -> None:
    for target in panel(title)["targets"]:
        assert "{{instance}}" in target["legendFormat"]
        assert re.search(r" by \(instance\b", target["expr"])


def test_dashboard_gateway_row_counts_the_gateways_calls() -> None:
    for title in ("Calls of gateways", "Errors to gateways"):
        (target,) = panel(title)["targets"]
        for found in matchers(target["expr"], "npuserve_requests_total"):
            assert any(matcher.startswith("rpc ") and matcher.endswith(" vllm[.].*") for matcher in found)
    shown = " ".join(query for _, title, query in queries() if title.endswith("endpoint pickers see"))
    assert set(re.findall(r"vllm:\w+", shown)) == {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}


def test_dashboard_certificates_are_empty_without_tls() -> None:
    (target,) = panel("Certificates")["targets"]
    assert "vector" not in target["expr"]


@pytest.mark.parametrize(("dashboard", "title", "lowest"), [
    ("operators", "Certificates", None), ("operators", "Health", -1), ("operators", "Requests", 0)])
def test_dashboard_axis_holds_the_values_that_the_description_names(
    dashboard: str, title: str, lowest: float | None
) -> None:
    """An expired certificate has a negative time left, and an unknown health is -1."""
    assert panel(title, dashboard)["fieldConfig"]["defaults"].get("min") == lowest


def test_dashboard_kernels_that_fall_back_are_those_alone() -> None:
    """The metric is 0 for each kernel with an implementation."""
    (target,) = panel("Kernels that fall back", "kernels")["targets"]
    assert target["expr"].endswith(") > 0")


def test_dashboard_saturation_is_of_seats_and_queue() -> None:
    shown = [target["expr"] for target in panel("Saturation")["targets"]]
    assert [re.findall(r"npuserve_\w+|state=\"\w+\"", query) for query in shown] == [
        ["npuserve_requests_running", "npuserve_requests_limit", 'state="running"'],
        ["npuserve_requests_waiting", "npuserve_requests_limit", 'state="waiting"']]


def test_every_metric_is_on_a_dashboard() -> None:
    shown = " ".join(query for *_, query in queries())
    assert not [name for name in documented() if name not in shown]
