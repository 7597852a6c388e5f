"""Operators that run on the emulated device equal those found in the sources, and their page is up to date."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
import torch

from npuserve.npu.backends.ascend.functions import NEEDED
from tests.npu.compatibility.calls import Use, our_uses
from tests.npu.compatibility.record import Calls, Recorded, recorded
from tests.npu.compatibility.release import EMULATED, VERSIONS, Release, operator, problems
from tests.npu.compatibility.table import PAGE, page, ran, read_ran

RELEASES = [Release.load(version) for version in VERSIONS]


@pytest.fixture(scope="module")
def run() -> Recorded:
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed: pip install 'npuserve[npu]'")
    return recorded()


def test_record_every_kernel_runs_emulated(run: Recorded) -> None:
    assert not run.failed
    asked = {name for calls in run.operators.values() for name in calls.functions if name.startswith("aclnn")}
    assert asked <= set(run.emulated["operators"])
    assert len(asked) > 20


def test_record_functions_equal_data(run: Recorded) -> None:
    version = importlib.metadata.version("torch_npu")
    assert ran(run) == read_ran()[version], "run python -m tests.npu.compatibility.table --write"


def test_functions_needed_at_the_start_are_those_that_ran() -> None:
    """A start refuses a CANN that lacks one of them; models of floats without linear attention need no others."""
    of_quantized = ("quant", "format_cast", "scatter_nd")
    used = [{name for path, names in each.items() if not any(word in path for word in of_quantized) for name in names}
            for each in read_ran().values()]
    others = {f"aclnn{name}" for name in (
        "RopeWithSinCosCacheV2", "RecurrentGatedDeltaRule", "ChunkGatedDeltaRule", "Addcmul", "ClampMax", "InplaceZero",
        "Neg", "NeTensor", "RepeatInterleaveIntWithDim", "Sigmoid", "Silu", "Softplus")}
    assert {f"aclnn{name}" for name in NEEDED.split()} == set.intersection(*used) - others


def test_record_schemas_equal_wheel(run: Recorded) -> None:
    release = Release.load(importlib.metadata.version("torch_npu"))
    assert release.operators
    for name, texts in release.operators.items():
        registered = {s for s in run.registered if s.split("(")[0].split(".")[0] == name}
        assert {str(torch._C.parse_schema(f"npu::{text}")) for text in texts} == registered


def test_record_operators_are_found_in_sources(run: Recorded) -> None:
    seen = {operator(use.path) for use in our_uses()}
    ran = {operator(path) for path in run.operators if path.startswith("npu::")}
    assert ran <= seen
    assert {"npu::npu_rms_norm", "npu::npu_swiglu"} <= ran


def test_record_calls_fit_every_version(run: Recorded) -> None:
    """The types of all arguments are checked, literal or not."""
    found = [Use("a run:0", path, True, tuple(positional), tuple(keywords.items()))
             for path, calls in run.operators.items() if path.startswith("npu::")
             for positional, keywords in calls.calls]
    assert len(found) > 5
    emulated = next(release for release in RELEASES if release.version == EMULATED)
    assert not [problem for release in RELEASES for problem in problems(found, release, emulated)]


def test_page_is_up_to_date(run: Recorded) -> None:
    others = read_ran()
    others.pop(EMULATED)
    if importlib.metadata.version("torch_npu") != EMULATED:
        pytest.skip(f"the page is generated with torch_npu {EMULATED}")
    new = page(our_uses(), run, RELEASES, others)
    assert PAGE.read_text() == new, "run python -m tests.npu.compatibility.table --write"


def test_page_shows_missing_values() -> None:
    """An operator is missing in one version, was never run and has no constraint."""
    schema = "npu_x(Tensor x) -> Tensor"
    has, lacks = (Release(version, "", "", {"npu::npu_x": texts}, {"torch_npu.npu.y": arguments})
                  for version, texts, arguments in (("2.13.0", [schema], ""), ("2.14.0", [], None)))
    update = "torch_npu.npu.NPUGraph().update"
    for release in (has, lacks):
        release.python[update] = "cpu_update_input"
    found = [Use("npu/a.py:1", "npu::npu_x", True, ("Tensor",)), Use("npu/a.py:2", "torch_npu.npu.y"),
             Use("npu/a.py:3", update, True, ("list",), keys=("x",))]
    run = Recorded({"aten::add.Tensor": Calls(["aclnnAdd"])}, {"qk_norm_rope_kv_write": ["aten::add.Tensor"]}, {},
                   {"operators": {"aclnnAdd": "a.cpp"}, "rules": [{"operators": ["aclnnAdd", "aclnnB"]}]})
    made = page(found, run, [has, lacks], {"2.10.0": {"npu::npu_x": ["X"], "aten::add": ["aclnnAdd"]}, "2.11.0": {}})
    assert "| `npu::npu_x` | `npu/a.py` | 2.13.0 | 2.10.0: `X` |  |  |" in made
    assert "| `torch_npu.npu.y` | `npu/a.py` | 2.13.0 |" in made
    assert f"| `{update}` | `npu/a.py` | 2.13.0 |" in made
    assert ("| `aten::add` | `qk_norm_rope_kv_write` | `aclnnAdd`; 2.11.0: not called | 1 | `qk_norm_rope_kv_write` |"
            in made)
