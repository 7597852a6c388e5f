"""Lowering of a Triton kernel for an Ascend NPU as far as the published compilers go, and to this processor.

Run it with a Python that has triton-ascend and ascendnpu-ir; torch and npuserve are not needed:

    python lowering.py FOLDER < request.json > answer.json

request: {file, function, signature: {argument: type in Triton's notation}, constants: {argument: value}}.
answer: {used, limit: bits of the unified buffer, stopped: true if the compiler reached the step that needs CANN}, with
kernel.so in FOLDER; or {error: message of a compiler}.

triton-ascend converts the kernel to its adapter IR (linalg on tensors, memory as memref). Two compilers lower this IR:

- bishengir-compile, to HIVM: the NPU's operations in a planned unified buffer. It stops before hivmc, which only CANN
  has.
- bishengir-opt, with upstream MLIR passes, to LLVM and machine code of this processor. Its results are compared.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ascendnpuir
from triton._C.libtriton import ir, llvm
from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(ascendnpuir.__file__).parent / "bin"
CHIP = "Ascend910B4"

# The flags of triton-ascend for the chips of this generation, with the plan of the unified buffer.
HIVM = ("--enable-auto-multi-buffer=true", "--enable-auto-bind-sub-block=true", "--enable-hfusion-compile=true",
        "--enable-hivm-compile=true", "--enable-triton-kernel-compile=true", "--enable-memory-display")
NO_HIVMC = "External hivmc run fails, returning module before running external compiler"

# Memory comes from the tests' own allocator (runtime.cpp), which is emptied after each program.
LLVM = ("--convert-elementwise-to-linalg", "--one-shot-bufferize=allow-return-allocs-from-loops=true",
        "--convert-linalg-to-loops", "--lower-affine", "--convert-scf-to-cf", "--arith-expand=include-bf16=true",
        "--memref-expand", "--expand-strided-metadata", "--lower-affine", "--convert-cf-to-llvm",
        "--convert-math-to-llvm", "--convert-arith-to-llvm", "--finalize-memref-to-llvm=use-generic-functions=true",
        "--convert-func-to-llvm", "--reconcile-unrealized-casts")


class Refused(Exception):
    """Error with a compiler's message."""


def adapter_ir(request: dict[str, Any]) -> str:
    file = Path(request["file"])
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = GPUTarget("npu", CHIP, 0)
    backend = AscendBackend(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    source = ASTSource(getattr(module, request["function"]), request["signature"], request["constants"])
    made = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"target": target, **options.__dict__}
    try:
        return ttir_to_linalg(make_ttir(made, metadata, options), metadata, options, named_ops=True)
    except subprocess.CalledProcessError as error:
        raise Refused(error.stderr.decode()) from None


def to_hivm(adapter: str, folder: Path) -> dict[str, Any]:
    """Return the compiler's plan: `used` and `limit` in bits, `stopped`. Raises Refused."""
    (folder / "hivm.mlir").write_text(re.sub(r', mix_mode = "\w+"', "", adapter))
    plan, lowered = folder / "memory_info_aiv.json", folder / "module.hivm.opt.mlir"
    for old in (plan, lowered):
        old.unlink(missing_ok=True)
    done = subprocess.run([TOOLS / "bishengir-compile", "hivm.mlir", f"--target={CHIP}", *HIVM,
                           f"--save-temps={folder}", "-o", "kernel"], cwd=folder, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if " error: " in line]
    stopped = bool(errors) and all(NO_HIVMC in line for line in errors)
    if (done.returncode and not stopped) or not lowered.exists():
        raise Refused(done.stderr)
    (record,) = json.loads(plan.read_text())["Record"]
    (limit,) = set(re.findall(r'"UB_SIZE", (\d+)', lowered.read_text()))
    ends = [8 * offset + buffer["extent"] for buffer in record["memory_info_array"] for offset in buffer["offset"]]
    return {"used": max(ends), "limit": int(limit), "stopped": stopped}


def to_processor(adapter: str, folder: Path) -> None:
    """Write kernel.so to the folder. Raises Refused."""
    (folder / "adapter.mlir").write_text(adapter)
    run([TOOLS / "bishengir-opt", "adapter.mlir", *LLVM, "-o", "llvm.mlir"], folder)
    context = ir.context()
    ir.load_dialects(context)
    llvm.init_targets()
    module = llvm.to_module(ir.parse_mlir_module(str(folder / "llvm.mlir"), context), llvm.context())
    triple = f"{platform.machine()}-unknown-linux-gnu"
    llvm.attach_datalayout(module, triple, "", "")
    llvm.optimize_module(module, llvm.OPTIMIZE_O2)
    (folder / "kernel.o").write_bytes(llvm.translate_to_asm(str(module), triple, "", "", [], False, True))
    run([os.environ.get("CXX", "c++"), "-O2", "-shared", "-fPIC", "kernel.o", Path(__file__).with_name("runtime.cpp"),
         "-o", "kernel.so"], folder)


def run(command: list[str | Path], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise Refused(done.stderr)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    try:
        adapter = adapter_ir(json.load(sys.stdin))
        answer = to_hivm(adapter, folder)
        to_processor(adapter, folder)
    except Refused as refused:
        answer = {"error": str(refused)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
