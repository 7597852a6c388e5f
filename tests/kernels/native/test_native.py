"""The library's threads, packed weights, and memory."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from npuserve.kernels import native
from npuserve.kernels.native.packed import PackedWeight
from tests.kernels.comparison import randn
from tests.kernels.native.test_program import chain

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


@pytest.fixture
def lib():
    library = native.library()
    threads = library.threads
    yield library
    library.set_threads(threads)


def test_run_concurrent_callers_and_changing_threads(lib):
    """Concurrent runs of several threads, each with its own jobs, give the results of single runs."""
    weights = [PackedWeight.pack(randn(96, 96, seed=i) / 10) for i in range(8)]
    inputs = [randn(rows, 96, seed=rows) for rows in (1, 3, 17, 40)]
    expected = [chain(x, weights) for x in inputs]
    for threads in (1, 2, 4):
        lib.set_threads(threads)
        wrong = []

        def work(x: torch.Tensor, want: torch.Tensor, wrong: list[int] = wrong) -> None:
            for i in range(50):
                if not torch.equal(chain(x, weights), want):
                    wrong.append(i)

        workers = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not wrong


def test_kernel_number_by_name(lib):
    assert lib.kernel("linear/float32") != lib.kernel("linear/bfloat16")
    with pytest.raises(KeyError):
        lib.kernel("linear/float16")
    with pytest.raises(ValueError, match="none"), native.using("none"):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 8), (37, 33), (130, 70)])
def test_packed_weight_rows_invert_pack(lib, dtype, n, k):
    weight = randn(n, k).mul(40).to(dtype)
    packed = PackedWeight.pack(weight)
    assert packed.shape == weight.shape
    assert torch.equal(packed.dense(), weight)
    ids = torch.tensor([n - 1, 0, n // 2, 0])
    assert torch.equal(packed.rows(ids), weight[ids])
    row = randn(3, k, seed=1).mul(40).to(dtype)
    for first in {0, max(0, n // 2 - 1)}:
        if first + 3 <= n:
            packed.write(first, row)
            weight[first : first + 3] = row
    assert torch.equal(packed.dense(), weight)


NO_MEMORY = """
import os, resource, torch
from npuserve.kernels import native

lib, rows, size = native.library(), 3, 16 << 20
for threads in (1, 2):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    lib.set_threads(threads)
    x, gamma, scale = torch.ones(rows, size), torch.ones(size), torch.empty(rows)
    sums = torch.empty(rows, dtype=torch.int32)
    values = torch.zeros(rows, size, dtype=torch.int8)
    p = [x, None, gamma, None, None, values, scale, None, sums]
    op = ("rms_norm", torch.float32, p, [rows, size], [1e-6, 127.0])
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
    for _ in range(3):
        try:
            native.call("rms_norm", op)
        except MemoryError as error:
            print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    native.call("rms_norm", op)
    print(int(values.min()), int(values.max()), flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_call_without_memory_raises_memory_error():
    """An op that quantizes its result needs 64 MiB of scratch for each thread: with one thread, and with two."""
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == 2 * [*["no memory for the native kernels' own use"] * 3, "127 127"]


NO_THREADS = """
import os, resource, torch
from npuserve.kernels import native

lib = native.library()
x, out = torch.ones(64, 8), torch.empty(64, 8)
op = ("rms_norm", torch.float32, [x, None, torch.ones(8), out], [64, 8], [0.0, 0.0])
lib.set_threads(1)
before = len(os.listdir("/proc/self/task"))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))  # enough for some of the threads
try:
    lib.set_threads(64)
except OSError as error:
    print(error)
print(lib.threads, len(os.listdir("/proc/self/task")) - before)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
native.call("rms_norm", op)
lib.set_threads(3)
native.call("rms_norm", op)
print(lib.threads, float(out.sum()))
"""


@pytest.mark.slow
def test_set_threads_without_memory_raises_os_error():
    done = subprocess.run([sys.executable, "-c", NO_THREADS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    refusal = "cannot start 64 threads: the system's limit of threads or memory"
    assert done.stdout.splitlines() == [refusal, "1 0", "3 512.0"]


def test_arena_of_file_has_file_contents(lib):
    """Its tensors are not assumed to be zero."""
    file = os.memfd_create("test")
    try:
        first = native.Arena(file).empty((100,), torch.uint8).fill_(7)
        again = native.Arena(file).empty((100,), torch.uint8)
    except MemoryError:
        pytest.skip("this system makes no large pages of a file in memory")
    finally:
        os.close(file)
    assert torch.equal(again, first)
    assert not native.Arena().empty((100,), torch.uint8).any()
    assert not hasattr(native.Arena, "zeros")


def resident_of(name: str) -> int:
    """Return the resident bytes of a file in memory, counted once for each mapping of this process."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    return sum(int(size) << 10 for mapping in mappings if f"memfd:{name} " in mapping
               for size in re.findall(r"^Rss: +(\d+) kB", mapping, re.MULTILINE))


def test_arena_of_file_has_no_gaps_between_tensors(lib, monkeypatch):
    """Sizes around the large page, and two chunks, of which the first is not filled to its end."""
    page = native.CONSTANTS["LARGE_PAGE"]
    monkeypatch.setattr(native.Arena, "SHARED_CHUNK", 12 * page)
    sizes = [100, page - 64, 3 * page + 1, 1, 5 * page // 2, page, 9 * page]
    pages = -(-sum(sizes[:6]) // page) + 9
    file = os.memfd_create("arena-test")

    def tensors() -> list[torch.Tensor]:
        arena = native.Arena(file)
        return [arena.empty((size,), torch.uint8) for size in sizes]

    try:
        first = tensors()
        for number, tensor in enumerate(first, 1):
            tensor.fill_(number)
        assert resident_of("arena-test") == os.fstat(file).st_size == pages * page
        again = tensors()
        assert os.fstat(file).st_size == pages * page
    except MemoryError:
        pytest.skip("this system makes no large pages of a file in memory")
    finally:
        os.close(file)
    assert all((tensor == number).all() and tensor.data_ptr() % 64 == 0 for number, tensor in enumerate(again, 1))
    assert again[3].data_ptr() - again[0].data_ptr() == 128 + page - 64 + 3 * page + 64
    assert resident_of("arena-test") == 2 * pages * page
    del first, tensor
    gc.collect()
    assert resident_of("arena-test") == pages * page
    assert again[-1][-1] == len(sizes)
    del again[-1]
    gc.collect()
    assert resident_of("arena-test") == (pages - 9) * page
    del again
    gc.collect()
    assert resident_of("arena-test") == 0


def test_memory_is_unmapped_when_dropped(lib):
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    gc.collect()
    before = resident()
    memory = native.Arena().empty((64 << 20,), torch.uint8)
    memory.fill_(1)
    assert resident() - before > 48 << 20
    del memory
    gc.collect()
    assert resident() - before < 16 << 20
