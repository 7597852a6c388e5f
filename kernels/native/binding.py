"""ctypes binding of the native library, and the constants that Python and C++ share.

Installing the package on a machine with a C++ compiler builds the library beside this file. C++ defines the constants
of the kernels (runtime/constants.h), and Python reads them here.
"""

from __future__ import annotations

import ctypes
from pathlib import Path


def bind(path: Path) -> ctypes.CDLL:
    """Load the library at `path` and declare the types of its functions.

    Raises OSError for a library of another machine, ImportError for one of older sources.
    """
    lib = ctypes.CDLL(str(path))
    try:
        _bind_runtime(lib)
        _bind_lengths(lib)
    except AttributeError as error:
        raise ImportError(f"{path} is built from older sources: {error}; install the package again") from None
    return lib


def _bind_runtime(lib: ctypes.CDLL) -> None:
    """Declare the types of the functions of runtime/pool.h."""
    lib.npuserve_constant.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
    lib.npuserve_constant.restype = ctypes.c_char_p
    lib.npuserve_isa.restype = ctypes.c_char_p
    lib.npuserve_processor_isa.argtypes = (ctypes.c_int,)
    lib.npuserve_processor_isa.restype = ctypes.c_char_p
    lib.npuserve_source.restype = ctypes.c_char_p
    lib.npuserve_kernel.argtypes = (ctypes.c_char_p,)
    lib.npuserve_set_threads.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    lib.npuserve_set_threads.restype = ctypes.c_int
    lib.npuserve_run.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    lib.npuserve_run.restype = ctypes.c_int
    lib.npuserve_allocate.argtypes = (ctypes.c_size_t,)
    lib.npuserve_allocate.restype = ctypes.c_void_p
    lib.npuserve_reserve.argtypes = (ctypes.c_size_t,)
    lib.npuserve_reserve.restype = ctypes.c_void_p
    lib.npuserve_share.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t)
    lib.npuserve_share.restype = ctypes.c_int
    lib.npuserve_free.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    lib.npuserve_free.restype = None


def _bind_lengths(lib: ctypes.CDLL) -> None:
    """Declare the types of the functions of ascend/lengths.cpp."""
    pointer, integer, made = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p)
    lib.npuserve_lengths_call_bytes.restype = integer
    lib.npuserve_lengths_open.argtypes = (pointer, pointer, made)
    lib.npuserve_lengths_add.argtypes = (pointer, pointer, integer, made)
    lib.npuserve_lengths_put.argtypes = (pointer, pointer, pointer, integer, pointer, integer, integer)
    lib.npuserve_lengths_put.restype = None
    lib.npuserve_lengths_replayed.argtypes = (pointer, pointer, pointer)
    lib.npuserve_lengths_wait.argtypes = (pointer, integer, ctypes.c_char_p, integer)
    lib.npuserve_lengths_lags.argtypes = (pointer, pointer, integer)
    lib.npuserve_lengths_lags.restype = integer
    lib.npuserve_lengths_thread.argtypes = (pointer,)
    lib.npuserve_lengths_thread.restype = integer
    lib.npuserve_lengths_close.argtypes = (pointer,)
    lib.npuserve_lengths_close.restype = None


def _find() -> ctypes.CDLL | None:
    found = sorted(Path(__file__).parent.glob("libnpuserve*.so"))
    try:
        return bind(found[0]) if found else None
    except OSError:  # built for another machine
        return None


def _read_constants(lib: ctypes.CDLL) -> dict[str, int]:
    value = ctypes.c_int64()
    constants: dict[str, int] = {}
    while name := lib.npuserve_constant(len(constants), ctypes.byref(value)):
        constants[name.decode()] = value.value
    return constants


BINDING = _find()
"""The loaded library; None if it was not built or is for another machine."""

CONSTANTS = _read_constants(BINDING) if BINDING else {}
"""Constants of the library by name (runtime/constants.h); empty without the library."""

LANES = CONSTANTS.get("LANES", 1)
"""Columns of a panel of packed weights, and tokens of a panel of packed keys; 1 without the library, which packs
nothing then."""
