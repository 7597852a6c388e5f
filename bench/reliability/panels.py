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


@dataclass(frozen=True)
class Cell:
    """One number of a panel as Grafana shows it now. color: by the panel's thresholds; "text" for a plain one."""

    name: str
    text: str
    color: str


@dataclass(frozen=True)
class Stat:
    """Panel of the first row. width: in Grafana's columns, of 24. cells: empty if it shows its word for no data."""

    title: str
    width: int
    cells: list[Cell]
    no_data: str


def first_row(base: str, namespace: str) -> list[Stat]:
    """Return the panels of the first row of the dashboard for operators, as they are now."""
    board = json.loads((DASHBOARDS / "npuserve-operators.json").read_text(encoding="utf-8"))
    stats = []
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        defaults = panel["fieldConfig"]["defaults"]
        overrides = {override["matcher"]["options"]: {item["id"]: item["value"] for item in override["properties"]}
                     for override in panel["fieldConfig"].get("overrides", ())}
        cells = []
        for target in panel["targets"]:
            for labels, value in values(base, target["expr"].replace("$namespace", namespace)):
                name = legend(target["legendFormat"], labels)
                override = overrides.get(name, {})
                color = override.get("color", {}).get("fixedColor") or _color(defaults["thresholds"]["steps"], value)
                cells.append(Cell(name, _number(value, override.get("unit", defaults["unit"])), color))
        stats.append(Stat(panel["title"], panel["gridPos"]["w"], cells, defaults.get("noValue", "No data")))
    return stats


def _color(steps: list[dict[str, Any]], value: float) -> str:
    """Return the color of the last threshold that the value reaches. The first one has no bound."""
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return str(reached[-1])


def _number(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return str(value)
    if unit == "percentunit":
        return f"{100 * value:,.0f}%" if value >= 1 else f"{100 * value:.3g}%"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
    return f"{value:.3g}" + {"reqps": " req/s"}.get(unit, "")


# Pictures

COLORS = {"red": "#e02f44", "orange": "#ff9830", "green": "#56a64b", "text": "#333333"}


def draw_first_rows(rows: Mapping[str, list[Stat]], file: Path, title: str) -> None:
    """Draw first rows of the dashboard, one below the other. rows: heading -> panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widths = [stat.width for stat in next(iter(rows.values()))]
    figure, axes = pyplot.subplots(
        len(rows), len(widths), figsize=(17, 1.6 * len(rows)), layout="constrained", squeeze=False, width_ratios=widths)
    for line, (heading, stats) in zip(axes, rows.items(), strict=True):
        for number, (axis, stat) in enumerate(zip(line, stats, strict=True)):
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_title(stat.title, fontsize=8, loc="left")
            if number == 0:
                axis.set_ylabel(heading, fontsize=11, fontweight="bold")
            cells = stat.cells or [Cell("", stat.no_data, "text")]
            for place, cell in enumerate(cells):
                height = 1 - (place + 0.5) / len(cells)
                if stat.width > 3 and cell.name:  # a bar gauge
                    axis.text(0.03, height, cell.name, fontsize=7, va="center")
                    axis.text(0.97, height, cell.text, fontsize=8, va="center", ha="right", color=COLORS[cell.color])
                else:
                    axis.text(0.5, height, cell.text, fontsize=15, va="center", ha="center", color=COLORS[cell.color])
                    name = "" if len(cells) == 1 else cell.name
                    axis.text(0.97, height - 0.2, name, fontsize=6, va="center", ha="right")
    figure.suptitle(title, fontsize=8)
    figure.savefig(file, dpi=80, pil_kwargs={"optimize": True})
    pyplot.close(figure)


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
