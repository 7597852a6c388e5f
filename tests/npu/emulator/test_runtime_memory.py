"""Memory of the emulated NPU: accounting, out of memory, and release."""

from __future__ import annotations

import pytest
import torch

from npuserve.npu import emulator
from tests.npu.emulator.child import emulated, needs_npu, run

MIB = 1 << 20
SIZE = 256 * MIB
OUT_OF_MEMORY = 207001


def used() -> int:
    torch.npu.synchronize()
    torch.npu.empty_cache()
    return emulator.memory().used


@emulated(memory=SIZE)
def test_device_has_requested_memory():
    before = used()
    free, total = torch.npu.mem_get_info()
    assert total == SIZE
    assert free == SIZE - before
    kept = torch.empty(64 * MIB, dtype=torch.int8, device="npu")
    assert torch.npu.mem_get_info() == (free - 64 * MIB - 2 * MIB, SIZE)  # the plugin adds 32 bytes: one more page
    del kept
    assert used() == before
    assert emulator.memory().peak >= before + 64 * MIB


@emulated(memory=SIZE)
def test_out_of_memory_leaves_device_usable():
    before = used()
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(SIZE + 1, dtype=torch.int8, device="npu")
    assert torch.ones(4, device="npu").sum().item() == 4
    assert used() == before


@emulated(memory=SIZE)
def test_addresses_are_aligned_and_never_shared():
    tensors = [torch.full((size,), index, dtype=torch.int16, device="npu")
               for index, size in enumerate([1, 3, 511, 513, MIB, 5 * MIB, 20 * MIB])]
    assert all(tensor.data_ptr() % 512 == 0 for tensor in tensors)
    torch.npu.synchronize()
    assert all((tensor == index).all().item() for index, tensor in enumerate(tensors))


@emulated(memory=SIZE)
def test_fragments_are_used_again():
    before = used()
    for round in range(4):
        kept = [torch.empty(30 * MIB, dtype=torch.int8, device="npu") for _ in range(6)]
        del kept[1 - round % 2 :: 2]
        torch.npu.empty_cache()
        more = [torch.empty(30 * MIB, dtype=torch.int8, device="npu") for _ in range(3)]
        del kept, more
    assert used() == before


@emulated(memory=SIZE)
def test_pinned_memory_is_counted():
    torch.npu.synchronize()
    before = emulator.memory().pinned
    host = torch.empty(3 * MIB, dtype=torch.int8, pin_memory=True)
    assert emulator.memory().pinned >= before + 3 * MIB
    assert host.is_pinned()


@emulated(memory=SIZE)
def test_the_nth_allocation_can_fail():
    used()
    emulator.fail("malloc", OUT_OF_MEMORY, nth=2)
    first = torch.empty(30 * MIB, dtype=torch.int8, device="npu")
    emulator.fail("malloc", OUT_OF_MEMORY, times=2)  # the plugin frees its cache and tries again
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(40 * MIB, dtype=torch.int8, device="npu")
    assert torch.empty(40 * MIB, dtype=torch.int8, device="npu").numel() == 40 * MIB
    del first


@emulated(memory=SIZE)
def test_a_copy_beyond_an_allocation_is_refused():
    import ctypes

    lib = ctypes.CDLL("libascendcl.so")
    address, host = ctypes.c_void_p(), ctypes.create_string_buffer(8192)
    assert lib.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(4000), 0) == 0
    at, size = address.value, ctypes.c_size_t(4096)
    assert lib.aclrtMemcpy(address, size, host, size, 1) == 0
    assert lib.aclrtMemcpy(address, ctypes.c_size_t(8192), host, ctypes.c_size_t(8192), 1) == 107000
    assert lib.aclrtMemcpy(host, size, address, size, 1) == 107016  # the wrong direction
    assert lib.aclrtMemcpy(address, ctypes.c_size_t(8), host, size, 1) == 107000  # larger than the destination
    assert lib.aclrtFree(address) == 0
    assert lib.aclrtFree(ctypes.c_void_p(at)) == 107000
    assert lib.aclrtMemcpy(ctypes.c_void_p(at), size, host, size, 1) == 107000  # freed


@emulated(memory=SIZE, poison=True)
def test_new_memory_can_be_full_of_nan():
    assert torch.empty(30 * MIB, device="npu").isnan().all().item()
    torch.npu.empty_cache()
    assert torch.empty(30 * MIB, dtype=torch.bfloat16, device="npu").isnan().all().item()


def expand() -> None:
    """Allocate segments that grow, of memory that is mapped piece by piece."""
    before = used()
    kept = [torch.full((5 * MIB,), index, dtype=torch.int8, device="npu") for index in range(8)]
    torch.npu.synchronize()
    assert all((tensor == index).all().item() for index, tensor in enumerate(kept))
    assert emulator.memory().used >= before + 40 * MIB
    names = {call.name for call in emulator.calls()}
    assert {"aclrtReserveMemAddress", "aclrtMallocPhysical", "aclrtMapMem"} <= names
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(SIZE, dtype=torch.int8, device="npu")
    del kept
    assert used() == before


@needs_npu
def test_expandable_segments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    run(expand, {}, {"memory": SIZE}, fresh=True)
