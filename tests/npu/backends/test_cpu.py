"""CPU backend: kernels, memory, threads and the queue of tasks."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from npuserve.kernels import native
from npuserve.kernels.native import shared_library
from npuserve.kernels.native.choice import CpuKernelSettings
from npuserve.kernels.native.packed import PackedWeight, dense, write
from npuserve.kernels.registry import GOLDEN, KERNELS
from npuserve.npu import backends, control_group
from npuserve.npu.backends import BackendError, select
from npuserve.npu.backends import cpu as cpu_module
from npuserve.npu.backends.base import DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend

needs_native = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


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
def test_cpu_resolve_dtype(asked, checkpoint, dtype):
    assert select("cpu").resolve_dtype(asked, checkpoint) == dtype


@pytest.mark.parametrize(("is_built", "count"), [(True, 0), (False, 1)])
def test_cpu_preflight_without_native_kernels_warns(monkeypatch, is_built, count):
    monkeypatch.setattr(cpu_module, "built", lambda: is_built)
    monkeypatch.setattr(shared_library, "_LIBRARY", None)
    notices = CpuBackend.preflight(captures=False)
    assert [notice.level for notice in notices if "so plain torch computes" in notice.said] == ["warning"] * count


def test_cpu_resolve_dtype_unsupported_is_refused():
    with pytest.raises(BackendError, match="dtype: 'float16' is not one of auto, float32, bfloat16"):
        select("cpu").resolve_dtype("float16", "float16")


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_native), False])
def test_cpu_start_sets_threads_of_kernels_and_torch(monkeypatch, is_native):
    set_to: list[tuple[str, int]] = []
    monkeypatch.setattr(torch, "set_num_threads", lambda count: set_to.append(("torch", count)))
    monkeypatch.setattr(cpu_module, "library", lambda: SimpleNamespace(
        set_threads=lambda count, cpus: set_to.append(("native", count))))
    monkeypatch.setattr(cpu_module, "_TORCH_THREADS", 64)
    monkeypatch.setattr(cpu_module, "usable_cores", lambda: 3)
    started = [CpuBackend(is_native, DeviceSettings(threads=threads)) for threads in (None, 5, 0)]
    assert [cpu.threads for cpu in started] == [3, 5, 3]
    if is_native:  # torch's threads do not compete with the kernels'
        assert set_to == [("native", 5), ("torch", 1), ("native", 3), ("torch", 1)]
    else:
        assert set_to == [("torch", 5), ("torch", 3)]


def test_cpu_uses_native_kernels_where_built():
    assert (select("cpu").kernels == "cpu") == select("cpu").capabilities.deterministic == native.available()
    plain = CpuBackend(native=False)
    can = plain.capabilities
    assert (plain.name, plain.kernels, can.deterministic, can.block_multiple) == ("cpu", GOLDEN, False, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 8), (37, 13)])
def test_cpu_weight_written_in_pieces_equals_source(cpu, dtype, n, k):
    numbers = torch.randn(n, k, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = cpu.weights.allocate(n, k, dtype)
    for first in range(0, n, 5):
        write(weight, first, numbers[first : first + 5])
    assert (tuple(weight.shape), weight.dtype) == ((n, k), dtype)
    assert torch.equal(dense(weight), numbers)
    words = weight.words if isinstance(weight, PackedWeight) else weight
    assert words.nbytes == cpu.weights.nbytes(n, k, dtype)


@needs_native
def test_packed_weight_write_beyond_rows_is_refused():
    weight = CpuBackend().weights.allocate(20, 8, torch.float32)
    for first, shape in ((19, (2, 8)), (-1, (1, 8)), (0, (1, 9))):
        with pytest.raises(ValueError, match=r"of a weight of \(20, 8\)"):
            write(weight, first, torch.ones(shape))


@pytest.mark.parametrize(("dtype", "keys", "values"), [
    (torch.float32, (5, 2, 2, 10, 16, 1), (5, 2, 32, 16, 1)),
    (torch.bfloat16, (5, 2, 2, 5, 16, 2), (5, 2, 16, 16, 2)),
    (torch.int8, (5, 2, 2, 5, 16, 2), (5, 2, 16, 16, 2)),
])
def test_cpu_cache_shapes_match_kernels(cpu, dtype, keys, values):
    shapes = cpu.cache.shapes(5, 32, 2, 10, dtype)
    assert shapes == ((keys, values) if cpu.kernels == "cpu" else ((5, 32, 2, 10),) * 2)
    assert cpu.empty(shapes[0], dtype).shape == shapes[0]
    assert cpu.cache.scale_shape(5, 32, 2) == ((5, 2, 32) if cpu.kernels == "cpu" else (5, 32, 2))


def test_cache_dtype_only_where_supported(cpu):
    assert cpu.cache_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert cpu.cache_dtype("int8", torch.bfloat16) == torch.int8
    with pytest.raises(BackendError, match="kv_cache_dtype: 'fp8' is not possible on cpu; possible are auto, int8"):
        cpu.cache_dtype("fp8", torch.bfloat16)
    cpu.capabilities = replace(cpu.capabilities, cache_dtypes=())
    assert cpu.cache_dtype("auto", torch.float32) == torch.float32
    with pytest.raises(BackendError, match="kv_cache_dtype: 'int8' is not possible on cpu; only auto is possible"):
        cpu.cache_dtype("int8", torch.float32)


def resident_mib(address: int) -> int:
    """MiB in memory of the mapping at an address; 0 if there is none. Other threads' memory does not count."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) >> 10
    return 0


@needs_native
def test_arena_small_weights_share_and_release_pages():
    backend = CpuBackend()
    small = [backend.weights.allocate(16, 16, torch.float32) for _ in range(100)]
    for weight in small:
        write(weight, 0, torch.ones(16, 16))
    assert all(weight.words.data_ptr() % 64 == 0 for weight in small)
    address = small[0].words.data_ptr()
    assert resident_mib(address) < 8
    large = [backend.weights.allocate(4096, 2048, torch.float32) for _ in range(2)]
    for weight in large:
        write(weight, 0, torch.ones(4096, 2048))
    assert resident_mib(address) > 60
    row = large[1].words[-8:]
    assert row.sum() != 0
    del small, large, weight
    assert row.sum() != 0  # a view keeps the mapping
    del row
    gc.collect()
    assert resident_mib(address) < 8
    assert not backend.empty((1000,), torch.int32).any()


@needs_native
def test_arena_large_tensor_gets_own_mapping(monkeypatch):
    monkeypatch.setattr(native.Arena, "CHUNK", 1 << 12)
    arena = native.Arena()
    made = [arena.empty((size,), torch.uint8) for size in (100, 1 << 14, 4000, 10)]
    for number, tensor in enumerate(made):
        tensor.fill_(number)
    assert all((tensor == number).all() and tensor.data_ptr() % 64 == 0 for number, tensor in enumerate(made))


def test_cpu_memory_and_cores_are_limited_by_the_control_group(tmp_path, monkeypatch):
    monkeypatch.setattr(control_group, "ROOT", tmp_path)
    monkeypatch.setattr(cpu_module.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert select("cpu").memory.available() > 1 << 20
    assert cpu_module.usable_cores() == 8
    for name, content in {"memory.max": "1000", "memory.current": "700", "cpu.max": "50000 100000"}.items():
        (tmp_path / name).write_text(content)
    assert select("cpu").memory.available() == 300
    assert cpu_module.usable_cores() == 1


def test_cpu_enqueue_runs_in_order_on_own_thread(cpu):
    seen: list[tuple[int, str]] = []
    release = threading.Event()

    def work(number: int) -> int:
        release.wait(10)
        seen.append((number, threading.current_thread().name))
        return number * number

    pending = [cpu.enqueue(lambda number=number: work(number)) for number in range(5)]
    assert not seen  # enqueue does not block
    release.set()
    assert [task.wait() for task in pending] == [0, 1, 4, 9, 16]
    assert seen == [(number, "npuserve-cpu") for number in range(5)]
    assert pending[3].wait() == 9


def test_cpu_work_gets_result_of_earlier_work_without_delivery(cpu):
    go = threading.Event()
    first = cpu.enqueue(lambda: go.wait(20))
    second = cpu.enqueue(lambda: [first.wait()])
    go.set()
    waiting = threading.Thread(target=second.wait, daemon=True)
    waiting.start()
    waiting.join(20)
    assert second.done()
    assert second.wait() == [True]


def test_cpu_deliver_releases_earlier_work(cpu):
    go, delivered = threading.Event(), []
    first = cpu.enqueue(lambda: go.wait(20))

    def work() -> None:
        cpu.span()
        delivered.append(first.done())
        cpu.deliver()
        delivered.append(first.done())

    second = cpu.enqueue(work)
    go.set()
    second.wait()
    assert delivered == [False, True]


def test_cpu_enqueue_ends_its_last_task_after_the_backend_is_gone():
    backend = CpuBackend()
    go = threading.Event()
    task = backend.enqueue(lambda: go.wait(20))
    del backend  # its thread ends after the task
    go.set()
    waiting = threading.Thread(target=task.wait, daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()


def test_cpu_enqueue_uses_the_threads_of_the_settings():
    before = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            backend = CpuBackend(native=False, settings=DeviceSettings(threads=number))
            assert backend.enqueue(torch.get_num_threads).wait() == number
    finally:
        torch.set_num_threads(before)


@needs_native
def test_cpu_threads_pinned_if_one_per_core():
    cores, before = set(os.sched_getaffinity(0)), native.library().threads

    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    def check(number: int, expected: list[set[int]]) -> None:
        """Check the affinity of each thread. expected: processors by thread, the queue's thread first."""
        CpuBackend(settings=DeviceSettings(threads=1))
        known = threads()
        cpu = CpuBackend(settings=DeviceSettings(threads=number))
        started = [int(thread) for thread in threads() - known]
        until = time.monotonic() + 10  # a thread sets its affinity when it starts
        while (found := sorted(map(sorted, map(os.sched_getaffinity, started)))) != sorted(map(sorted, expected[1:])):
            assert time.monotonic() < until, found
            time.sleep(0.01)
        assert cpu.enqueue(lambda: os.sched_getaffinity(0)).wait() == expected[0]
        assert os.sched_getaffinity(0) == cores  # other threads are not pinned

    try:
        if len(cores) > 1:
            check(len(cores), [{core} for core in sorted(cores)])
        check(len(cores) + 1, [cores] * (len(cores) + 1))
    finally:
        CpuBackend(settings=DeviceSettings(threads=before))


@needs_native
@pytest.mark.parametrize(("size", "threads", "cores"), [
    (1, 2, [[]]), (1, 7, [[2, 3, 4, 5, 6, 7, 8]]), (2, 2, [[], []]), (2, 3, [[2, 3, 4], [5, 6, 7]]),
    (3, 3, [[2, 3, 2], [4, 5, 4], [6, 7, 6]]), (7, 1, [[2], [3], [4], [5], [6], [7], [8]]),
    (8, 1, [[2], [3], [4], [5], [6], [7], [8], [2]]),
])
def test_cpu_ranks_pin_their_threads_to_cores_of_their_own_if_they_take_all(monkeypatch, size, threads, cores):
    """As far as the process may use as many cores as there are ranks. Others may share the cores that it leaves."""
    found: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(2, 9)))
    monkeypatch.setattr(cpu_module, "library", lambda: SimpleNamespace(
        set_threads=lambda count, cores: found.append(cores)))
    for rank in range(size):
        CpuBackend(settings=DeviceSettings((rank, size), threads))
    assert found == cores


@pytest.mark.parametrize(("wanted", "name"), [
    (CpuKernelSettings(gemm="fma"), "cpu_gemm: 'fma'"),
    (CpuKernelSettings(weights="compact"), "cpu_weights: 'compact'")])
def test_cpu_choose_kernels_without_native_is_refused(wanted, name):
    cpu = CpuBackend(native=False)
    assert cpu.choose_kernels(CpuKernelSettings(), 1024) is None
    with pytest.raises(BackendError, match=f"{name} needs the native CPU kernels, .* only auto is possible"):
        cpu.choose_kernels(wanted, 1024)


@needs_native
@pytest.mark.skipif("avx512_bf16" in (native.library().isas if native.available() else ()),
                    reason="this processor has the bfloat16 instruction")
def test_cpu_choose_kernels_unsupported_gemm_is_backend_error():
    with pytest.raises(BackendError, match=r"cpu_gemm: 'bf16' is not possible.*possible are auto, (fma|amx; )"):
        CpuBackend().choose_kernels(CpuKernelSettings(gemm="bf16"), 0)


def test_cpu_enqueue_error_is_raised_by_wait(cpu):
    def fail() -> None:
        raise ValueError("the device is on fire")

    failed, after = cpu.enqueue(fail), cpu.enqueue(lambda: 7)
    with pytest.raises(ValueError, match="on fire"):
        failed.wait()
    assert after.wait() == 7


def test_cpu_thread_ends_with_backend_and_frees_results():
    before = set(threading.enumerate())
    backend = CpuBackend(native=False)
    held = torch.ones(3)
    gone = weakref.ref(held)
    backend.enqueue(lambda held=held: held.sum()).wait()
    backend.synchronize()
    (thread,) = set(threading.enumerate()) - before
    del held
    assert gone() is None
    del backend
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


EXIT = """
import os, sys, threading, torch
from npuserve.kernels import native
from npuserve.npu.backends.cpu import CpuBackend

def fail(backend, step):
    begun = threading.Event()

    def work():
        begun.set()
        step()

    backend.enqueue(work)
    begun.wait()
    raise RuntimeError("the engine fails")

def native_kernels():
    size, times = 64 << 20, 30
    memory, found = native.library().allocate(size), torch.empty(1, dtype=torch.int32)

    def read():
        for _ in range(times):
            native.call("read", ("read", torch.int8, [memory, found], [1, size]))
        return found

    program = native.record(read)
    fail(CpuBackend(), lambda: program.replay(1))

def torch_operators():
    x = torch.ones(300, 300)
    fail(CpuBackend(native=False), lambda: [x @ x for _ in range(300)])

torch.set_num_threads(1)
for step in sys.argv[1:]:
    if os.fork() == 0:
        globals()[step]()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.slow
def test_cpu_exit_during_step_shows_error():
    steps = [*["native_kernels"] * native.available(), "torch_operators"]
    done = subprocess.run([sys.executable, "-c", EXIT, *steps], capture_output=True, text=True)
    assert done.stdout.split() == ["1"] * len(steps)
    assert done.stderr.count("RuntimeError: the engine fails\n") == done.stderr.count("Error") == len(steps)


def test_cpu_fetch_copies_result_of_previous_work(cpu):
    tensor = torch.zeros(2, 3, dtype=torch.int64)
    buffers = [cpu.host_buffer(2, 3, dtype=torch.int64) for _ in range(2)]

    def step(buffer: torch.Tensor) -> backends.base.Event:
        tensor.add_(1)
        return cpu.fetch(tensor, buffer)

    pending = [cpu.enqueue(lambda buffer=buffer: step(buffer)) for buffer in buffers]
    for number, (task, buffer) in enumerate(zip(pending, buffers, strict=True)):
        task.wait().wait()
        assert (buffer == number + 1).all()


def test_cpu_captured_step_replays_any_rows(cpu):
    x, gamma = torch.arange(1.0, 7.0).view(6, 1), torch.ones(1)
    captured = cpu.capture(lambda rows: KERNELS["rms_norm"].implementations["cpu"].function(
        x[:rows], gamma, 0.0), 6, decode=True)
    if cpu.kernels == GOLDEN:
        assert captured is None
        return
    assert captured.largest == 6
    for rows in (1, 4, 6):
        assert captured.size(rows) == rows
        assert captured.replay(rows, [1] * rows).shape == (rows, 1)
        result, calls = captured.replay_timed(rows, [1] * rows)
        assert torch.equal(result, captured.replay(rows, [1] * rows))
        assert [name for name, seconds in calls if seconds > 0] == ["rms_norm"]


def test_cpu_kv_cache_share_is_bounded():
    assert select("cpu").memory.cache_share(8 << 20) == 2 << 20
    assert select("cpu").memory.cache_share(1 << 40) == 4 << 30
