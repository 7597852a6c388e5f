"""Emulated NPU: the published torch_npu runs on emulated CANN libraries, on a machine without an NPU.

    emulator.activate(memory=4 << 30)      # before torch_npu is imported
    import torch_npu                       # provides the device npu:0

It checks calls and numerical results, not speed. Device memory is host memory. Streams are queues run by one thread.
Operators run through ATen in float32. Races are real: a stream runs only when a caller waits for it, so a missing wait
yields wrong data (see `activate`). Calls that a device refuses are refused. Calls that are not emulated fail with an
error that names them.

`activate` registers the backend `EmulatedAscend` in place of the device's. The libraries are built on demand
(build.py): libascendcl from runtime/, libhccl from hccl/, libopapi and libopapi_transformer from ops/. Environment
variables: EMULATED_CANN is the version of CANN, which decides what operators there are (absent.py), by default 9.1.0;
EMULATED_CANN_WITHOUT names operators that it lacks besides; with EMULATED_NPU_LOG torch_npu logs to stderr.

The machine has 8 devices, of which a process uses one. Processes communicate by HCCL through memory that they share. A
device also runs its part of a collective when another device waits for it. Imports of `npu`: `backends`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from npuserve.npu.backends import register_emulated
from npuserve.npu.backends.base import BackendError
from npuserve.npu.emulator.absent import VERSIONS
from npuserve.npu.emulator.backend import EmulatedAscend
from npuserve.npu.emulator.build import STUBS, EmulatorError, libraries, operator_library
from npuserve.npu.emulator.profiler import TaskProfiler
from npuserve.npu.large_import import import_large

__all__ = ["DEFECTS", "Call", "EmulatorError", "Memory", "Task", "activate", "active", "calls", "clear_calls",
           "defects", "emulate", "fail", "faults", "hang", "heal", "limit", "log_tasks", "lose_device", "mark",
           "memory", "operators", "pending", "preload", "relaxations", "tasks"]

log = logging.getLogger(__name__)

RELAXATIONS = ("fp32", "small_heads")
"""Checks of the device that can be relaxed, for small models and exact comparisons."""

DEFECTS = {
    "context_split": "in a replay, attention reads the first 512 tokens alone of contexts of 1,024 tokens or more",
    "expert_places": "the sum of a token's experts takes the rows before theirs",
    "lost_update": "every 15th update of a captured call keeps the arguments before it",
    "wide_product": "columns from 65,536 on of a product are 0",
    "wide_int8_product": "columns from 65,536 on of an int8 product are 0",
    "shifted_columns": "columns from 1,024 on of an int8 product are those before them",
    "wrong_column": "column 1,500 of an int8 product is the one before it",
    "column_scales": "an int8 product uses the weight scale of the column before",
    "row_scales": "npu_dynamic_quant returns the scale of the first row for all rows",
    "antiquant_heads": "attention over an int8 cache uses the scales of the first head for all heads",
    "top_k": "npu_top_k_top_p ignores top_k",
    "large_update": "attention needs eight times the workspace from now on, so also in updates of captured calls",
}
"""Defects of operators, which compute wrong numbers without an error: tests show that a check finds them."""

Order = Literal["lazy", "eager", "shuffled"]


class Call(NamedTuple):
    """Host API call, or a mark, whose name begins with "# ". thread: as threading.get_native_id()."""

    name: str
    thread: int


class Task(NamedTuple):
    """Operator or copy that the device ran, also of a replayed graph. stream: its number, new for each replay."""

    name: str
    stream: int


class Memory(NamedTuple):
    """Bytes of device memory in use, their peak, and bytes of pinned host memory."""

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
    triton: bool = False


_library: ctypes.CDLL | None = None
_options: _Options | None = None
_ORDERS: tuple[Order, ...] = ("lazy", "eager", "shuffled")


def _check(options: _Options) -> None:
    """Raise EmulatorError if an option is out of range."""
    if options.memory < 64 << 20:
        raise EmulatorError(f"emulated NPU: memory must be 64 MiB or more, not {options.memory} bytes")
    if unknown := options.relax - set(RELAXATIONS):
        raise EmulatorError(f"emulated NPU: relax must be of {', '.join(RELAXATIONS)}, "
                            f"not {', '.join(sorted(unknown))}")
    if options.order not in _ORDERS:
        raise EmulatorError(f"emulated NPU: order must be one of {', '.join(_ORDERS)}, not {options.order}")
    if options.depth < 1:
        raise EmulatorError(f"emulated NPU: depth must be 1 or more, not {options.depth}")


def activate(
    *, memory: int = 0, relax: Iterable[str] = (), order: Order = "lazy", seed: int = 0, depth: int = 4096,
    poison: bool = False, triton: bool = False,
) -> None:
    """Load the emulated CANN into this process, building it if necessary, so that `import torch_npu` finds it.

    memory: bytes of device memory, at least 64 MiB. Host memory is allocated on first use. 0 takes the environment
        variable EMULATED_NPU_GIB, a whole number of GiB, default 4.
    relax: checks of the device to omit:
        - "fp32": accept fp32 where a device accepts only fp16 and bf16.
        - "small_heads": accept attention heads of other sizes.
    order: order of the streams' tasks:
        - "lazy": a stream runs when a caller waits for it, only as far as necessary, in a deterministic order.
        - "eager": each stream runs as soon as possible on its own thread, concurrently with the host.
        - "shuffled": streams run ahead at random with each submission, reproducibly for the same seed.

    depth: tasks that a stream holds before a submission blocks on the oldest.
    poison: fill new device memory with NaN.
    triton: behave as if triton-ascend were installed, with stand-ins for its kernels.

    Raises EmulatorError if torch_npu or a compiler is missing, torch and torch_npu do not match, or torch_npu was
    imported before. A second call with the same options has no effect; with other options it raises.
    """
    global _options
    if not memory:
        named = os.environ.get("EMULATED_NPU_GIB", "4")
        if not re.fullmatch(r"[1-9]\d{0,3}", named):
            raise EmulatorError(f"emulated NPU: EMULATED_NPU_GIB must be a number from 1 to 9999, not {named}")
        memory = int(named) << 30
    options = _Options(memory, frozenset(relax), order, seed, depth, poison, triton)
    _check(options)
    if _options is not None:
        if _options != options:
            raise EmulatorError("emulated NPU: it is active with other options; a process has one")
        return
    library = _load()
    library.emu_memory(ctypes.c_uint64(memory), int(poison))
    library.emu_order(_ORDERS.index(order), ctypes.c_uint64(seed), ctypes.c_uint64(depth))
    for name in options.relax:
        library.emu_relax(name.encode())
    _options = options
    EmulatedAscend.relaxations = options.relax
    EmulatedAscend.triton = triton
    if "fp32" in options.relax:
        EmulatedAscend.capabilities = replace(EmulatedAscend.capabilities, explicit_dtypes=("float32",))
    EmulatedAscend.new_profiler = lambda: TaskProfiler(log_tasks, tasks)
    register_emulated(EmulatedAscend)
    relaxed = f"; relaxed: {', '.join(sorted(options.relax))}" if options.relax else ""
    log.warning("emulated NPU: proves calls and numbers, not speed (%d MiB, %s order%s)", memory >> 20, order, relaxed)


def preload() -> None:
    """Load the emulated CANN and torch_npu, so that processes forked from this one only need to `activate`.

    This process itself must not use the device, whose threads do not survive a fork. Raises as `activate`.
    """
    _load()
    import_large("torch_npu")


def _load() -> ctypes.CDLL:
    """Load the libraries, building them if necessary; once per process."""
    global _library
    if _library is not None:
        return _library
    if "torch_npu" in sys.modules:
        raise EmulatorError("emulated NPU: torch_npu was imported before; activate the emulator first")
    cann = os.environ.get("EMULATED_CANN", "9.1.0")
    if cann not in VERSIONS:
        raise EmulatorError(f"emulated NPU: EMULATED_CANN must be one of {', '.join(VERSIONS)}, not {cann}")
    folder = libraries(cann, os.environ.get("EMULATED_CANN_WITHOUT", "").split())
    # torch would import torch_npu automatically, before CANN is loaded.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # Where torch_npu finds the names of further libraries of operators. It checks that both folders exist.
    os.environ |= {"ASCEND_HOME_PATH": str(folder), "ASCEND_OPP_PATH": str(folder / "opp")}
    import torch  # noqa: F401  the operators are linked against it

    library = ctypes.CDLL(str(folder / "libascendcl.so"), ctypes.RTLD_GLOBAL)
    for name in ("libopapi", *STUBS):
        ctypes.CDLL(str(folder / f"{name}.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / "lib64" / "libopapi_transformer.so"))  # torch_npu opens it by its name alone
    for function in ("calls", "calls_kept", "tasks", "memory_used", "memory_peak", "pinned", "pending"):
        getattr(library, f"emu_{function}").restype = ctypes.c_uint64
    library.emu_inject.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
    _library = library
    return library


def emulate(relax: Sequence[str] = ()) -> None:
    """Activate the emulator with default options. Raises BackendError if that fails."""
    if unknown := set(relax) - set(RELAXATIONS):
        raise BackendError(f"emulate_relax: must be of {', '.join(RELAXATIONS)}, got {', '.join(sorted(unknown))}")
    try:
        activate(relax=tuple(relax))
    except (RuntimeError, OSError, ValueError) as error:
        raise BackendError(f"emulate: {error}") from error


def active() -> bool:
    """Return True after `activate`."""
    return _options is not None


def relaxations() -> frozenset[str]:
    """Return the relaxations given to `activate`; empty if the emulator is not active."""
    return _options.relax if _options else frozenset()


def _lib() -> ctypes.CDLL:
    if _library is None or _options is None:
        raise EmulatorError("emulated NPU: not active in this process; call activate first")
    return _library


def calls() -> list[Call]:
    """Return host API calls and marks since `clear_calls`, oldest first; of more than 262144 only the latest."""
    lib = _lib()
    none = ctypes.c_uint64(0)
    count: int = lib.emu_calls(none, none, None, None)
    start = max(0, count - lib.emu_calls_kept())
    names = (ctypes.c_char_p * (count - start))()
    threads = (ctypes.c_int64 * (count - start))()
    lib.emu_calls(ctypes.c_uint64(start), ctypes.c_uint64(count - start), names, threads)
    return [Call(name.decode(), thread) for name, thread in zip(names, threads, strict=True)]


def clear_calls() -> None:
    """Clear the call log."""
    _lib().emu_clear_calls()


def log_tasks(on: bool) -> None:
    """Start the log of the tasks that the device runs, empty, or end it."""
    _lib().emu_log_tasks(int(on))


def tasks() -> list[Task]:
    """Return the tasks since `log_tasks(True)`, oldest first; at most 262144."""
    lib = _lib()
    count: int = lib.emu_tasks(ctypes.c_uint64(0), None, None)
    names = (ctypes.c_char_p * count)()
    streams = (ctypes.c_int64 * count)()
    lib.emu_tasks(ctypes.c_uint64(count), names, streams)
    return [Task(name.decode(), stream) for name, stream in zip(names, streams, strict=True)]


def mark(text: str) -> None:
    """Append "# text" to the call log."""
    _lib().emu_mark(f"# {text}".encode())


def operators() -> dict[str, Any]:
    """Return the emulated operators and the documented constraints that they check.

    {"operators": {name: source file}, "rules": [{"operators": [names], "id":, "text":, "source":}]}
    """
    _lib()
    table: dict[str, Any] = {"operators": {}, "rules": []}
    for library in (operator_library(), operator_library("libopapi_transformer.so")):
        library.emuOperators.restype = ctypes.c_char_p
        part = json.loads(library.emuOperators())
        table["operators"] |= part["operators"]
        known = {rule["id"] for rule in table["rules"]}
        table["rules"] += [rule for rule in part["rules"] if rule["id"] not in known]  # both check handles of tensors
    return table


def memory() -> Memory:
    """Return the memory allocated on the device and pinned on the host."""
    lib = _lib()
    return Memory(lib.emu_memory_used(), lib.emu_memory_peak(), lib.emu_pinned())


def pending() -> int:
    """Return the number of submitted tasks that have not run."""
    count: int = _lib().emu_pending()
    return count


def limit(*, streams: int = 2048, events: int = 65536) -> None:
    """Set the device's number of streams and of events. The defaults are those of a device.

    streams: created ones, and those of graphs: one for each 2,016 tasks of each captured stream. Sources:
        aclrtCreateStream of CANN 8.0 and vllm-ascend#8585 (2,048; A3 has 1,984).
    events: recorded at least once and not destroyed (aclrtCreateEvent of CANN 8.5). External events are none, since
        torch_npu waits for values in device memory.
    """
    _lib().emu_limits(ctypes.c_uint64(streams), ctypes.c_uint64(events))


def fail(what: str, code: int, *, nth: int = 1, times: int = 1) -> None:
    """Make the `nth` call from now, and the `times - 1` calls after it (-1: all), return an ACL error code.

    what: one of the following, or a shell pattern of function names, e.g. "aclnnMatmul*".
        - "malloc": allocation of device memory. "malloc_host": of host memory. "memcpy": copies.
        - "launch": any submission to a stream.
        - "synchronize": synchronization of a stream, an event or the device.
        - "task": the device fails while running a task. The next synchronization returns the code.
    """
    if nth < 1 or times < -1:
        raise ValueError(f"nth must be 1 or more and times -1 or more, not {nth} and {times}")
    _lib().emu_inject(what.encode(), nth, times, code)


def hang(*, nth: int = 1) -> None:
    """Block the `nth` task submitted from now, and its stream behind it, until `heal`."""
    _lib().emu_inject(b"hang", nth, 1, 1)


LOST_HEARTBEAT = 507010
"""ACL_ERROR_RT_LOST_HEARTBEAT: the device's task scheduler does not respond."""


def lose_device(code: int = LOST_HEARTBEAT) -> None:
    """Fail every operation that needs the device, until `heal`."""
    for what in ("malloc", "memcpy", "launch", "synchronize", "task"):
        fail(what, code, times=-1)


def heal() -> None:
    """Remove all injected faults and release blocked streams. A stream that has failed stays failed."""
    _lib().emu_heal()


@contextmanager
def faults() -> Iterator[None]:
    """Remove on exit the faults injected within the context."""
    try:
        yield
    finally:
        heal()


@contextmanager
def defects(*names: str) -> Iterator[None]:
    """Give the device these DEFECTS within the context. Raises ValueError for an unknown name."""
    if unknown := set(names) - DEFECTS.keys():
        raise ValueError(f"unknown defects {', '.join(sorted(unknown))}; there are {', '.join(DEFECTS)}")
    for name in names:
        _lib().emu_defect(name.encode())
    try:
        yield
    finally:
        _lib().emu_repair()
