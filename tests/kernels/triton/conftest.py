"""Fixtures that run the Triton kernels without a device, interpreted and lowered, and a table of the results.

Both need TRITON_INTERPRET=1 and triton. Lowering also needs NPUSERVE_TRITON_ASCEND: a Python that has triton-ascend and
ascendnpu-ir. `.ci/triton` makes both environments and runs this folder.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.kernels.triton import needs_triton
from tests.kernels.triton.lowered import Built, Lowered

KERNELS = ("qk_norm_rope_kv_write_kernel", "conv_silu_kernel", "delta_gates_kernel", "delta_rule_kernel",
           "gated_rms_norm_kernel")
FACTS: dict[str, dict[str, Any]] = defaultdict(dict)
"""Kernel and case -> "interpreted" or "lowered" -> largest error; "built" -> the result of lowering."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if {"interpreted", "launch"} & set(getattr(item, "fixturenames", ())):
        item.add_marker(needs_triton)


@pytest.fixture(scope="session")
def interpreted() -> ModuleType:
    """The module that launches the kernels."""
    from npuserve.kernels.triton import launch_ascend

    return launch_ascend


@pytest.fixture(scope="session")
def stand_ins(interpreted: ModuleType) -> dict[str, Lowered]:
    """Stand-ins by the names of the kernels in the module that launches them."""
    python = os.environ.get("NPUSERVE_TRITON_ASCEND")
    if not python:
        pytest.skip("needs NPUSERVE_TRITON_ASCEND: see .ci/triton")
    return {name: Lowered(getattr(interpreted, name), python) for name in KERNELS}


@pytest.fixture
def lowered(
    interpreted: ModuleType, stand_ins: dict[str, Lowered], monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """The module that launches the kernels, with lowered stand-ins in their place."""
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(interpreted, name, stand_in)
    return interpreted


@pytest.fixture(params=["interpreted", "lowered"])
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def launch(way: str, request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.getfixturevalue(way)
    return module


@pytest.fixture
def note(way: str, launch: ModuleType) -> Callable[[str, float], None]:
    """A callback with (kernel and case, largest error) for the table."""

    def take(case: str, error: float) -> None:
        FACTS[case][way] = error
        kernel = getattr(launch, next(name for name in KERNELS if case.startswith(name.removesuffix("_kernel"))))
        if isinstance(kernel, Lowered):
            FACTS[case]["built"] = kernel.latest

    return take


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not FACTS:
        return
    write = terminalreporter.write_line
    write(f"\n{'kernel':62}{'interpreted':>12}{'lowered':>10}{'unified buffer':>18}{'executed':>10}   largest error: "
          "ids as a share of the mass, else absolute")
    for case, facts in FACTS.items():
        built: Built | None = facts.get("built")
        lowered = "to HIVM" if built else "no"
        buffer = f"{built.used // 8192} of {built.limit // 8192} KiB" if built else "-"
        errors = [f"{facts[way]:.1e}" if way in facts else "no" for way in ("interpreted", "lowered")]
        write(f"{case:62}{errors[0]:>12}{lowered:>10}{buffer:>18}{errors[1]:>10}")
