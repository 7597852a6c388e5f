from __future__ import annotations

import pytest
import torch

from npuserve.npu import backends
from npuserve.npu.backends import BackendError, cpu, select


def test_auto_is_the_first_that_this_machine_has():
    assert select("auto").name == select().name == "cpu" or select().name in backends.present()
    assert "cpu" in backends.present()


def test_a_backend_that_this_version_lacks_is_refused_with_those_present(monkeypatch):
    monkeypatch.setitem(backends.MODULES, "tpu", "tpu")
    for name in ("tpu", "gpu"):
        with pytest.raises(BackendError, match=rf"device: this version has no backend '{name}'; it has: .*cpu"):
            select(name)
    assert "tpu" not in backends.present()


def test_one_that_is_not_available_is_passed_over_by_auto_and_refused_by_name(monkeypatch):
    monkeypatch.setattr(cpu.CpuBackend, "available", classmethod(lambda cls: False))
    monkeypatch.setattr(backends, "present", lambda: ["cpu"])
    for name in ("auto", "cpu"):
        with pytest.raises(BackendError, match="cpu not available on this machine"):
            select(name)


@pytest.mark.parametrize(
    ("asked", "checkpoint", "dtype"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float32", "float32"),
        ("auto", "float16", "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_dtypes_of_the_cpu(asked, checkpoint, dtype):
    assert select("cpu").resolve_dtype(asked, checkpoint) == dtype


def test_a_dtype_that_the_cpu_lacks():
    with pytest.raises(BackendError, match="dtype: 'float16' is not one of auto, float32, bfloat16"):
        select("cpu").resolve_dtype("float16", "float16")


def test_threads(monkeypatch):
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(cpu, "usable_cores", lambda: 3)
    backend = select("cpu")
    backend.set_threads(5)
    backend.set_threads(0)
    assert set_to == [5, 3]


@pytest.mark.parametrize(
    ("files", "room", "cores"),
    [
        ({}, None, None),
        ({"memory.max": "max\n", "memory.current": "5", "cpu.max": "max 100000"}, None, None),
        (
            {
                "memory.max": "1000", "memory.current": "700", "memory.stat": "anon 600\ninactive_file 50\n",
                "cpu.max": "50000 100000",
            },
            350,
            1,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "950",
                "memory/memory.stat": "inactive_file 5\ntotal_inactive_file 100\n",
                "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
            },
            150,
            None,
        ),
    ],
)
def test_what_the_control_group_leaves(tmp_path, monkeypatch, files, room, cores):
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    available = select("cpu").memory_available()
    assert available == room if room is not None else available > 1 << 20
    assert cpu.usable_cores() == (cores or 8)


def test_the_queue_of_a_cpu_is_the_caller_itself():
    backend = select("cpu")
    with backend.stream():
        span = backend.span()
        buffer = backend.host_buffer(2, 3, dtype=torch.int64)
        span.stop()
    backend.event().wait()
    backend.synchronize()
    assert span.read() >= 0
    assert buffer.shape == (2, 3)
    assert backend.capture(lambda: None) is None


def test_the_cache_leaves_room_for_others():
    assert select("cpu").kv_cache_share(8 << 20) == 2 << 20
    assert select("cpu").kv_cache_share(1 << 40) == 4 << 30
