// Device memory: a range of host addresses of the device's size; and pinned host memory.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "acl/acl.h"
#include "device.h"
#include "memory.h"

namespace emu {

namespace {

constexpr size_t SMALL = 4096, HUGE = size_t{2} << 20;  // page sizes; HUGE for allocations of 1 MiB or more

std::mutex lock;
size_t capacity = size_t{4} << 30, used = 0, peak = 0;
char *arena = nullptr;
bool poison = false;
std::map<char *, size_t> taken;        // allocations in the arena
std::map<char *, size_t> pinned;       // pinned host memory
std::set<void *> ours;                 // the allocations of `pinned` made by aclrtMallocHost
std::map<char *, size_t> reserved;     // virtual ranges without memory (torch_npu's expandable segments)
std::map<char *, size_t> mapped;       // the parts of `reserved` that have memory

struct Physical {
  size_t size;
};
std::set<Physical *> physical;

size_t pages(size_t size) {
  size_t page = size >= (size_t{1} << 20) ? HUGE : SMALL;
  return (std::max<size_t>(size, 1) + page - 1) / page * page;
}

// True if one of the ranges contains [address, address + size), or with `joined` several ranges without a gap.
bool covering(const std::map<char *, size_t> &ranges, const void *address, size_t size, bool joined = false) {
  auto at = static_cast<char *>(const_cast<void *>(address)), end = at + size;
  auto range = ranges.upper_bound(at);
  if (range == ranges.begin()) return false;
  --range;
  for (; range != ranges.end() && range->first <= at; ++range) {
    at = range->first + range->second;
    if (end <= at) return true;
    if (!joined) break;
  }
  return false;
}

int out_of_memory(const char *name, size_t size) {
  return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s: %zu bytes do not fit, %zu of %zu of device memory are free", name,
              size, capacity - used, capacity);
}

// First fit. The arena is one reservation of address space; pages are allocated when they are touched.
char *place(size_t size, size_t page) {
  if (!arena) {
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *made = mmap(nullptr, capacity + HUGE, PROT_READ | PROT_WRITE, kind, -1, 0);
    if (made == MAP_FAILED) return nullptr;
    arena = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(made) + HUGE - 1) / HUGE * HUGE);
  }
  auto aligned = [&](char *at) { return arena + (at - arena + page - 1) / page * page; };
  char *at = arena;
  for (auto &[start, length] : taken) {
    if (at + size <= start) break;
    at = aligned(start + length);
  }
  return at + size <= arena + capacity ? at : nullptr;
}

int allocate(const char *name, void **address, size_t wanted, bool poisoned) {
  if (int code = injected("malloc")) return code;
  settle();
  if (!wanted || !address) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: size must be 1 or more", name);
  std::lock_guard<std::mutex> guard(lock);
  size_t size = pages(wanted);
  if (size > capacity - used) return out_of_memory(name, wanted);
  char *at = place(size, size % HUGE ? SMALL : HUGE);
  if (!at) return out_of_memory(name, wanted);
  taken[at] = size;
  used += size;
  peak = std::max(peak, used);
  if (poisoned) {
    if (size % HUGE == 0) madvise(at, size, MADV_HUGEPAGE);  // a fault for each small page would take most of the time
    memset(at, 0xff, size);                                  // NaN in every floating type, -1 in the integers
  }
  *address = at;
  return 0;
}

// Returns false if it was not allocated.
bool release(void *address) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = taken.find(static_cast<char *>(address));
  if (found == taken.end()) return false;
  madvise(address, found->second, MADV_DONTNEED);
  used -= found->second;
  taken.erase(found);
  return true;
}

int allocate_host(const char *name, void **address, size_t size) {
  if (int code = injected("malloc_host")) return code;
  if (!size) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: size must be 1 or more", name);
  void *made = aligned_alloc(SMALL, (size + SMALL - 1) / SMALL * SMALL);
  if (!made) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s: the host has no %zu bytes", name, size);
  std::lock_guard<std::mutex> guard(lock);
  pinned[static_cast<char *>(made)] = size;
  ours.insert(made);
  *address = made;
  return 0;
}

}  // namespace

bool on_device(const void *address, size_t size) {
  std::lock_guard<std::mutex> guard(lock);
  return covering(taken, address, size) || covering(mapped, address, size, true);
}

bool is_pinned(const void *address, size_t size) {
  std::lock_guard<std::mutex> guard(lock);
  return covering(pinned, address, size);
}

bool touches_device(const void *address) {
  std::lock_guard<std::mutex> guard(lock);
  auto at = static_cast<const char *>(address);
  return (arena && at >= arena && at < arena + capacity) || covering(reserved, address, 1);
}

int take_memory(const char *name, void **address, size_t bytes) { return allocate(name, address, bytes, false); }

void give_memory(void *address) { release(address); }

}  // namespace emu

using namespace emu;

aclError aclrtMalloc(void **address, size_t size, aclrtMemMallocPolicy) {
  ENTER();
  return allocate(__func__, address, size + 32, poison);  // 32 bytes are added, as documented
}

aclError aclrtMallocAlign32(void **address, size_t size, aclrtMemMallocPolicy) {
  ENTER();
  return allocate(__func__, address, size, poison);
}

aclError aclrtFree(void *address) {
  ENTER();
  return release(address) ? 0 : fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %p was not allocated", __func__, address);
}

aclError aclrtMallocHost(void **address, size_t size) {
  ENTER();
  return allocate_host(__func__, address, size);
}

aclError aclrtMallocHostWithCfg(void **address, uint64_t size, aclrtMallocConfig *) {
  ENTER();
  return allocate_host(__func__, address, size);
}

aclError aclrtFreeHost(void *address) {
  ENTER();
  std::lock_guard<std::mutex> guard(lock);
  if (!ours.erase(address)) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %p was not allocated", __func__, address);
  pinned.erase(static_cast<char *>(address));
  free(address);
  return 0;
}

aclError aclrtHostRegister(void *address, uint64_t size, aclrtHostRegisterType, void **on_device) {
  ENTER();
  std::lock_guard<std::mutex> guard(lock);
  pinned[static_cast<char *>(address)] = size;
  if (on_device) *on_device = address;
  return 0;
}

aclError aclrtHostRegisterV2(void *address, uint64_t size, uint32_t) {
  ENTER();
  std::lock_guard<std::mutex> guard(lock);
  pinned[static_cast<char *>(address)] = size;
  return 0;
}

aclError aclrtHostUnregister(void *address) {
  ENTER();
  std::lock_guard<std::mutex> guard(lock);
  if (!ours.count(address)) pinned.erase(static_cast<char *>(address));
  return 0;
}

aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *attributes) {
  ENTER();
  memset(attributes, 0, sizeof *attributes);
  attributes->location.type = touches_device(address)    ? ACL_MEM_LOCATION_TYPE_DEVICE
                              : is_pinned(address, 1) ? ACL_MEM_LOCATION_TYPE_HOST
                                                         : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  attributes->pageSize = SMALL;
  return 0;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free_bytes, size_t *total) {
  ENTER();
  std::lock_guard<std::mutex> guard(lock);
  *free_bytes = capacity - used;
  *total = capacity;
  return 0;
}

aclError aclrtReserveMemAddress(void **address, size_t size, size_t, void *, uint64_t) {
  ENTER();
  void *made = mmap(nullptr, size + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED)
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s: the host has no %zu bytes of addresses", __func__, size);
  char *at = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(made) + HUGE - 1) / HUGE * HUGE);
  std::lock_guard<std::mutex> guard(lock);
  reserved[at] = size;
  *address = at;
  return 0;
}

aclError aclrtReleaseMemAddress(void *address) {
  ENTER();
  std::lock_guard<std::mutex> guard(lock);
  auto found = reserved.find(static_cast<char *>(address));
  if (found == reserved.end()) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %p was not reserved", __func__, address);
  munmap(address, found->second);
  reserved.erase(found);
  return 0;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *property, uint64_t) {
  ENTER();
  if (int code = injected("malloc")) return code;
  if (property->location.type != ACL_MEM_LOCATION_TYPE_DEVICE)
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s: physical host memory is not emulated", __func__);
  settle();
  std::lock_guard<std::mutex> guard(lock);
  if (size > capacity - used) return out_of_memory(__func__, size);
  used += size;
  peak = std::max(peak, used);
  auto made = new Physical{size};
  physical.insert(made);
  *handle = made;
  return 0;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  ENTER();
  std::lock_guard<std::mutex> guard(lock);
  auto freed = static_cast<Physical *>(static_cast<void *>(handle));
  if (!physical.erase(freed)) return fail(ACL_ERROR_RT_INVALID_HANDLE, "%s: no such memory", __func__);
  used -= freed->size;
  delete freed;
  return 0;
}

aclError aclrtMapMem(void *address, size_t size, size_t, aclrtDrvMemHandle handle, uint64_t) {
  ENTER();
  std::lock_guard<std::mutex> guard(lock);
  bool known = physical.count(static_cast<Physical *>(static_cast<void *>(handle)));
  if (!known || !covering(reserved, address, size))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: no such memory, or no such reserved addresses", __func__);
  mprotect(address, size, PROT_READ | PROT_WRITE);
  mapped[static_cast<char *>(address)] = size;
  if (poison) memset(address, 0xff, size);
  return 0;
}

aclError aclrtUnmapMem(void *address) {
  ENTER();
  std::lock_guard<std::mutex> guard(lock);
  auto found = mapped.find(static_cast<char *>(address));
  if (found == mapped.end()) return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %p is not mapped", __func__, address);
  madvise(address, found->second, MADV_DONTNEED);
  mprotect(address, found->second, PROT_NONE);
  mapped.erase(found);
  return 0;
}

extern "C" {

// Call before the first allocation.
EMU_API void emu_memory(uint64_t bytes, int poisoned) {
  capacity = bytes / HUGE * HUGE;
  poison = poisoned;
}

EMU_API uint64_t emu_memory_used() {
  std::lock_guard<std::mutex> guard(lock);
  return used;
}

EMU_API uint64_t emu_memory_peak() {
  std::lock_guard<std::mutex> guard(lock);
  return peak;
}

EMU_API uint64_t emu_pinned() {
  std::lock_guard<std::mutex> guard(lock);
  uint64_t bytes = 0;
  for (void *address : ours) bytes += pinned.at(static_cast<char *>(address));
  return bytes;
}

}  // extern "C"
