"""Runs `npuserve check --accept --json` on the CPU and reads its report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from npuserve.kernels import native
from npuserve.service.cli import main as cli

Capture = pytest.CaptureFixture[str]

built = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


def accepted(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["check", "--accept", "--device", "cpu", "--threads", "1", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)["acceptance"]


def part_of(report: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    return {x["name"]: x for x in report["findings"] if x["part"] == part}
