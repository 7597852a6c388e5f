// Memory for tensors, in large pages where the system grants them.
#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

#include "runtime/pool.h"

using npuserve::LARGE_PAGE;

namespace {
size_t rounded(size_t bytes) { return (bytes + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE; }

constexpr int COLLAPSE = 25;  // MADV_COLLAPSE, which older headers lack (Linux 6.1)

void advise(void *memory, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    madvise(memory, rounded(bytes), MADV_HUGEPAGE);
#endif
}
}  // namespace

void *npuserve_allocate(size_t bytes) {
    // One extra large page, so that the memory can begin at a page border; untouched pages cost nothing.
    size_t whole = rounded(bytes) + LARGE_PAGE;
    void *mapped = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    uintptr_t begin = reinterpret_cast<uintptr_t>(mapped), aligned = rounded(begin), end = aligned + rounded(bytes);
    if (aligned > begin) munmap(mapped, aligned - begin);
    if (begin + whole > end) munmap(reinterpret_cast<void *>(end), begin + whole - end);
    advise(reinterpret_cast<void *>(aligned), bytes);
    return reinterpret_cast<void *>(aligned);
}

void *npuserve_share(int file, int64_t offset, size_t bytes) {
    void *memory = npuserve_allocate(bytes);
    if (!memory) return nullptr;
    void *mapped = mmap(memory, rounded(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, offset);
    if (mapped != MAP_FAILED) {
        advise(memory, bytes);
        // The system makes large pages only of ranges that hold a page.
        for (size_t at = 0; at < bytes; at += LARGE_PAGE) static_cast<void>(static_cast<volatile char *>(memory)[at]);
        // If large pages are scarce, the remainder is in small pages.
        if (madvise(memory, rounded(bytes), COLLAPSE) == 0 || errno != EINVAL) return memory;
    }
    npuserve_free(memory, bytes);
    return nullptr;
}

void npuserve_free(void *memory, size_t bytes) { munmap(memory, rounded(bytes)); }
