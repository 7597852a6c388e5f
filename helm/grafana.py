"""Panels, rows and dashboards, and their JSON for Grafana's import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 41  # of Grafana 12; older versions read it, too
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, ORANGE, RED = "green", "orange", "red"
WIDTH = 24


@dataclass(frozen=True)
class Panel:
    """Panel of a dashboard.

    queries: legend -> PromQL; a legend may contain {{label}}. thresholds: colour -> lower bound. stack: none, normal or
    percent. lines: legends drawn as dashed red lines, such as targets. lowest: lower end of the axis, below which
    nothing is drawn; None for none. plain: legend -> unit of values that thresholds do not colour. empty: text without
    a value. instant: show the present value of each query, not the last within the range. text: Markdown, for the kind
    text.
    """

    title: str
    queries: dict[str, str]
    unit: str
    description: str
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    thresholds: dict[str, float] = field(default_factory=dict)
    stack: str = "none"
    lines: tuple[str, ...] = ()
    repeat: str = ""
    lowest: float | None = 0
    plain: dict[str, str] = field(default_factory=dict)
    empty: str = ""
    instant: bool = False
    text: str = ""


@dataclass(frozen=True)
class Row:
    """Row of panels, without a header if the title is empty. The first of a dashboard is open, others are collapsed."""

    title: str
    panels: list[Panel]


@dataclass(frozen=True)
class Dashboard:
    """Dashboard of panels in rows. variables: besides those that choose servers, which a dashboard of texts lacks."""

    uid: str
    title: str
    description: str
    rows: list[Row]
    variables: list[dict[str, Any]] = field(default_factory=list)


def variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    if all(panel.kind == "text" for row in dashboard.rows for panel in row.panels):
        return []
    build = "npuserve_build_info"
    common = [
        {"type": "query", "name": "namespace", "label": "Namespace", "of": f"label_values({build}, namespace)"},
        {"type": "query", "name": "model", "label": "Model",
         "of": f'label_values({build}{{namespace=~"$namespace"}}, model)'},
        {"type": "query", "name": "instance", "label": "Instance",
         "of": f'label_values({build}{{namespace=~"$namespace", model=~"$model"}}, instance)'},
    ]
    return [
        {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "hide": 0},
        *map(variable, [*common, *dashboard.variables]),
    ]


def variable(said: dict[str, Any]) -> dict[str, Any]:
    made = {"type": said["type"], "name": said["name"], "label": said["label"], "hide": 0}
    if said["type"] == "interval":
        first, *_ = said["values"]
        options = [{"text": value, "value": value, "selected": value == first} for value in said["values"]]
        return made | {"query": ",".join(said["values"]), "options": options, "current": {**options[0]}}
    every = {"text": ["All"], "value": ["$__all"], "selected": True}
    # A server outside of Kubernetes has no namespace; .* matches that, too.
    every_value = {"allValue": ".*"} if said["name"] == "namespace" else {}
    return made | every_value | {
        "datasource": DATASOURCE, "query": {"query": said["of"], "refId": said["name"], "qryType": 1},
        "multi": True, "includeAll": True, "current": every, "refresh": 2, "sort": 1}


def threshold_steps(thresholds: dict[str, float]) -> list[dict[str, Any]]:
    steps = sorted(thresholds.items(), key=lambda item: item[1]) or [(GREEN, 0.0)]
    (first, _), *others = steps
    return [{"color": first, "value": None}, *({"color": color, "value": value} for color, value in others)]


def text_json(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {"id": number, "type": "text", "title": panel.title, "description": panel.description, "gridPos": place,
            "options": {"mode": "markdown", "content": panel.text}}


def panel_json(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    if panel.kind == "text":
        return text_json(panel, number, place)
    heat = panel.kind == "heatmap"
    instant = panel.instant or panel.kind == "bargauge"
    targets = [
        {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": query, "legendFormat": legend,
         "range": not instant, "instant": instant,
         "format": "heatmap" if heat else "time_series"}
        for i, (legend, query) in enumerate(panel.queries.items())
    ]
    defaults: dict[str, Any] = {"unit": panel.unit}
    if not heat:
        defaults["thresholds"] = {"mode": "absolute", "steps": threshold_steps(panel.thresholds)}
        defaults["color"] = {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"}
        if panel.lowest is not None:
            defaults["min"] = panel.lowest
        if panel.empty:
            defaults["noValue"] = panel.empty
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line", "lineWidth": 1, "fillOpacity": 10 if panel.stack == "none" else 50,
            "showPoints": "never", "stacking": {"mode": panel.stack, "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"}}
    overrides = [
        {"matcher": {"id": "byName", "options": line}, "properties": [
            {"id": "color", "value": {"mode": "fixed", "fixedColor": RED}},
            {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}},
            {"id": "custom.fillOpacity", "value": 0}]}
        for line in panel.lines
    ] + [
        {"matcher": {"id": "byName", "options": legend}, "properties": [
            {"id": "unit", "value": unit}, {"id": "color", "value": {"mode": "fixed", "fixedColor": "text"}}]}
        for legend, unit in panel.plain.items()
    ]
    made: dict[str, Any] = {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.description, "gridPos": place,
        "datasource": DATASOURCE, "targets": targets, "options": options(panel),
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
    }
    if panel.repeat:
        made |= {"repeat": panel.repeat, "repeatDirection": "h", "maxPerRow": WIDTH // panel.width}
    return made


def options(panel: Panel) -> dict[str, Any]:
    reduced = {"values": False, "calcs": ["lastNotNull"], "fields": ""}
    if panel.kind == "stat":
        return {"reduceOptions": reduced, "colorMode": "value", "justifyMode": "auto",
                "graphMode": "none" if panel.instant else "area",
                "textMode": "value_and_name" if len(panel.queries) > 1 else "value",
                "orientation": "auto", "wideLayout": True, "showPercentChange": False,
                "percentChangeColorMode": "standard"}
    if panel.kind == "bargauge":
        return {"reduceOptions": reduced, "orientation": "horizontal", "displayMode": "basic", "valueMode": "color",
                "namePlacement": "auto", "showUnfilled": True, "sizing": "auto", "minVizWidth": 8, "minVizHeight": 16,
                "maxVizHeight": 300,
                "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom", "calcs": []}}
    if panel.kind == "heatmap":
        return {"calculate": False, "cellGap": 1, "rowsFrame": {"layout": "auto"},
                "color": {"mode": "scheme", "scheme": "Oranges", "fill": "dark-orange", "exponent": 0.5, "steps": 64,
                          "reverse": False},
                "yAxis": {"unit": panel.unit, "axisPlacement": "left", "reverse": False},
                "filterValues": {"le": 1e-9}, "showValue": "never", "exemplars": {"color": "rgba(255,0,255,0.7)"},
                "tooltip": {"mode": "single", "yHistogram": True}, "legend": {"show": False}}
    wide = panel.width >= 12
    return {"legend": {"showLegend": True, "displayMode": "table" if wide else "list", "placement": "bottom",
                       "calcs": ["mean", "max"] if wide else []},
            "tooltip": {"mode": "multi", "sort": "desc"}}


def panels_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Lay out rows from top to bottom, and each row's panels from left to right in lines of one height.

    Grafana keeps the panels of a collapsed row within it, and moves the rows below when it is opened.
    """
    made: list[dict[str, Any]] = []
    number = top = 0
    for row in rows:
        panels: list[dict[str, Any]] = []
        is_collapsed = row is not rows[0]
        if row.title:
            number += 1
            made.append({
                "id": number, "type": "row", "title": row.title, "collapsed": is_collapsed,
                "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}, "panels": panels if is_collapsed else []})
            top += 1
        x, y, height = 0, top, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + height
            number += 1
            panels.append(panel_json(panel, number, {"x": x, "y": y, "w": panel.width, "h": panel.height}))
            x, height = x + panel.width, panel.height
        if not is_collapsed:
            made += panels
            top = y + height
    return made


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    links = [{"title": "npuserve", "type": "dashboards", "tags": ["npuserve"], "asDropdown": True, "keepTime": True,
              "includeVars": True, "targetBlank": False, "icon": "external link", "tooltip": "", "url": ""}]
    return {
        "uid": dashboard.uid, "title": dashboard.title, "description": dashboard.description, "tags": ["npuserve"],
        "schemaVersion": SCHEMA_VERSION, "version": 1, "editable": True, "graphTooltip": 1, "fiscalYearStartMonth": 0,
        "timezone": "browser", "time": {"from": "now-1h", "to": "now"}, "refresh": "30s", "links": links,
        "templating": {"list": variables(dashboard)}, "panels": panels_json(dashboard.rows),
    }
