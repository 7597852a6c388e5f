"""Registration of Triton kernels: triton is imported on the first call; these tests need no triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npuserve.kernels.registry import KERNELS
from npuserve.kernels.triton import LOWERED

FOLDER = Path(__file__).parents[3] / "kernels" / "triton"


def registered(path: Path, first: str = "", **variables: str) -> list[str]:
    """Return the kernels with a CUDA implementation, in a process with `path` first in sys.path that runs `first`."""
    code = (f"{first}\n"
            "from npuserve.kernels.registry import KERNELS; import npuserve.kernels; "
            "print(*sorted(n for n, k in KERNELS.items() if 'cuda' in k.implementations))")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    paths = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", code], env=environment | {"PYTHONPATH": paths}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_registering_imports_no_triton(tmp_path: Path) -> None:
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    assert {"greedy", "qk_norm_rope_kv_write", "sample"} <= set(registered(tmp_path, TRITON_INTERPRET="1"))


@pytest.mark.slow
def test_nothing_is_registered_without_device(tmp_path: Path) -> None:
    assert registered(tmp_path, CUDA_VISIBLE_DEVICES="") == []


def test_lowered_files_exist() -> None:
    assert LOWERED.keys() <= KERNELS.keys()
    assert {f"{name}.py" for name in LOWERED.values()} <= {file.name for file in FOLDER.glob("*.py")}


@pytest.mark.slow
def test_waiting_kernels_are_registered_by_interpret(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise AssertionError('imported')\n")
    code = ("from npuserve.kernels import triton; triton.interpret(); triton.interpret(); "
            "assert triton.DEVICE == 'cpu' and triton.available()")
    assert {"greedy", "qk_norm_rope_kv_write", "sample"} <= set(registered(tmp_path, code, CUDA_VISIBLE_DEVICES=""))
