"""Readings of an Ascend host: files below a root folder, and npu-smi. A missing file or program is an empty text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

COMMAND_SECONDS = 10
"""Time after which npu-smi is killed. It blocks on a device that does not respond."""
MAX_FILE_BYTES = 1 << 20

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns its stdout; "" if that is impossible, fails or takes too long."""


def run_command(command: Sequence[str]) -> str:
    """Run a command in the C locale, as `Run`."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, timeout=COMMAND_SECONDS,
                              stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


class Readings:
    """Readings of one host.

    root: folder that stands for /.
    environ: environment variables.
    run: runs npu-smi.
    versions: version of an installed Python package; "" if it is not installed.
    """

    def __init__(
        self, root: Path = Path("/"), environ: Mapping[str, str] | None = None, run: Run = run_command,
        versions: Callable[[str], str] | None = None,
    ):
        self._root = root
        self._run = run
        self.environ: Mapping[str, str] = {} if environ is None else environ
        self.version_of = versions or _installed

    def text(self, path: str) -> str:
        """Return the text of a file, at most `MAX_FILE_BYTES`."""
        try:
            with (self._root / path.lstrip("/")).open("rb") as file:
                return file.read(MAX_FILE_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def glob(self, pattern: str) -> list[str]:
        """Return the paths below the root that match, sorted, with a leading slash."""
        return sorted(f"/{path.relative_to(self._root)}" for path in self._root.glob(pattern.lstrip("/")))

    def npu_smi(self, *arguments: str) -> str:
        return self._run(("npu-smi", *arguments))

    @property
    def driver(self) -> str:
        """Version of the driver (Ascend HDK), from its version.info, else from npu-smi; "" if unknown."""
        return _value(self.text(f"{self._home()}/driver/version.info"), "package_version", "Version") or _found(
            r"npu-smi\s+\S+\s+Version:\s*(\S+)", self.npu_smi("info"))

    @property
    def firmware(self) -> str:
        """Version of the firmware; "" if unknown, as in most containers."""
        return _value(self.text(f"{self._home()}/firmware/version.info"), "package_version", "Version")

    @property
    def cann(self) -> str:
        """Version of CANN's toolkit, from ascend_toolkit_install.info; "" if unknown."""
        home = self._home()
        given = self.environ.get("ASCEND_HOME_PATH") or self.environ.get("ASCEND_TOOLKIT_HOME")
        for folder in (given, f"{home}/ascend-toolkit/latest", f"{home}/cann", f"{home}/cann-*"):
            for path in self.glob(f"{folder}/*-linux/ascend_toolkit_install.info") if folder else ():
                if version := _value(self.text(path), "version"):
                    return version
        return ""

    @property
    def governors(self) -> set[str]:
        """Frequency governors of the processors; empty where the kernel does not show them, as in virtual machines."""
        files = self.glob("/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
        return {text for path in files if (text := self.text(path).strip())}

    @property
    def balances_numa(self) -> bool:
        """True if the kernel moves pages between NUMA nodes."""
        return self.text("/proc/sys/kernel/numa_balancing").strip() not in ("", "0")

    def _home(self) -> str:
        return _value(self.text("/etc/ascend_install.info"), "Driver_Install_Path_Param") or "/usr/local/Ascend"


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _value(text: str, *keys: str) -> str:
    """Return the value of the first key that a file of KEY=VALUE lines has."""
    values = dict(re.findall(r"^\s*(\w+)\s*=\s*\[?([^\]\s]+)", text, re.MULTILINE))
    return next((values[key] for key in keys if key in values), "")


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
