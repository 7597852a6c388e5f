"""Table of the test files that take most processor time, their child processes included, at the end of a run.

    pytest --processor-time N [argument of pytest ...]

prints the N first files. A child counts for the file during whose tests it is waited for.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator

import pytest

PROPERTY = "processor_seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-time", type=int, default=0, metavar="N",
                     help="print the N test files that take most processor time, with their child processes")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Attach the processor time since the last report of this process."""
    result = yield
    report = result.get_result()  # type: ignore[attr-defined]
    now = processor_seconds()
    report.user_properties.append((PROPERTY, now - item.config.stash.get(_LAST, now)))
    item.config.stash[_LAST] = now


_LAST = pytest.StashKey[float]()


def pytest_runtestloop(session: pytest.Session) -> None:
    session.config.stash[_LAST] = processor_seconds()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    if not (count := config.getoption("--processor-time")):
        return
    by_file: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            seconds = [value for name, value in getattr(report, "user_properties", ()) if name == PROPERTY]
            if seconds:
                by_file[report.nodeid.partition("::")[0]] += seconds[-1]
    terminalreporter.section(f"processor time: {sum(by_file.values()):.0f} s in {len(by_file)} files")
    for file, total in by_file.most_common(count):
        terminalreporter.write_line(f"{total:7.1f} s  {file}")


def processor_seconds() -> float:
    """Return the processor time of this process and of the children that it has waited for."""
    own, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
