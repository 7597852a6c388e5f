"""Checks before the start on an Ascend host, and the variables that must be set before torch_npu is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from npuserve.npu.cann.codes import MIN_DRIVER, UPDATE_DRIVER
from npuserve.npu.cann.readings import Readings
from npuserve.npu.cann.versions import PAIRS, TORCH, fits_cann, is_accepted, is_before
from npuserve.npu.notices import Notice


def set_variables() -> None:
    """Set what torch_npu reads when it is imported, unless it is set: one queue of launches, by a thread of its own.

    torch_npu reads an empty variable as 0.
    """
    if not os.environ.get("TASK_QUEUE_ENABLE"):
        os.environ["TASK_QUEUE_ENABLE"] = "1"


def notices(host: Readings, *, captures: bool, ranks: int = 1) -> list[Notice]:
    """Check the host.

    captures: steps are captured as graphs.
    ranks: number of ranks that share a model.
    """
    return [*_versions(host), *environment(host, captures=captures, ranks=ranks), *_processors(host)]


def environment(host: Readings, *, captures: bool, ranks: int = 1) -> Iterator[Notice]:
    """Check the environment variables that change how torch_npu launches, allocates and communicates.

    Sources: NPUGraph.cpp and OptionsManager.cpp of torch_npu; the tuning guide of vllm-ascend.
    """
    if ranks > 1:
        yield from _collectives(host, captures=captures)
    queue = _number(host.environ.get("TASK_QUEUE_ENABLE") or "1")
    blocking = _number(host.environ.get("ASCEND_LAUNCH_BLOCKING", "0")) != 0
    if queue not in (0, 1, 2):
        yield Notice("error", "TASK_QUEUE_ENABLE", f"TASK_QUEUE_ENABLE: {queue} must be 0, 1 or 2")
    elif queue == 2 and captures:
        yield Notice("error", "TASK_QUEUE_ENABLE", "TASK_QUEUE_ENABLE: 2 refuses the capture of steps: set it to 1, or "
                     "serve with --capture off")
    elif queue == 0:
        yield Notice("warning", "TASK_QUEUE_ENABLE", "TASK_QUEUE_ENABLE: 0 launches every kernel on the calling "
                     "thread, which is slower: set it to 1")
    else:
        yield Notice("ok", "TASK_QUEUE_ENABLE", str(queue))
    if blocking and captures:
        yield Notice("error", "ASCEND_LAUNCH_BLOCKING", "ASCEND_LAUNCH_BLOCKING: 1 makes every replay block the "
                     "launching thread: unset it, or serve with --capture off")
    elif blocking:
        yield Notice("warning", "ASCEND_LAUNCH_BLOCKING", "ASCEND_LAUNCH_BLOCKING: 1 waits for every kernel, which is "
                     "slow: unset it unless you debug")
    yield _allocator(host, captures=captures)


def _allocator(host: Readings, *, captures: bool) -> Notice:
    """Check the variable of torch_npu's allocator, as NPUAllocatorConfig.cpp and NPUGraph.cpp of torch_npu do."""
    names = [name for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if name in host.environ]
    name = next(iter(names), "PYTORCH_NPU_ALLOC_CONF")
    text = host.environ.get(name, "")
    options = dict(re.findall(r"(\w+)\s*:\s*([^\s,]+)", text))
    expands, pins = (options.get(each, "False") for each in ("expandable_segments", "pin_memory_expandable_segments"))
    if len(names) > 1:
        return Notice("error", name, f"{' and '.join(names)}: torch_npu takes one of them: unset the other")
    if not {expands, pins} <= {"True", "False"}:
        return Notice("error", name, f"{name}: {text!r}: expandable_segments and pin_memory_expandable_segments must "
                      "be True or False")
    if pins == "True" and captures:
        return Notice("error", name, f"{name}: pin_memory_expandable_segments:True refuses the capture of steps: "
                      "remove it, or serve with --capture off")
    if expands == "True":
        return Notice("ok", name, text)
    return Notice("advice", name, f"{name}: expandable_segments:True avoids fragments of device memory")


def _number(text: str) -> int:
    """Return the integer at the beginning of a text, 0 without one, as torch_npu reads variables (strtol)."""
    match = re.match(r"\s*[+-]?\d+", text, re.ASCII)
    return int(match[0]) if match else 0


def _collectives(host: Readings, *, captures: bool) -> Iterator[Notice]:
    """Check the variables of HCCL.

    Task groups hold captured attention. https://github.com/vllm-project/vllm-ascend/issues/13688: a capture with a task
    group fails if collectives run on the vector cores (AIV); one without succeeds.
    """
    mode = host.environ.get("HCCL_OP_EXPANSION_MODE", "")
    size = host.environ.get("HCCL_BUFFSIZE", "")
    if mode == "AIV" and captures:
        yield Notice("error", "HCCL_OP_EXPANSION_MODE", "HCCL_OP_EXPANSION_MODE: AIV conflicts with the task groups of "
                     "captured attention (507009 at the capture, or a replay that never ends, vllm-ascend#13688): "
                     "unset it, or serve with --capture off")
    else:
        yield Notice("ok", "HCCL_OP_EXPANSION_MODE", mode or "not set")
    if size and not (size.isdecimal() and int(size) > 0):
        yield Notice("error", "HCCL_BUFFSIZE", f"HCCL_BUFFSIZE: {size!r} must be a whole number of MiB, 1 or more")


def _versions(host: Readings) -> Iterator[Notice]:
    driver = host.driver
    cann = host.cann
    torch, torch_npu = (host.version_of(package).partition("+")[0] for package in ("torch", "torch_npu"))
    if not driver:
        yield Notice("warning", "driver", "the driver's version cannot be read: in a container mount "
                     "/usr/local/Ascend/driver/version.info and npu-smi")
    elif is_before(driver, MIN_DRIVER):
        yield Notice("warning", "driver", f"driver {driver} may refuse to capture or replay steps: {UPDATE_DRIVER}")
    else:
        yield Notice("ok", "driver", driver)
    if firmware := host.firmware:
        yield Notice("ok", "firmware", firmware)
    pair = PAIRS.get(torch_npu)
    accepted = "; ".join(f"torch_npu {name} with torch {each.torch} and CANN {' to '.join(dict.fromkeys(each.cann))}"
                         for name, each in PAIRS.items())
    if not torch_npu:
        yield Notice("error", "torch_npu", "torch_npu is not installed: pip install 'npuserve[npu]'")
    elif torch and not is_accepted(torch):
        yield Notice("error", "torch_npu", f"torch {torch} is not accepted: this version of npuserve takes {TORCH[0]} "
                     f"up to, but without, {TORCH[1]}; known are {accepted}")
    elif pair is None:
        yield Notice("warning", "torch_npu", f"torch_npu {torch_npu} is untried here; known are {accepted}")
    elif pair.torch != torch:
        yield Notice("error", "torch_npu", f"torch_npu {torch_npu} is made for torch {pair.torch}, and torch is "
                     f"{torch}")
    else:
        yield Notice("ok", "torch_npu", f"{torch_npu} with torch {torch}: {pair.proof}")
    if not cann:
        yield Notice("warning", "CANN", "CANN's version cannot be read: source its set_env.sh, which sets "
                     "ASCEND_HOME_PATH")
    elif pair is not None and not fits_cann(pair, cann):
        yield Notice("warning", "CANN", f"CANN {cann} is untried with torch_npu {torch_npu}; known are {accepted}")
    else:
        yield Notice("ok", "CANN", cann)


def _processors(host: Readings) -> Iterator[Notice]:
    if slow := host.governors - {"performance"}:
        yield Notice("warning", "governor", f"the processors' frequency governor is {', '.join(sorted(slow))}: "
                     "cpupower frequency-set -g performance makes launches faster")
    if host.balances_numa:
        yield Notice("warning", "NUMA balancing", "the kernel moves pages between NUMA nodes, which stops threads: "
                     "sysctl kernel.numa_balancing=0")
