"""Registration of Triton kernels: triton is imported on the first call; these tests need no triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from npuserve.kernels.registry import KERNELS
from npuserve.kernels.triton import LOWERED

FOLDER = Path(__file__).parents[3] / "kernels" / "triton"


CODE = """if True:
    import json, os, sys
    import torch
    for first, variables in json.loads(sys.argv[1]):
        if not (child := os.fork()):
            os.environ.update(variables)
            exec(first)
            import npuserve.kernels
            from npuserve.kernels.registry import KERNELS
            found = [name for name, kernel in KERNELS.items() if "cuda" in kernel.implementations]
            print(json.dumps(found), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0"""
"""Program that imports torch once, and prints the kernels with a CUDA implementation in a process for each pair of a
statement and variables in its argument."""

INTERPRET = """if True:
    from npuserve.kernels import triton
    triton.interpret()
    triton.interpret()
    assert triton.DEVICE == "cpu" and triton.available()"""


@pytest.mark.slow
def test_kernels_are_registered_without_an_import_of_triton(tmp_path: Path) -> None:
    """By TRITON_INTERPRET or by `interpret`; not without a device."""
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    no_device = {"CUDA_VISIBLE_DEVICES": ""}
    cases = json.dumps([("", {"TRITON_INTERPRET": "1"}), (INTERPRET, no_device), ("", no_device)])
    done = subprocess.run([sys.executable, "-c", CODE, cases], env=environment | {"PYTHONPATH": paths},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_variable, by_call, without = map(json.loads, done.stdout.splitlines())
    assert {"greedy", "qk_norm_rope_kv_write", "sample"} <= set(by_variable)
    assert by_variable == by_call
    assert without == []


def test_lowered_files_exist() -> None:
    assert LOWERED.keys() <= KERNELS.keys()
    assert {f"{name}.py" for name in LOWERED.values()} <= {file.name for file in FOLDER.glob("*.py")}
