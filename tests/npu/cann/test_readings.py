"""Readings of fake hosts."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from npuserve.npu.cann import readings
from npuserve.npu.cann.readings import Readings, run_command
from tests.npu.cann.host import FILES, host, write

INFO = """
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
"""


def test_readings_of_a_complete_host(tmp_path: Path) -> None:
    found = host(tmp_path)
    assert (found.driver, found.firmware, found.cann) == ("25.5.1", "25.5.1", "9.1.0")
    assert found.governors == {"performance"}
    assert not found.balances_numa
    assert found.version_of("torch") == "2.10.0+cpu"


def test_readings_of_an_empty_host(tmp_path: Path) -> None:
    found = Readings(tmp_path, {}, lambda command: "")
    assert (found.driver, found.firmware, found.cann, found.governors) == ("", "", "", set())
    assert not found.balances_numa
    assert found.version_of("no-such-package") == ""
    assert found.text("/etc") == found.text("/none") == ""


def test_driver_version_without_its_file_is_that_of_npu_smi(tmp_path: Path) -> None:
    files = {"/usr/local/Ascend/driver/version.info": None}
    assert host(tmp_path, files, npu_smi={("info",): INFO}).driver == "25.2.0"


def test_driver_in_another_folder_is_found(tmp_path: Path) -> None:
    write(tmp_path, {"/etc/ascend_install.info": "UserName=a\nDriver_Install_Path_Param=/data/ascend\n",
                     "/data/ascend/driver/version.info": "Version=24.1.rc3\n"})
    assert Readings(tmp_path, {}, lambda command: "").driver == "24.1.rc3"


@pytest.mark.parametrize("folder", ["/usr/local/Ascend/cann", "/usr/local/Ascend/cann-9.2.0"])
def test_cann_version_by_folder(tmp_path: Path, folder: str) -> None:
    write(tmp_path, {f"{folder}/x86_64-linux/ascend_toolkit_install.info": "version=9.2.0\n"})
    assert Readings(tmp_path, {}, lambda command: "").cann == "9.2.0"


def test_cann_version_of_the_sourced_toolkit_comes_first(tmp_path: Path) -> None:
    write(tmp_path, FILES | {"/data/cann/x86_64-linux/ascend_toolkit_install.info": "version=8.5.0\n"})
    assert Readings(tmp_path, {"ASCEND_HOME_PATH": "/data/cann"}, lambda command: "").cann == "8.5.0"
    assert Readings(tmp_path, {}, lambda command: "").cann == "9.1.0"


def test_command_that_is_absent_fails_or_hangs_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(readings, "COMMAND_SECONDS", 0.3)
    assert run_command(["npu-smi", "info"]) == ""
    program = tmp_path / "npu-smi"
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    for script, said in (("echo $1 $LC_ALL", "info C\n"), ("echo no; exit 1", ""), ("exec sleep 60", "")):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        began = time.monotonic()
        assert run_command(["npu-smi", "info"]).startswith(said)
        assert time.monotonic() - began < 20
