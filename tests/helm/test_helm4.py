"""Helm 4 renders and refuses the same values as Helm 3."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import yaml

from tests.helm import helm4
from tests.helm.chart import (
    CHART,
    KUBERNETES,
    PRESETS,
    ROOT,
    Loader,
    Object,
    completed,
    merged,
    needs_helm,
    refused,
    render,
)
from tests.helm.combinations import COMBINATIONS
from tests.helm.test_values import ALL_INVALID, CONTRADICTIONS

pytestmark = [needs_helm, pytest.mark.skipif(
    helm4.library() is None, reason="no Helm 4 (pip install --no-deps --ignore-requires-python helm-sdkpy==0.1.32)")]

STACKS: dict[str, tuple[tuple[str, ...], Object]] = {
    "+".join(stack): (stack, completed(stack))
    for stack in ((), *((p,) for p in PRESETS), *((p, "prod") for p in PRESETS))}
ACCEPTED = {**STACKS, **{name: (stack, completed(stack, own)) for name, (stack, own) in COMBINATIONS.items()}}


def answers(asked: Iterable[tuple[tuple[str, ...], Object]]) -> list[Object]:
    """Return Helm 4's result for each (presets, values)."""
    files = {preset: yaml.load((CHART / f"values-{preset}.yaml").read_text(), Loader) for preset in PRESETS}
    values = [merged(*(files[preset] for preset in presets), own) for presets, own in asked]
    done = subprocess.run([sys.executable, "-m", "tests.helm.helm4"], input=json.dumps(values), cwd=ROOT,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: list[Object] = json.loads(done.stdout)
    return found


def plain(objects: list[Object]) -> dict[tuple[str, str], Any]:
    """Return (kind, name) -> object, without the metadata that Helm adds at installation."""
    found = {}
    for each in objects:
        metadata = each["metadata"]
        annotations = {name: value for name, value in (metadata.get("annotations") or {}).items()
                       if not name.startswith("meta.helm.sh/")}
        labels = {"app.kubernetes.io/managed-by": "Helm", **(metadata.get("labels") or {})}
        found[each["kind"], metadata["name"]] = {
            **each, "metadata": {"name": metadata["name"], "namespace": metadata.get("namespace", "llm"),
                                 "labels": labels, "annotations": annotations}}
    return found


REPRESENTATIVE = {*STACKS, "all settings", "smg in production, every value", "pool, route and gateway",
                  "service monitor, rules, dashboards", "keda with authentication",
                  "all that a pod may have more", "sizes, times, contexts", "groups, a pool and smg",
                  "everything at once"}
"""Values that together render every kind of object. Helm 3 renders all values (test_chart.py)."""
SOME = [pytest.param(4, id="some"), pytest.param(1, id="all", marks=pytest.mark.full)]
"""Steps through lists of values that the same parts of Helm refuse: its JSON schema, and `fail` in a template."""


@pytest.mark.full
@pytest.mark.parametrize("names", [
    pytest.param(REPRESENTATIVE, id="representative"),
    pytest.param(ACCEPTED.keys() - REPRESENTATIVE, id="others", marks=pytest.mark.full)])
def test_helm4_installs_what_helm3_renders(names: set[str]):
    chosen = {name: ACCEPTED[name] for name in ACCEPTED if name in names}
    assert len(chosen) == len(names)
    for (name, (presets, own)), answer in zip(chosen.items(), answers(chosen.values()), strict=True):
        assert answer["error"] is None, f"{name}: {answer['error']}"
        rendered = [o for o in render(own, presets, kubernetes=KUBERNETES)
                    if "helm.sh/hook" not in (o["metadata"].get("annotations") or {})]
        assert plain(answer["objects"]) == plain(rendered), name


@pytest.mark.full
def test_helm4_representative_values_have_all_kinds():
    kinds = {name: {o["kind"] for o in render(own, presets, kubernetes=KUBERNETES)}
             for name, (presets, own) in ACCEPTED.items()}
    assert set().union(*kinds.values()) == set().union(*(kinds[name] for name in REPRESENTATIVE))


@pytest.mark.parametrize("step", SOME)
def test_helm4_refuses_invalid_values_by_field(step: int):
    chosen = ALL_INVALID[::step]
    for (field, _), answer in zip(chosen, answers(((), own) for _, own in chosen), strict=True):
        assert field in refused(answer["error"] or ""), answer["error"]


@pytest.mark.parametrize("step", SOME)
def test_helm4_refuses_contradictions(step: int):
    chosen = CONTRADICTIONS[::step]
    for (said, _), answer in zip(chosen, answers(((), own) for _, own in chosen), strict=True):
        assert said in (answer["error"] or ""), answer["error"]
