"""Pictures of dashboards' panels (bench/reliability/panels.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.benches import bench

TIMES = [100.0 + second for second in range(20)]


@pytest.mark.slow
def test_draw_writes_a_picture_of_each_kind_of_panel(tmp_path: Path) -> None:
    """Lines, stacks of values and of shares, and a heatmap of cumulative buckets; an odd number of panels."""
    pytest.importorskip("matplotlib")
    panels = bench("reliability.panels")

    def panel(kind: str, stack: str, *legends: str) -> object:
        series = [panels.Series(legend, TIMES[place:], [float(place + at) for at in TIMES[place:]])
                  for place, legend in enumerate(legends)]
        return panels.Panel("service", f"{kind} {stack}", kind, "s", stack, series, [])

    chosen = [panel("timeseries", "none", "p50", "target"), panel("timeseries", "normal", "a", "b"),
              panel("timeseries", "percent", "a", "b"), panel("timeseries", "none", *map(str, range(12))),
              panel("heatmap", "none", "0.1", "0.5", "inf")]
    panels.draw(chosen, TIMES[0], tmp_path / "all.png", "a title")
    panels.draw(chosen[:1], TIMES[0], tmp_path / "one.png", "a title")
    sizes = [(tmp_path / name).stat().st_size for name in ("one.png", "all.png")]
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert 2_000 < 2 * sizes[0] < sizes[1]


def test_pictures_show_panels_of_the_dashboards() -> None:
    monitoring, panels = bench("reliability.monitoring"), bench("reliability.panels")
    for dashboard, titles in monitoring.PICTURES.values():
        (file,) = panels.DASHBOARDS.glob(f"npuserve-{dashboard}.json")
        rows = json.loads(file.read_text())["panels"]
        known = {panel["title"].replace("$kernel", "All kernels")
                 for row in rows for panel in (row, *row.get("panels", ()))}
        assert set(titles) <= known


def test_first_row_shows_units_and_colors_as_grafana_does(monkeypatch: pytest.MonkeyPatch) -> None:
    panels = bench("reliability.panels")
    answers = {"npuserve_ready": 2.0, "time_to_first_token": 3.0, "process_failures": 1.0}

    def values(base: str, query: str) -> list[tuple[dict[str, str], float]]:
        return [({}, value) for name, value in answers.items() if name in query]

    monkeypatch.setattr(panels, "values", values)
    row = {stat.title: stat for stat in panels.first_row("http://prometheus", "llm")}
    assert [(cell.name, cell.text, cell.color) for cell in row["Ready"].cells] == [
        ("ready", "2", "green"), ("wanted", "2", "text")]
    assert [(cell.name, cell.text, cell.color) for cell in row["TTFT"].cells] == [
        ("p95", "3 s", "text"), ("of the target", "300%", "red")]
    assert [cell.color for cell in row["Restarts in 1 h"].cells] == ["orange"]
    assert (row["ITL"].cells, row["ITL"].no_data) == ([], "no calls")
    assert sum(stat.width for stat in row.values()) == 24


@pytest.mark.slow
def test_draw_first_rows_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panels = bench("reliability.panels")
    ready = panels.Stat("Ready", 3, [panels.Cell("ready", "1", "green")], "none")
    stats = [ready, panels.Stat("Alerts", 5, [], "none")]
    panels.draw_first_rows({"up": stats, "dead": stats}, tmp_path / "rows.png", "a title")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
