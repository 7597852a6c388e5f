"""Emulated NPU: the published torch_npu runs on CANN libraries of this package, on a machine without an NPU.

    emulator.activate(memory=4 << 30)      # before torch_npu is imported
    import torch_npu                       # there is a device npu:0 now

It proves calls and numbers, not speed: device memory is host memory, streams are queues that one thread runs, and
operators run through ATen in float32. Races are real: a stream runs only while the host waits for it, so a missing wait
gives wrong data (see `activate`). Calls that a device refuses are refused; calls that are not emulated fail by name.

build.py builds the libraries on demand. C++: runtime/ is libascendcl, ops/ is libopapi. torch_npu's own log goes to
stderr if EMULATED_NPU_LOG is set.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from npuserve.npu.emulator.build import STUBS, EmulatorError, libraries

__all__ = ["Call", "EmulatorError", "Memory", "activate", "active", "calls", "clear_calls", "fail", "faults", "hang",
           "heal", "lose_device", "mark", "memory", "pending", "relaxations"]

log = logging.getLogger(__name__)

RELAXATIONS = ("fp32", "small_heads")
"""Restrictions of a device that may be lifted, for small models and exact comparisons."""

Order = Literal["lazy", "eager", "shuffled"]


class Call(NamedTuple):
    """Host API call. thread: as threading.get_native_id(). The name of a mark begins with "# "."""

    name: str
    thread: int


class Memory(NamedTuple):
    """Bytes of device memory in use, their maximum so far, and bytes of pinned host memory."""

    used: int
    peak: int
    pinned: int


@dataclass(frozen=True)
class _Options:
    memory: int
    relax: frozenset[str]
    order: Order
    seed: int
    depth: int
    poison: bool


_library: ctypes.CDLL | None = None
_options: _Options | None = None
_ORDERS: tuple[Order, ...] = ("lazy", "eager", "shuffled")


def activate(
    *, memory: int = 0, relax: Iterable[str] = (), order: Order = "lazy", seed: int = 0, depth: int = 4096,
    poison: bool = False,
) -> None:
    """Load the emulated CANN into this process so that `import torch_npu` finds it; build it first if necessary.

    memory: bytes of device memory, at least 64 MiB; host memory is used as it is touched. 0: the environment's
        EMULATED_NPU_GIB, a whole number of GiB, or 4 GiB if it is not set.
    relax: lifted restrictions: "fp32" (float32 where a device takes only fp16 and bf16), "small_heads" (attention heads
        of other sizes).
    order: "lazy": a stream runs only while the host waits for it, only as far as needed, and deterministically;
        "eager": on its own thread as soon as possible, beside the host; "shuffled": with each submission streams run
        ahead at random, deterministically for a seed.
    depth: tasks of a stream before a submission waits for the oldest.
    poison: fill new device memory with NaN.

    Raises EmulatorError if torch_npu or a compiler is missing, torch and torch_npu do not match, or torch_npu was
    imported before. A second call with equal options has no effect; with other options it raises.
    """
    global _library, _options
    if not memory:
        named = os.environ.get("EMULATED_NPU_GIB", "4")
        if not re.fullmatch(r"[1-9]\d{0,3}", named):
            raise EmulatorError(f"emulated NPU: EMULATED_NPU_GIB must be a number from 1 to 9999, not {named}")
        memory = int(named) << 30
    options = _Options(memory, frozenset(relax), order, seed, depth, poison)
    if memory < 64 << 20:
        raise EmulatorError(f"emulated NPU: memory must be 64 MiB or more, not {memory} bytes")
    if unknown := options.relax - set(RELAXATIONS):
        raise EmulatorError(f"emulated NPU: relax must be of {', '.join(RELAXATIONS)}, "
                            f"not {', '.join(sorted(unknown))}")
    if order not in _ORDERS:
        raise EmulatorError(f"emulated NPU: order must be one of {', '.join(_ORDERS)}, not {order}")
    if depth < 1:
        raise EmulatorError(f"emulated NPU: depth must be 1 or more, not {depth}")
    if _options is not None:
        if _options != options:
            raise EmulatorError("emulated NPU: it is active with other options; a process has one")
        return
    if "torch_npu" in sys.modules:
        raise EmulatorError("emulated NPU: torch_npu was imported before; activate the emulator first")
    folder = libraries()
    # Otherwise torch imports torch_npu itself, before there is a CANN.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch  # noqa: F401  the operators are linked to it

    library = ctypes.CDLL(str(folder / "libascendcl.so"), ctypes.RTLD_GLOBAL)
    library.emu_memory(ctypes.c_uint64(memory), int(poison))
    library.emu_order(_ORDERS.index(order), ctypes.c_uint64(seed), ctypes.c_uint64(depth))
    for name in options.relax:
        library.emu_relax(name.encode())
    for name in ("libopapi", *STUBS):
        ctypes.CDLL(str(folder / f"{name}.so"), ctypes.RTLD_GLOBAL)
    for function in ("calls", "calls_kept", "memory_used", "memory_peak", "pinned", "pending"):
        getattr(library, f"emu_{function}").restype = ctypes.c_uint64
    library.emu_inject.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
    _library, _options = library, options
    relaxed = f"; relaxed: {', '.join(sorted(options.relax))}" if options.relax else ""
    log.warning("emulated NPU: proves calls and numbers, not speed (%d MiB, %s order%s)", memory >> 20, order, relaxed)


def active() -> bool:
    """Return True once `activate` has loaded the emulator."""
    return _library is not None


def relaxations() -> frozenset[str]:
    """Return the relaxations of `activate`; none if the emulator is not active."""
    return _options.relax if _options else frozenset()


def _lib() -> ctypes.CDLL:
    if _library is None:
        raise EmulatorError("emulated NPU: not active in this process; call activate first")
    return _library


def calls() -> list[Call]:
    """Return the host API calls since `clear_calls` and the marks between them, oldest first; at most the last
    262144."""
    lib = _lib()
    none = ctypes.c_uint64(0)
    count: int = lib.emu_calls(none, none, None, None)
    start = max(0, count - lib.emu_calls_kept())
    names, threads = (ctypes.c_char_p * (count - start))(), (ctypes.c_int64 * (count - start))()
    lib.emu_calls(ctypes.c_uint64(start), ctypes.c_uint64(count - start), names, threads)
    return [Call(name.decode(), thread) for name, thread in zip(names, threads, strict=True)]


def clear_calls() -> None:
    """Clear the call log."""
    _lib().emu_clear_calls()


def mark(text: str) -> None:
    """Add "# text" to the call log."""
    _lib().emu_mark(f"# {text}".encode())


def memory() -> Memory:
    """Return the memory in use."""
    lib = _lib()
    return Memory(lib.emu_memory_used(), lib.emu_memory_peak(), lib.emu_pinned())


def pending() -> int:
    """Return the number of tasks that were submitted and have not run."""
    count: int = _lib().emu_pending()
    return count


def fail(what: str, code: int, *, nth: int = 1, times: int = 1) -> None:
    """Make the `nth` call from now, and the `times - 1` after it (-1: all), return an ACL error code.

    what: "malloc" (device memory), "malloc_host", "memcpy", "launch" (every submission to a stream), "synchronize" (of
    a
        stream, an event or the device), "task" (the device fails during the task; the next synchronization reports it),
        or a shell pattern of functions, e.g. "aclnnMatmul*".
    """
    if nth < 1 or times < -1:
        raise ValueError(f"nth must be 1 or more and times -1 or more, not {nth} and {times}")
    _lib().emu_inject(what.encode(), nth, times, code)


def hang(*, nth: int = 1) -> None:
    """Make the `nth` task submitted from now, and all tasks behind it in its stream, hang until `heal`."""
    _lib().emu_inject(b"hang", nth, 1, 1)


LOST_HEARTBEAT = 507010
"""ACL_ERROR_RT_LOST_HEARTBEAT: the device's task scheduler does not answer."""


def lose_device(code: int = LOST_HEARTBEAT) -> None:
    """Make all calls that need the device fail until `heal`."""
    for what in ("malloc", "memcpy", "launch", "synchronize", "task"):
        fail(what, code, times=-1)


def heal() -> None:
    """Clear all faults and release hanging tasks. A failed stream stays failed."""
    _lib().emu_heal()


@contextmanager
def faults() -> Iterator[None]:
    """Remove the faults injected in the body when it ends."""
    try:
        yield
    finally:
        heal()
