"""Fake Ascend host: a folder with the files that its driver, CANN and kernel have, and an npu-smi that prints texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from npuserve.npu.cann.readings import Readings

FILES = {
    "/usr/local/Ascend/driver/version.info": "Version=25.5.1\nascendhal_version=7.35.23\npackage_version=25.5.1\n",
    "/usr/local/Ascend/firmware/version.info": "Version=7.8.0.5.216\npackage_version=25.5.1\n",
    "/usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info":
        "package_name=Ascend-cann-toolkit\nversion=9.1.0\ninnerversion=V100R001\narch=aarch64\nos=linux\n",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "/proc/sys/kernel/numa_balancing": "0\n",
}
PACKAGES = {"torch": "2.10.0+cpu", "torch_npu": "2.10.0.post4"}
ENVIRONMENT = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}


def write(root: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def host(
    root: Path, files: Mapping[str, str | None] | None = None, environ: Mapping[str, str] = ENVIRONMENT,
    packages: Mapping[str, str] = PACKAGES, npu_smi: Mapping[tuple[str, ...], str] | None = None,
) -> Readings:
    """Return the readings of a host with `FILES`, changed by `files`: None removes one."""
    write(root, {path: text for path, text in {**FILES, **(files or {})}.items() if text is not None})
    printed = npu_smi or {}

    def run(command: Sequence[str]) -> str:
        assert command[0] == "npu-smi"
        return printed.get(tuple(command[1:]), "")

    return Readings(root, environ, run, lambda package: packages.get(package, ""))
