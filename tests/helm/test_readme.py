"""The chart's README and metadata."""

from __future__ import annotations

import base64
import re
import subprocess
import sys

import yaml

from tests.helm.chart import CHART, ROOT, Object

README = (CHART / "README.md").read_text()
ROWS = dict(re.findall(r"^\| `([\w.]+)` \| (?:`(.*?)`)? \|", README, flags=re.MULTILINE))


def test_readme_is_current():
    done = subprocess.run([sys.executable, ROOT / "helm" / "readme.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_readme_lists_every_value_with_its_default():
    def check(values: Object, path: str = "") -> None:
        for name, value in values.items():
            own = f"{path}{name}"
            if ROWS.get(own):
                assert yaml.safe_load(ROWS[own]) == value, own
            else:
                assert isinstance(value, dict), f"{own} is not in the table"
                check(value, f"{own}.")

    check(yaml.safe_load((CHART / "values.yaml").read_text()))


def test_chart_icon_is_the_file():
    """A data URI, as no public address serves the chart's files."""
    icon = yaml.safe_load((CHART / "Chart.yaml").read_text())["icon"]
    kind, _, data = icon.partition(";base64,")
    assert kind == "data:image/svg+xml"
    assert base64.b64decode(data) == (CHART / "icon.svg").read_bytes()
