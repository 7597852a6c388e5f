"""Parts that are read from the machine: commands, files, versions. Each is bounded in bytes and time."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from npuserve.cli.collect.archive import Part

MAX_OUTPUT_BYTES = 1 << 20
MAX_ERROR_BYTES = 2000
"""Maximum length of the kept end of a failed command's stderr."""
MAX_LOG_BYTES = 1 << 20
"""Maximum length of the kept end of one file of CANN's log."""
MAX_LOGS_BYTES = 16 << 20

NPU_COMMANDS: dict[str, tuple[str, ...]] = {
    "npu-smi/info": ("npu-smi", "info"),
    "npu-smi/mapping": ("npu-smi", "info", "-m"),
    "npu-smi/topology": ("npu-smi", "info", "-t", "topo"),
}
PER_NPU = ("health", "board", "usages", "memory", "ecc")
"""Reports of npu-smi (`info -t REPORT -i NPU`) for each NPU."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "host/lscpu": ("lscpu",),
    "host/numa": ("numactl", "--hardware"),
}
GPU_COMMANDS: dict[str, tuple[str, ...]] = {"host/nvidia-smi": ("nvidia-smi",)}
FILES = ("/etc/os-release", "/proc/meminfo", "/proc/sys/kernel/numa_balancing",
         "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/cpuset.cpus.effective")
NPU_FILES = ("/etc/ascend_install.info",)
NPU_PATTERNS = ("/usr/local/Ascend/driver/version.info", "/usr/local/Ascend/firmware/version.info",
                "/usr/local/Ascend/*/*-linux/ascend_toolkit_install.info",
                "/usr/local/Ascend/ascend-toolkit/*/*-linux/ascend_toolkit_install.info")


def run(
    command: Sequence[str], seconds: float, max_bytes: int = MAX_OUTPUT_BYTES, environ: Mapping[str, str] = os.environ
) -> Part:
    """Run a command and return its stdout, and stderr if it fails. It is killed after `seconds`, and at `max_bytes`."""
    program = shutil.which(command[0])
    if program is None:
        return Part(b"", "missing", f"no program {command[0]}")
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    # The exception of a signal within Popen would lose the process.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        process = subprocess.Popen([program, *command[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=errors, start_new_session=True, env={**environ, "LC_ALL": "C"},
                                   preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask))
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return Part(b"", "failed", error.strerror or str(error))
    assert process.stdout
    is_whole = False
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        data, is_late = _read(process.stdout.fileno(), seconds, max_bytes)
        is_whole = not is_late and len(data) <= max_bytes
    finally:
        if not is_whole:  # also after Ctrl-C
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    process.stdout.close()
    try:
        code = process.wait(1)
    except subprocess.TimeoutExpired:  # it closed its output, or a driver blocks it
        process.kill()
        code = -1
        is_late = True
    if is_late:
        return Part(data[:max_bytes], "timeout", f"killed after {seconds:g} s")
    if len(data) > max_bytes:
        return Part(data[:max_bytes], "truncated", f"more than {max_bytes} bytes")
    if code == 0:
        return Part(data)
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - MAX_ERROR_BYTES))
    said = errors.read().decode(errors="replace").strip()
    return Part(data, "failed", f"exit code {code}: {said}")


def _read(descriptor: int, seconds: float, max_bytes: int) -> tuple[bytes, bool]:
    """Read until the end, the limit or the time. Return the bytes, and True if the time was over."""
    deadline = time.monotonic() + seconds
    data = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while len(data) <= max_bytes:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                return bytes(data), True
            if not (piece := os.read(descriptor, 1 << 16)):
                break
            data += piece
    return bytes(data), False


def npus(mapping: str) -> list[str]:
    """Return the NPU ids in the output of `npu-smi info -m`."""
    return sorted({match[1] for match in re.finditer(r"^\s*(\d+)\s+\d+", mapping, re.MULTILINE)}, key=int)


def file(path: Path, max_bytes: int = MAX_OUTPUT_BYTES, *, end: bool = False) -> Part:
    """Return the beginning of a file, or its end."""
    try:
        with path.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if end and size > max_bytes:
                opened.seek(-max_bytes, os.SEEK_END)
            data = opened.read(max_bytes + 1)
    except FileNotFoundError:
        return Part(b"", "missing", f"no file {path}")
    except OSError as error:
        return Part(b"", "failed", error.strerror or str(error))
    if len(data) > max_bytes or (end and size > max_bytes):
        return Part(data[:max_bytes], "truncated", f"{'end' if end else 'beginning'} of {size} bytes")
    return Part(data)


def has_npu(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the machine has an NPU of Ascend, its driver or its software. root: the folder that stands for
    /."""
    return (any(root.glob("dev/davinci*")) or (root / "usr/local/Ascend").exists()
            or shutil.which("npu-smi") is not None or "ASCEND_HOME_PATH" in environ)


def has_gpu(root: Path = Path("/")) -> bool:
    """Return whether the machine has an NVIDIA GPU or its driver. root: the folder that stands for /."""
    return any(root.glob("dev/nvidia*")) or shutil.which("nvidia-smi") is not None


def host_files(root: Path, with_npu: bool = True) -> Iterator[tuple[str, Part]]:
    """Yield the versions and limits that the machine has as files.

    root: the folder that stands for /.
    with_npu: include those of Ascend's software.
    """
    for name in (*FILES, *(NPU_FILES if with_npu else ())):
        yield f"host{name}", file(root / name[1:])
    for pattern in NPU_PATTERNS if with_npu else ():
        paths = sorted(root.glob(pattern[1:]))
        for path in paths:
            yield f"host/{path.relative_to(root)}", file(path)
        if not paths:
            yield f"host{pattern}", Part(b"", "missing", "no such file")


def device_logs(folder: Path) -> Iterator[tuple[str, Part]]:
    """Yield the ends of the newest files of CANN's log, newest first, up to `MAX_LOGS_BYTES` together.

    CANN writes them to folders named plog, device-N or host-N. Other logs may lie beside them, as the server's.
    """
    def age(path: Path) -> float:
        try:
            return -path.stat().st_mtime
        except OSError:
            return 0.0

    files = sorted((path for path in folder.rglob("*.log") if path.is_file() and not path.is_symlink()
                    and re.match(r"(plog|device-|host-)", path.parent.name)), key=age)
    if not files:
        yield "plog", Part(b"", "missing", f"no log of CANN in {folder}")
    left = MAX_LOGS_BYTES
    for path in files:
        name = f"plog/{path.relative_to(folder)}"
        part = file(path, min(MAX_LOG_BYTES, left), end=True) if left > 0 else Part(b"", "skipped", "too many logs")
        left -= len(part.data)
        yield name, part


def software(versions: Mapping[str, str]) -> Part:
    """Return kernel, system, interpreter and Python packages. versions: of the device's software."""
    packages = {str(each.metadata["Name"]): each.version for each in metadata.distributions() if each.metadata["Name"]}
    system = platform.uname()
    facts: dict[str, Any] = {
        "system": f"{system.system} {system.release} {system.version} {system.machine}",
        "python": platform.python_version(), "libc": " ".join(platform.libc_ver()),
        "processors": len(os.sched_getaffinity(0)), "device_software": dict(versions),
        "packages": dict(sorted(packages.items())),
    }
    return Part(json.dumps(facts, indent=1).encode())
