"""checkov's findings in the chart and the Dockerfiles are those explained in helm/accepted-findings.yaml."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import ROOT, needs_helm, render, template, templates, workload
from tests.helm.combinations import COMBINATIONS, GROUPS

STACKS = [("cpu",), ("ascend", "prod"), ("cuda", "prod")]


@pytest.mark.full
@needs_helm
@pytest.mark.timeout(300)
@pytest.mark.skipif(not shutil.which("checkov"), reason="no program checkov on PATH (pip install checkov)")
def test_checkov_findings_are_explained(tmp_path: Path):
    for number, stack in enumerate(STACKS):
        done = template({}, stack)
        assert done.returncode == 0, done.stderr
        (tmp_path / f"{number}.yaml").write_text(done.stdout)
    for name in ("service monitor, rules, dashboards", "smg", "pool, route and gateway"):
        presets, values = COMBINATIONS[name]
        (tmp_path / f"{name}.yaml").write_text(template(values, presets).stdout)
    # checkov does not know LeaderWorkerSet, so it is given the pods.
    leader, worker = templates(workload(render(GROUPS)))
    for role, each in (("leader", leader), ("worker", worker)):
        metadata = {**each["metadata"], "name": f"demo-npuserve-{role}", "namespace": "llm"}
        (tmp_path / f"{role}.yaml").write_text(yaml.safe_dump(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": each["spec"]}))
    for file in (ROOT / "docker").glob("Dockerfile.*"):
        shutil.copy(file, tmp_path)
    done = subprocess.run(["checkov", "--directory", str(tmp_path), "--framework", "kubernetes", "dockerfile",
                           "--skip-download", "--compact", "--quiet", "--output", "json"],
                          capture_output=True, text=True, timeout=240)
    reports = json.loads(done.stdout)
    assert {report["check_type"] for report in reports} == {"kubernetes", "dockerfile"}
    assert all(report["summary"]["passed"] > 100 and not report["summary"]["parsing_errors"] for report in reports)
    failed = [check for report in reports for check in report["results"]["failed_checks"]]
    found = {(check["check_id"], check["resource"]) for check in failed}
    accepted = yaml.safe_load((ROOT / "helm" / "accepted-findings.yaml").read_text())

    def explained(finding: tuple[str, str], entry: dict[str, str]) -> bool:
        return finding[0] == entry["check"] and re.fullmatch(entry["where"], finding[1]) is not None

    assert [f for f in sorted(found) if not any(explained(f, entry) for entry in accepted)] == []
    assert [entry for entry in accepted if not any(explained(f, entry) for f in found)] == []
    assert all(len(entry["why"]) > 20 for entry in accepted)
