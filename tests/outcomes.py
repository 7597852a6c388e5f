"""Account of the tests that ran and were skipped in several runs of pytest; fails if a check did not run.

With TEST_OUTCOMES=FILE in the environment, each run of pytest appends the outcome of its tests to FILE. Then

    python -m tests.outcomes FILE

prints every reason of a skip with the number of tests. It exits with 1 if a test was skipped in every run for a reason
that is not in ALLOWED, or if no test in FILE passed.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

VARIABLE = "TEST_OUTCOMES"
MAX_NAMED = 10

ALLOWED = {
    r"NPUSERVE_TEST_MODELS is not set|no folder \S+ under NPUSERVE_TEST_MODELS":
        "published checkpoints are in no package registry; the same tests run on built-in and generated models",
    r"there is a GPU": "the test is about machines without one",
    r"a CANN is installed here": "the test is about machines without one",
    r"needs Linux 6\.12 on x86_64 or aarch64": "older kernels cannot set the time slice",
    r"no mount namespaces here: .*": "a container without the right to unshare",
    r"no right to make a namespace of processes": "the same",
    r"core files have a place elsewhere": "a setting of the kernel",
    r"this processor has the bfloat16 instruction": "the test is about processors without it",
    r"this processor has no AMX": "the test runs the tiles of AMX; every other instruction set is tested",
    r"this system makes no large pages of a file in memory": "a setting of the kernel",
}
"""Regular expression of the full reason -> why the skip is accepted. A missing tool is never accepted."""
if sys.version_info < (3, 11):
    ALLOWED |= {
        r"could not import 'grafana_foundation_sdk.*": "the package needs Python 3.11",
        r"compressed-tensors is not installed \(Python 3\.11 and later\)": "the package needs Python 3.11",
    }


class Outcome(NamedTuple):
    """Outcome of a test. test: node id; the module's id for a skipped module. reason: of a skip, "" for a pass."""

    test: str
    reason: str


class Recorder:
    """Plugin of pytest that appends outcomes to a file. With pytest-xdist, register it in the controller only."""

    def __init__(self, file: Path):
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._append(report.nodeid, "")
        elif report.skipped and not hasattr(report, "wasxfail"):
            self._append(report.nodeid, reason_of(report.longrepr))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._append(report.nodeid, reason_of(report.longrepr))

    def _append(self, test: str, reason: str) -> None:
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(Outcome(test, reason)) + "\n")


def reason_of(longrepr: object) -> str:
    """Return the reason of a skip, which pytest reports as (file, line, "Skipped: reason")."""
    text = str(longrepr[-1] if isinstance(longrepr, (tuple, list)) else longrepr)
    return " ".join(text.removeprefix("Skipped: ").split()) or "no reason given"


def never_run(outcomes: Iterable[Outcome]) -> dict[str, list[str]]:
    """Return reason -> tests skipped in every run. If a test has several reasons, an allowed one counts."""
    found = list(outcomes)
    passed = {test for test, reason in found if not reason}
    passed |= {test.partition("::")[0] for test in passed}
    reasons: dict[str, str] = {}
    for test, reason in found:
        if reason and test not in passed and not why_allowed(reasons.get(test, "")):
            reasons[test] = reason
    skipped: dict[str, list[str]] = defaultdict(list)
    for test, reason in reasons.items():
        skipped[reason].append(test)
    return dict(skipped)


def why_allowed(reason: str) -> str | None:
    """Return why a skip with this reason is accepted, or None."""
    return next((why for pattern, why in ALLOWED.items() if re.fullmatch(pattern, reason)), None)


def main(file: str) -> int:
    lines = Path(file).read_text(encoding="utf-8").splitlines() if Path(file).exists() else []
    outcomes = [Outcome(*json.loads(line)) for line in lines]
    passed, skipped = len({test for test, reason in outcomes if not reason}), never_run(outcomes)
    print(f"{passed} tests passed in a run, {sum(map(len, skipped.values()))} were skipped in every run")
    missing = 0
    for reason, tests in sorted(skipped.items(), key=lambda item: -len(item[1])):
        if why := why_allowed(reason):
            print(f"allowed: {len(tests)} × {reason} ({why})")
        else:
            missing += len(tests)
            more = [f"and {len(tests) - MAX_NAMED} more"] if len(tests) > MAX_NAMED else []
            print(f"NOT ALLOWED: {len(tests)} × {reason}", *tests[:MAX_NAMED], *more, sep="\n    ")
    return int(bool(missing) or not passed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
