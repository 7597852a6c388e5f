"""Calls that fit a release of torch_npu pass; calls that do not are reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npuserve.npu.cann.versions import PAIRS
from tests.npu.compatibility.__main__ import TAG, wheel_file
from tests.npu.compatibility.calls import Use, our_uses
from tests.npu.compatibility.release import EMULATED, VERSIONS, Release, problems
from tests.npu.compatibility.wheel import Wheel

RELEASES = {version: Release.load(version) for version in VERSIONS}
SCORE = "npu::npu_score"
MADE = Release("2.13.0", "", "", {
    SCORE: ["npu_score(Tensor query, Tensor? mask=None, *, int[]? lengths=None, float scale=1.0, str layout) -> "
            "(Tensor, Tensor)",
            "npu_score.out(Tensor query, *, str layout, Tensor(a!) out) -> Tensor(a!)"],
    "npu::npu_absent": []},
    {"torch_npu.npu.Stream": "device=None, priority=0", "torch_npu.npu.gone": None, "torch_npu.npu.f": "native",
     "torch_npu.npu.NPUGraph().update": "cpu_update_input"})


@pytest.mark.full
def test_our_calls_fit_every_version() -> None:
    wrong = [problem for release in RELEASES.values() for problem in problems(our_uses(), release, RELEASES[EMULATED])]
    assert not wrong


@pytest.mark.slow
def test_data_contain_only_used_names() -> None:
    used = {use.path.split(".")[0] if use.path.startswith("npu::") else use.path for use in our_uses()}
    for release in RELEASES.values():
        assert {*release.operators, *release.python} == used, "run python -m tests.npu.compatibility write"
        assert release.wheel == f"torch_npu-{release.version}-{TAG}.whl"
        assert len(release.sha256) == 64


@pytest.mark.parametrize("version", PAIRS)
def test_wheel_accepts_the_pair_s_torch(version: str) -> None:
    """On x86_64 the image and the guide install torch's build for CPUs."""
    asked = pytest.importorskip("packaging.specifiers").SpecifierSet(RELEASES[version].torch)
    assert asked.contains(f"{PAIRS[version].torch}+cpu")
    assert asked.contains(PAIRS[version].torch) is (version != "2.10.0.post4")


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_data_equal_wheel(version: str) -> None:
    """The first step of .ci/run's checks downloads the wheels and does the same."""
    if not wheel_file(version).exists():
        pytest.skip(f"{wheel_file(version).name} is not there; python -m tests.npu.compatibility check downloads it")
    assert Release.of(Wheel(wheel_file(version)), (use.path for use in our_uses())) == RELEASES[version]


def call(path: str, *positional: str, results: int | None = None, **keywords: str) -> Use:
    return Use("a.py:1", path, True, positional, tuple(keywords.items()), results, results is not None)


@pytest.mark.parametrize("use", [
    call(SCORE, "", layout="str"),
    call(SCORE, "", "None", lengths="list", scale="float", layout="", results=2),
    call(SCORE, query="", mask="", layout="str", scale="int"),
    call(f"{SCORE}.out", "", layout="str", out=""),
    call("torch_npu.npu.Stream", "", priority="int"),
    call("torch_npu.npu.f", "", anything=""),
    Use("a.py:1", "torch_npu.npu.Stream"),
    replace(call("torch_npu.npu.NPUGraph().update", cpu_update_input="list"), keys=("lengths",)),
], ids=lambda use: use.path)
def test_problems_of_correct_call_are_empty(use: Use) -> None:
    assert problems([call(SCORE, "", layout="str"), use], MADE, MADE) == []


@pytest.mark.parametrize(("use", "said"), [
    (call(SCORE, "", layout="str", eps="float"), "has no argument eps"),
    (call(SCORE, ""), "layout is missing"),
    (call(SCORE, layout="str"), "query is missing"),
    (call(SCORE, "", "", "", layout="str"), "3 positional arguments for 2"),
    (call(SCORE, "", query="", layout="str"), "query is given twice"),
    (call(SCORE, "int", layout="str"), "query takes Tensor, not int"),
    (call(SCORE, "None", layout="str"), "query takes Tensor, not None"),
    (call(SCORE, "", layout="int"), "layout takes str, not int"),
    (call(SCORE, "", layout="str", lengths="int"), "lengths takes Optional[List[int]], not int"),
    (call(SCORE, "", layout="str", scale="str"), "scale takes float, not str"),
    (call(SCORE, "", layout="str", results=3), "returns 2 values, not 3"),
    (call(SCORE, "", layout="str", results=1), "returns 2 values, not 1"),
    (call(f"{SCORE}.out", "", layout="str"), "out is missing"),
    (call(f"{SCORE}.other", "", layout="str"), "there is no such operator"),
    (call("npu::npu_absent", ""), "there is no such operator"),
    (Use("a.py:1", "npu::npu_absent"), "there is no such operator"),
    (call("npu::npu_new", ""), "is not in the data"),
    (call("atb::_npu_paged_attention", ""), "cannot be read from a wheel"),
    (call("torch_npu.npu.gone"), "there is no such name"),
    (call("torch_npu.npu.new"), "is not in the data"),
    (call("torch_npu.npu.Stream", stream=""), "got an unexpected keyword argument 'stream'"),
    (call("torch_npu.npu.Stream", "", "", ""), "too many positional arguments"),
    (call("torch_npu.npu.NPUGraph().update"), "missing a required argument: 'cpu_update_input'"),
    (replace(call("torch_npu.npu.NPUGraph().update", cpu_update_input="list"), keys=("length",)),
     "length is an argument of no operator"),
], ids=lambda value: value if isinstance(value, str) else value.path)
def test_problems_of_wrong_call_are_reported(use: Use, said: str) -> None:
    (problem,) = problems([use], MADE, MADE)
    assert problem.startswith(f"a.py:1: {use.path}, torch_npu 2.13.0: ")
    assert said in problem


def other(schema: str) -> Release:
    return Release("2.14.0", "", "", {SCORE: [schema]}, {"torch_npu.npu.Stream": "device=None, priority=1"})


@pytest.mark.parametrize(("release", "use", "said"), [
    (other("npu_score(Tensor query, *, float scale=2.0, str layout) -> (Tensor, Tensor)"),
     call(SCORE, "", layout=""), "scale is 2.0 by default, and 1.0 in 2.13.0"),
    (other("npu_score(Tensor query, *, int scale=1, str layout) -> (Tensor, Tensor)"),
     call(SCORE, "", layout="", scale=""), "scale takes int, and float in 2.13.0"),
    (other("npu_score(Tensor query, *, float? scale=1.0, str layout) -> (Tensor, Tensor)"),
     call(SCORE, "", layout="", scale=""), "scale takes Optional[float], and float in 2.13.0"),
    (other("npu_score() -> ()"), call("torch_npu.npu.Stream", ""), "priority is 1 by default, and 0 in 2.13.0"),
])
def test_problems_of_incompatible_version_are_reported(release: Release, use: Use, said: str) -> None:
    (problem,) = problems([use], release, MADE)
    assert said in problem


@pytest.mark.parametrize("schema", [
    "npu_score(Tensor query, *, float? scale=1.0, str layout) -> (Tensor, Tensor)",
    "npu_score(Tensor query, *, int[] lengths=[], float scale=1.0, str layout) -> (Tensor, Tensor)",
])
def test_problems_ignore_optional_types_of_given_values(schema: str) -> None:
    use = call(SCORE, "", layout="", scale="float", **({"lengths": "list"} if "lengths" in schema else {}))
    assert problems([use], other(schema), MADE) == []


def mutants(use: Use) -> list[Use]:
    """Return uses that differ from `use` in one place and are wrong."""
    made = [replace(use, path=use.path.replace("npu_", "npu_no_such_", 1) if "::" in use.path else f"{use.path}_gone")]
    if use.called:
        made.append(replace(use, keywords=(*use.keywords, ("no_such_keyword", ""))))
        made.append(replace(use, positional=use.positional + ("",) * 40))
    if use.path.startswith("npu::") and use.positional:
        made.append(replace(use, positional=()))
        made.append(replace(use, positional=("str", *use.positional[1:])))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_problems_of_mutated_calls_are_reported(version: str) -> None:
    release = RELEASES[version]
    for use in our_uses():
        arguments = release.python.get(use.path) or ""
        for wrong in mutants(use):
            if arguments != "native" and "**" not in arguments and "*args" not in arguments:
                assert problems([wrong], release, RELEASES[EMULATED]), wrong
