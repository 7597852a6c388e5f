"""Dashboard panels without Grafana: queries sent to a Prometheus, and pictures of the results. For monitoring.py."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).parents[2] / "helm/npuserve/dashboards"


class QueryError(Exception):
    """Refusal of a query by Prometheus; the message gives the reason."""


def ask(base: str, path: str, **parameters: object) -> Any:
    """Return the `data` of Prometheus' reply. Raises QueryError."""
    url = f"{base}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise QueryError(f"{parameters}: {error.read().decode()}") from None


def values(base: str, query: str) -> list[tuple[dict[str, str], float]]:
    """Return (labels, value) of each series of an instant query."""
    return [(series["metric"], float(series["value"][1])) for series in ask(base, "query", query=query)["result"]]


@dataclass(frozen=True)
class Series:
    """One line of a panel. times: Unix seconds. Points without a number are omitted."""

    legend: str
    times: list[float]
    values: list[float]


@dataclass(frozen=True)
class Panel:
    """Panel of a dashboard with its series. empty: legends of the queries without a single number."""

    dashboard: str
    title: str
    kind: str
    unit: str
    stack: str
    series: list[Series]
    empty: list[str]


def legend(template: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)


def fetch(base: str, begin: float, end: float, step: float, variables: Mapping[str, str]) -> list[Panel]:
    """Return all panels of all dashboards over a range of Unix seconds.

    variables: name -> value of Grafana's variables. Raises QueryError.
    """
    found = []
    for file in sorted(DASHBOARDS.glob("*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))["panels"]
        for panel in (shown for row in rows for shown in (row, *row.get("panels", ()))):
            if panel["type"] not in ("row", "text"):
                found.append(_fetch(base, file.stem.removeprefix("npuserve-"), panel, (begin, end, step), variables))
    return found


def _fetch(
    base: str, dashboard: str, panel: dict[str, Any], span: tuple[float, float, float], variables: Mapping[str, str]
) -> Panel:
    series, empty = [], []
    for target in panel["targets"]:
        query = re.sub(r"\$(\w+)", lambda match: variables[match[1]], target["expr"])
        begin, end, step = span
        rows = ask(base, "query_range", query=query, start=begin, end=end, step=step)["result"]
        made = []
        for row in rows:
            points = [(float(at), float(value)) for at, value in row["values"] if math.isfinite(float(value))]
            if points:
                times, numbers = zip(*points, strict=True)
                made.append(Series(legend(target["legendFormat"], row["metric"]), list(times), list(numbers)))
        series += made
        if not made:
            empty.append(target["legendFormat"])
    defaults = panel["fieldConfig"]["defaults"]
    stack = defaults.get("custom", {}).get("stacking", {}).get("mode", "none")
    title = panel["title"].replace("$kernel", "All kernels")
    return Panel(dashboard, title, panel["type"], defaults["unit"], stack, series, empty)


# Pictures


def draw(panels: list[Panel], begin: float, file: Path, title: str) -> None:
    """Draw the panels to `file`, two in a row. begin: zero of the time axis, in Unix seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(panels) // 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(11, 2.4 * rows), layout="constrained", squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        (_heatmap if panel.kind == "heatmap" else _lines)(axis, panel, begin)
        axis.set_title(panel.title, fontsize=9, loc="left", fontweight="bold")
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.25)
    for axis in axes.flat[len(panels):]:
        axis.axis("off")
    figure.suptitle(title, fontsize=9)
    figure.savefig(file, dpi=70, pil_kwargs={"optimize": True})
    pyplot.close(figure)


def _lines(axis: Any, panel: Panel, begin: float) -> None:
    largest = sorted(panel.series, key=lambda series: -max(series.values))[:10]
    if panel.stack == "none":
        for series in largest:
            style = {"linestyle": "--", "color": "red"} if series.legend == "target" else {}
            axis.plot([at - begin for at in series.times], series.values, label=series.legend, linewidth=1, **style)
    else:
        times = sorted({at for series in largest for at in series.times})
        known = [dict(zip(series.times, series.values, strict=True)) for series in largest]
        rows = [[row.get(at, 0.0) for at in times] for row in known]
        if panel.stack == "percent":
            sums = [sum(column) or 1.0 for column in zip(*rows, strict=True)]
            rows = [[100 * value / whole for value, whole in zip(row, sums, strict=True)] for row in rows]
        axis.stackplot([at - begin for at in times], rows, labels=[series.legend for series in largest], alpha=0.8)
    unit = "%" if panel.stack == "percent" else panel.unit
    axis.set_ylabel({"percentunit": "share", "reqps": "requests/s", "ops": "per second"}.get(unit, unit), fontsize=7)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=6, framealpha=0.5, ncols=2 if len(largest) > 4 else 1, loc="upper left")


def _heatmap(axis: Any, panel: Panel, begin: float) -> None:
    """Draw cumulative buckets: a cell is the count between two bounds."""
    from matplotlib.colors import PowerNorm

    bounds = sorted((series for series in panel.series), key=lambda series: float(series.legend))
    times = sorted({at for series in bounds for at in series.times})
    known = [dict(zip(series.times, series.values, strict=True)) for series in bounds]
    cells = [[max(0.0, upper.get(at, 0.0) - lower.get(at, 0.0)) for at in times]
             for lower, upper in zip([{}, *known], known, strict=False)]
    seen = [number for number, row in enumerate(cells) if any(row)]
    low, high = max(0, seen[0] - 1), min(len(cells), seen[-1] + 2)
    axis.pcolormesh(
        [at - begin for at in times], range(low, high), cells[low:high], cmap="Oranges", norm=PowerNorm(0.5),
        shading="nearest")
    axis.set_yticks(range(low, high), [f"{float(series.legend):.2g}" for series in bounds[low:high]])
    axis.set_ylabel(f"up to, {panel.unit}", fontsize=7)
