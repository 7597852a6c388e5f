from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests import selection

TESTS = """
import pytest

@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(4))
def test_three(a, b, c): print(a, b, c)

@pytest.mark.parametrize("a", range(5))
def test_one(a): pass

def test_none(): pass

@pytest.mark.full
def test_long(): pass

@pytest.mark.parametrize("a", [0, pytest.param(1, marks=pytest.mark.full), 2])
def test_some(a): pass
"""

SKIPPED = """
import pytest

@pytest.mark.skipif(True, reason="no tool")
@pytest.mark.parametrize("a", range(3))
def test_tool(a): pass

@pytest.mark.skipif(True, reason="no tool")
class TestMore:
    def test_more(self): pass

@pytest.mark.skipif(False, reason="no tool")
def test_runs(): pass

@pytest.mark.skipif(True, reason="no other tool")
def test_other(): pass
"""


def cases(folder: Path, *arguments: str, tests: str = TESTS) -> list[str]:
    """Return the tests that pytest collects with these arguments, of which FILE is a file of `tests`."""

    found: list[str] = []

    class Names:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            found.extend(item.name for item in session.items)

    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n full: with --full\n slow: with --slow\n")
    file = folder / f"test_{folder.name}.py"
    file.write_text(tests)
    pytest.main(
        ["--collect-only", "-qq", "--import-mode=importlib", "-W", "ignore", "-p", "no:cacheprovider",
         "-c", str(folder / "pytest.ini"),
         *(argument.replace("FILE", str(file)) for argument in arguments or ["FILE"])],
        plugins=[selection, Names()],
    )
    return found


def test_every_value_is_in_a_case(tmp_path: Path) -> None:
    three = [tuple(map(int, name[11:-1].split("-"))) for name in cases(tmp_path) if name.startswith("test_three")]
    assert [sorted(set(column)) for column in zip(*three, strict=True)] == [[0, 1, 2, 3], [0, 1, 2], [0, 1]]
    assert len(three) == 4


@pytest.mark.slow
def test_every_pair_of_values_of_a_kernel_is_in_a_case_for_every_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cases(tmp_path, "--slow", "FILE") == cases(tmp_path, "FILE")
    monkeypatch.setattr(selection, "KERNELS", tmp_path)
    names = cases(tmp_path, "--slow", "FILE")
    three = [tuple(map(int, name[11:-1].split("-"))) for name in names if name.startswith("test_three")]
    assert 12 <= len(three) < 24
    for i, j in (0, 1), (0, 2), (1, 2):
        sizes = (4, 3, 2)
        assert {(case[i], case[j]) for case in three} == set(product(range(sizes[i]), range(sizes[j])))


@pytest.mark.full
def test_one_parameter_has_all_its_cases(tmp_path: Path) -> None:
    names = cases(tmp_path)
    assert sum(name.startswith("test_one") for name in names) == 5
    assert "test_none" in names
    assert "test_long" not in names
    assert [name for name in names if name.startswith("test_some")] == ["test_some[0]", "test_some[2]"]


@pytest.mark.full
def test_full_runs_all(tmp_path: Path) -> None:
    assert len(cases(tmp_path, "--full", "FILE")) == 24 + 5 + 1 + 1 + 3


@pytest.mark.full
def test_a_test_that_is_named_runs_whole(tmp_path: Path) -> None:
    assert len(cases(tmp_path, "FILE::test_three", "FILE::test_one")) == 24 + 5
    assert cases(tmp_path, "FILE::test_long") == ["test_long"]


@pytest.mark.full
def test_a_case_that_is_named_runs(tmp_path: Path) -> None:
    default = cases(tmp_path)
    left = [(c, b, a) for c, b, a in product(range(4), range(3), range(2)) if f"test_three[{c}-{b}-{a}]" not in default]
    for c, b, a in left[:3]:
        assert cases(tmp_path, f"FILE::test_three[{c}-{b}-{a}]") == [f"test_three[{c}-{b}-{a}]"]


@pytest.mark.parametrize(("arguments", "expected"), [
    (["FILE"], ["test_other", "test_runs", "test_tool[0]"]),
    (["--slow", "FILE"], ["test_more", "test_other", "test_runs", "test_tool[0]", "test_tool[1]", "test_tool[2]"]),
    (["FILE::test_tool", "FILE::TestMore::test_more"], ["test_more", "test_tool[0]", "test_tool[1]", "test_tool[2]"]),
])
def test_skips_for_one_reason_are_one_case(arguments: list[str], expected: list[str], tmp_path: Path) -> None:
    assert sorted(cases(tmp_path, *arguments, tests=SKIPPED)) == expected


@pytest.mark.parametrize(("arguments", "expected"), [
    (["FOLDER"], ["test_other", "test_smoke"]),
    (["FOLDER/e2e"], ["test_server", "test_smoke"]),
    (["FOLDER/e2e/test_server.py"], ["test_server"]),
    (["FOLDER/e2e/test_server.py::test_server"], ["test_server"]),
    (["--slow", "FOLDER"], ["test_other", "test_server", "test_smoke"]),
])
def test_whole_servers_are_left_out_unless_they_are_named(
    arguments: list[str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "e2e").mkdir()
    for file in ("test_other", "e2e/test_server", "e2e/test_smoke"):
        (tmp_path / f"{file}.py").write_text(f"def {Path(file).name}(): pass\n")
    monkeypatch.setattr(selection, "WHOLE_SERVERS", tmp_path / "e2e")
    monkeypatch.setattr(selection, "SMOKE_TEST", tmp_path / "e2e" / "test_smoke.py")
    found = cases(tmp_path, *(argument.replace("FOLDER", str(tmp_path)) for argument in arguments))
    assert sorted(set(found) & {"test_other", "test_server", "test_smoke"}) == expected
