"""The kernel for Ascend compiled for CUDA by the published Triton, down to PTX, without a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from tests.kernels.triton import CACHE

COMPILE = """
import importlib.util, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

file, name, signature, constants = json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("kernel", file)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
types = signature | dict.fromkeys(constants, "constexpr")
source = ASTSource(getattr(module, name), {n: types[n] for n in getattr(module, name).arg_names}, constants)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(made.asm["ptx"])
"""
KERNELS = Path(__file__).parents[3] / "kernels" / "triton"
HEADS = {"qkv": "*bf16", "q_gamma": "*bf16", "k_gamma": "*bf16", "cos_sin": "*fp32", "positions": "*i64",
         "slot_mapping": "*i64", "k_cache": "*bf16", "v_cache": "*bf16", "q_out": "*bf16", "tokens": "i32",
         "eps": "fp32", "qkv_stride": "i64", "q_stride": "i64"}


def test_compiles_for_hopper(interpreted: ModuleType) -> None:
    name = "qk_norm_rope_kv_write"
    constants = {"Q_HEADS": 40, "KV_HEADS": 8, "HALF": 64, "HALF_BLOCK": 64, "HEADS": 32}
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    request = json.dumps([str(KERNELS / f"{name}.py"), f"{name}_kernel", HEADS, constants])
    done = subprocess.run([sys.executable, "-c", COMPILE], input=request, capture_output=True, text=True,
                          env=environment | {"TRITON_CACHE_DIR": str(CACHE)})
    assert done.returncode == 0, done.stderr
    assert f".entry {name}_kernel(" in done.stdout
