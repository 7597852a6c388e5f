"""Commands, values and code in docs/gateway.md: their flags, fields and names exist."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "gateway.md").read_text()
VALUES = yaml.safe_load((ROOT / "helm" / "npuserve" / "values.yaml").read_text())
LINES = re.sub(r" \\\n *", " ", PAGE).splitlines()
COMMAND_LINES = [line.strip() for line in LINES if line.startswith("    ")]


def commands(program: str) -> list[list[str]]:
    """Return the words after a program in the page's commands."""
    found = []
    for line in COMMAND_LINES:
        for part in line.split(" && "):
            words = shlex.split(part)
            if Path(words[0]).name == program:
                found.append(words[1:])
    assert found, program
    return found


def flags(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words if word.startswith("--")}


def value(path: str) -> Any:
    """Return a value of the chart by its dotted path; raises KeyError if there is none."""
    found = VALUES
    for part in re.sub(r"\[\d+\].*", "", path).split("."):
        found = found[part]
    return found


def test_gateway_docs_flags_of_smg_are_those_of_the_chart():
    """tests/helm/test_gateway_run.py starts smg with the chart's arguments."""
    template = (ROOT / "helm" / "npuserve" / "templates" / "_gateway.tpl").read_text()
    used = set(re.findall(r"^- (--[a-z-]+)", template, re.MULTILINE)) | {"--worker-urls"}
    for name, *words in commands("smg"):
        assert name == "launch"
        assert flags(words) <= used


def test_gateway_docs_values_of_the_chart_exist():
    given = [word for line in COMMAND_LINES for word in re.findall(r"--set '?([\w.\[\]]+)=", line)]
    assert len(given) > 10
    parts = "gateway|inferencePool|networkPolicy|termination|ports|tls|apiKeys"
    named = re.findall(rf"`((?:{parts})\.[\w.]+?)(?:: \w+)?`", PAGE)
    assert len(named) > 10
    for path in {*given, *named}:
        value(path)


def test_gateway_docs_files_of_the_commands_exist():
    for words in [*commands("docker"), *commands("helm")]:
        files = [word for word in words if re.match(r"(docker|helm)/", word)]
        assert files or words[0] in ("push", "test")
        assert [file for file in files if not (ROOT / file).exists()] == []


def test_gateway_docs_python_and_yaml_are_well_formed():
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    ast.parse(program)
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    config = yaml.safe_load(text)
    types = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    assert types["metrics-data-source"]["port"] == VALUES["ports"]["metrics"]
    referred = re.findall(r"pluginRef: ([\w-]+)", text)
    assert set(referred) == types.keys()


def test_gateway_docs_numbers_are_those_of_the_chart():
    assert f"metrics on port {VALUES['gateway']['smg']['ports']['metrics']}" in PAGE
    route = VALUES["inferencePool"]["httpRoute"]
    assert route["methods"] == ["vllm.grpc.engine.VllmEngine/Generate"]
    assert f"`{route['methods'][0]}`" in PAGE
