"""Checks before the start, on fake hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from npuserve.npu.cann import preflight
from npuserve.npu.cann.versions import PAIRS, TORCH, fits_cann, is_accepted, is_before
from npuserve.npu.notices import Notice
from tests.npu.cann.host import ENVIRONMENT, host

DRIVER = "/usr/local/Ascend/driver/version.info"
TOOLKIT = "/usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info"


def found(root: Path, captures: bool = True, ranks: int = 1, **changes: object) -> dict[str, Notice]:
    notices = preflight.notices(host(root, **changes), captures=captures, ranks=ranks)  # type: ignore[arg-type]
    names = [notice.name for notice in notices]
    assert len(set(names)) == len(names)
    return {notice.name: notice for notice in notices}


def test_accepted_host_has_no_warning(tmp_path: Path) -> None:
    notices = found(tmp_path)
    assert {notice.level for notice in notices.values()} == {"ok"}
    assert notices["driver"].said == notices["firmware"].said == "25.5.1"
    assert notices["CANN"].said == "9.1.0"
    assert notices["torch_npu"].said == "2.10.0.post4 with torch 2.10.0: the tests run on it, on the emulator"


@pytest.mark.parametrize(("name", "level", "said", "files", "packages"), [
    ("driver", "warning", "driver 25.2.0 may refuse .* 25.5.1 or later", {DRIVER: "Version=25.2.0\n"}, {}),
    ("driver", "warning", "driver 25.5.1.rc1 may", {DRIVER: "Version=25.5.1.rc1\n"}, {}),
    ("driver", "warning", "cannot be read: in a container mount", {DRIVER: None}, {}),
    ("CANN", "warning", "CANN 8.2.RC1 is untried with torch_npu 2.10.0.post4; known are .*CANN 9.1; torch_npu 2.13.0",
     {TOOLKIT: "version=8.2.RC1\n"}, {}),
    ("CANN", "warning", "cannot be read: source its set_env.sh", {TOOLKIT: None}, {}),
    ("CANN", "ok", "9.1.0", {}, {"torch": "2.13.0", "torch_npu": "2.13.0"}),
    ("torch_npu", "error", "is made for torch 2.10.0, and torch is 2.11.0", {}, {"torch": "2.11.0"}),
    ("torch_npu", "error", "not installed: pip install", {}, {"torch_npu": ""}),
    ("torch_npu", "warning", "torch_npu 2.15.0 is untried here; known are torch_npu 2.10.0.post4 with torch 2.10.0 "
     "and CANN 9.1; ", {}, {"torch_npu": "2.15.0"}),
    ("torch_npu", "error", "torch 2.14.0 is not accepted: this version of npuserve takes 2.10 up to, but without, "
     "2.14; known are", {}, {"torch_npu": "2.14.0", "torch": "2.14.0"}),
    ("torch_npu", "error", "torch 2.9.1 is not accepted", {}, {"torch_npu": "2.9.0", "torch": "2.9.1"}),
    ("governor", "warning", "governor is powersave, schedutil: ",
     {f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor": f"{name}\n"
      for cpu, name in ((1, "powersave"), (2, "schedutil"))}, {}),
    ("NUMA balancing", "warning", "sysctl kernel.numa_balancing=0", {"/proc/sys/kernel/numa_balancing": "1\n"}, {}),
])
def test_deviation_gives_a_notice(
    tmp_path: Path, name: str, level: str, said: str, files: dict[str, str | None], packages: dict[str, str]
) -> None:
    notices = found(tmp_path, files=files, packages={"torch": "2.10.0", "torch_npu": "2.10.0.post4"} | packages)
    assert notices[name].level == level
    assert re.search(said, notices[name].said), notices[name].said


@pytest.mark.parametrize(("environ", "captures", "level", "said"), [
    ({"TASK_QUEUE_ENABLE": "2"}, True, "error", "refuses the capture of steps: set it to 1"),
    ({"TASK_QUEUE_ENABLE": "2"}, False, "ok", "2"),
    ({"TASK_QUEUE_ENABLE": "0"}, True, "warning", "slower: set it to 1"),
    ({"TASK_QUEUE_ENABLE": "off"}, True, "warning", "slower: set it to 1"),
    ({"TASK_QUEUE_ENABLE": "3"}, False, "error", "3 must be 0, 1 or 2"),
    ({"TASK_QUEUE_ENABLE": ""}, True, "ok", "1"),
    ({}, True, "ok", "1"),
    ({"ASCEND_LAUNCH_BLOCKING": "2"}, True, "error", "unset it, or serve with --capture off"),
    ({"ASCEND_LAUNCH_BLOCKING": "1"}, True, "error", "unset it, or serve with --capture off"),
    ({"ASCEND_LAUNCH_BLOCKING": "1"}, False, "warning", "unset it unless you debug"),
    ({"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:50"}, True, "advice", "expandable_segments:True avoids fragments"),
    ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments : True"}, True, "ok", "expandable_segments : True"),
    ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:true"}, True, "error", "must be True or False"),
    ({"PYTORCH_NPU_ALLOC_CONF": "pin_memory_expandable_segments:True"}, True, "error", "remove it, or serve with"),
    ({"PYTORCH_NPU_ALLOC_CONF": "pin_memory_expandable_segments:True"}, False, "advice", "avoids fragments"),
])
def test_environment_variable_gives_a_notice(
    tmp_path: Path, environ: Mapping[str, str], captures: bool, level: str, said: str
) -> None:
    notice = found(tmp_path, captures, environ={**ENVIRONMENT, **environ})[next(iter(environ), "TASK_QUEUE_ENABLE")]
    assert (notice.level, said in notice.said) == (level, True), notice


@pytest.mark.parametrize(("environ", "level"), [
    ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "ok"), (
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_NPU_ALLOC_CONF": ""}, "error")])
def test_either_variable_of_the_allocator_is_taken(tmp_path: Path, environ: Mapping[str, str], level: str) -> None:
    assert found(tmp_path, environ=environ)[list(environ)[-1]].level == level


@pytest.mark.parametrize(("environ", "captures", "level", "said"), [
    ({"HCCL_OP_EXPANSION_MODE": "AIV"}, True, "error", "conflicts with the task groups of captured attention"),
    ({"HCCL_OP_EXPANSION_MODE": "AIV"}, False, "ok", "AIV"),
    ({"HCCL_OP_EXPANSION_MODE": "AI_CPU"}, True, "ok", "AI_CPU"),
    ({}, True, "ok", "not set"),
    ({"HCCL_BUFFSIZE": "0"}, True, "error", "'0' must be a whole number of MiB, 1 or more"),
])
def test_variable_of_collectives_gives_a_notice_to_ranks_only(
    tmp_path: Path, environ: Mapping[str, str], captures: bool, level: str, said: str
) -> None:
    name = next(iter(environ), "HCCL_OP_EXPANSION_MODE")
    notice = found(tmp_path, captures, 2, environ={**ENVIRONMENT, **environ})[name]
    assert (notice.level, said in notice.said) == (level, True), notice
    assert name not in found(tmp_path, captures, environ={**ENVIRONMENT, **environ})


def test_valid_size_of_collectives_buffer_gives_no_notice(tmp_path: Path) -> None:
    assert "HCCL_BUFFSIZE" not in found(tmp_path, True, 2, environ={**ENVIRONMENT, "HCCL_BUFFSIZE": "200"})


def test_task_queue_is_set_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "0")
    preflight.set_variables()
    assert os.environ["TASK_QUEUE_ENABLE"] == "0"
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "")
    preflight.set_variables()
    assert os.environ["TASK_QUEUE_ENABLE"] == "1"
    monkeypatch.delenv("TASK_QUEUE_ENABLE")
    preflight.set_variables()
    assert os.environ["TASK_QUEUE_ENABLE"] == "1"


@pytest.mark.parametrize(("version", "other", "before"), [
    ("25.5.0", "25.5.1", True), ("25.5.1", "25.5.1", False), ("25.5.1.rc2", "25.5.1", True), ("25.5", "25.5.1", True),
    ("26.0.rc1", "25.5.1", False), ("25.10.0", "25.5.1", False), ("unknown", "25.5.1", True)])
def test_is_before_compares_numbers(version: str, other: str, before: bool) -> None:
    assert is_before(version, other) is before


def test_accepted_torch_is_that_of_pyproject() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert re.findall(r'"torch>=([\d.]+),<([\d.]+)"', text) == [TORCH]
    assert [is_accepted(version) for version in ("2.9.1", "2.10.0", "2.13.1", "2.14.0rc1", "2.14.0", "3.0")] == [
        False, True, True, False, False, False]
    assert all(is_accepted(pair.torch) for pair in PAIRS.values())


def test_fits_cann_compares_major_and_minor() -> None:
    pair = PAIRS["2.13.0"]
    assert [fits_cann(pair, cann) for cann in ("8.3.RC1", "8.5.0", "9.2.1", "9.3.0", "10.0.0")] == [
        False, True, True, False, False]
