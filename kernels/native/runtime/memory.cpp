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

// Returns a new mapping that begins at a large page, or null.
void *mapped(size_t bytes, int protection, int flags) {
    // One extra large page, so that the memory can begin at a page border; untouched pages cost nothing.
    size_t whole = rounded(bytes) + LARGE_PAGE;
    void *made = mmap(nullptr, whole, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (made == MAP_FAILED) return nullptr;
    uintptr_t begin = reinterpret_cast<uintptr_t>(made), aligned = rounded(begin), end = aligned + rounded(bytes);
    if (aligned > begin) munmap(made, aligned - begin);
    if (begin + whole > end) munmap(reinterpret_cast<void *>(end), begin + whole - end);
    return reinterpret_cast<void *>(aligned);
}
}  // namespace

void *npuserve_allocate(size_t bytes) {
    void *memory = mapped(bytes, PROT_READ | PROT_WRITE, 0);
    if (memory) advise(memory, bytes);
    return memory;
}

void *npuserve_reserve(size_t bytes) { return mapped(bytes, PROT_NONE, MAP_NORESERVE); }

int npuserve_share(void *memory, int file, int64_t offset, size_t bytes) {
    void *made = mmap(memory, rounded(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, offset);
    if (made == MAP_FAILED) return 1;
    advise(memory, bytes);
    // The system makes large pages only of ranges that hold a page.
    for (size_t at = 0; at < bytes; at += LARGE_PAGE) static_cast<void>(static_cast<volatile char *>(memory)[at]);
    // If large pages are scarce, the remainder is in small pages.
    return madvise(memory, rounded(bytes), COLLAPSE) != 0 && errno == EINVAL;
}

void npuserve_free(void *memory, size_t bytes) { munmap(memory, rounded(bytes)); }
