"""Compilation of the kernels in C++ by NVRTC, and their launches, through NVIDIA's cuda.bindings."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent


log = logging.getLogger(__name__)


@cache
def available() -> bool:
    """Return True if cuda.bindings and NVRTC can be used; log why not."""
    try:
        from cuda.bindings import nvrtc

        _checked(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:  # without the library, cuda.bindings raises RuntimeError
        log.warning("decode steps of few rows run kernel by kernel, which is slower: NVRTC cannot be used (%s); "
                    "pip install 'npuserve[cuda]'", error)
        return False
    return True


def kernel(name: str, constants: tuple[tuple[str, int], ...], device: torch.device, shared: int) -> Any:
    """Compile `name`.cu, and load the kernel of that name.

    constants: macros of the compilation.
    shared: bytes of shared memory of a block.

    Raises RuntimeError.
    """
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    code = machine_code(name, f"sm_{major}{minor}a", constants)
    library = _checked(driver.cuLibraryLoadData(code, None, None, 0, None, None, 0))
    made = _checked(driver.cuLibraryGetKernel(library, name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuKernelSetAttribute(attribute, shared, made, driver.CUdevice(device.index or 0)))
    return made


def launch(
    made: Any, device: torch.device, blocks: int, threads: int, shared: int, arguments: ctypes.Structure
) -> None:
    """Launch a kernel with one argument on the device's current stream. All its blocks run at the same time.

    Raises RuntimeError.
    """
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    cooperative = driver.CUlaunchAttribute()
    cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    cooperative.value.cooperative = 1
    config.attrs, config.numAttrs = [cooperative], 1
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    _checked(driver.cuLaunchKernelEx(config, driver.CUfunction(int(made)), ctypes.addressof(pointers), 0))


def machine_code(name: str, architecture: str, constants: tuple[tuple[str, int], ...]) -> bytes:
    """Return the cubin of `name`.cu. Triton's cache of compiled kernels keeps it for later processes.

    Raises RuntimeError with the compiler's messages.
    """
    from triton.runtime.cache import get_cache_manager

    options = [f"--gpu-architecture={architecture}", "--std=c++17", "-diag-suppress=128",
               *(f"-D{key}={value}" for key, value in constants)]
    sources = {path.name: path.read_bytes() for path in (FOLDER / f"{name}.cu", *sorted(FOLDER.glob("*.h")))}
    kept = get_cache_manager(hashlib.sha256(repr((sources, options, _version())).encode()).hexdigest())
    if path := kept.get_file(f"{name}.cubin"):
        return Path(path).read_bytes()
    code = _compiled(name, sources, options)
    kept.put(code, f"{name}.cubin", binary=True)
    return code


def _version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    major, minor = _checked(nvrtc.nvrtcVersion())
    return major, minor


def _compiled(name: str, sources: dict[str, bytes], options: list[str]) -> bytes:
    from cuda.bindings import nvrtc

    main, headers = f"{name}.cu", [file for file in sources if file.endswith(".h")]
    program = _checked(nvrtc.nvrtcCreateProgram(
        sources[main], main.encode(), len(headers), [sources[file] for file in headers],
        [file.encode() for file in headers]))
    (done,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if done != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        messages = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, messages))
        raise RuntimeError(f"{main} cannot be compiled: {messages.decode(errors='replace')[:2000]}")
    code = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the values of a call of cuda.bindings.

    Raises RuntimeError if it failed; the text of a driver's error is torch's, by which the backend knows faults.
    """
    from cuda.bindings import driver

    code = result[0]
    if isinstance(code, driver.CUresult) and code.value:
        _, text = driver.cuGetErrorString(code)
        raise RuntimeError(f"CUDA driver error: {text.decode() if text else code.name}")
    if code.value:
        raise RuntimeError(f"NVRTC: {code.name}")
    return result[1] if len(result) == 2 else result[1:]
