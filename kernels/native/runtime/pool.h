#pragma once

#include "runtime/op.h"
#include "runtime/processor.h"

namespace npuserve {

// The kernels of each instruction set in this library, the widest first.
extern const KernelTable *const TABLES[];

}  // namespace npuserve

// Interface for Python.
#pragma GCC visibility push(default)
extern "C" {

// Name of the i-th instruction set that is both built and supported by this processor; null past the last.
const char *npuserve_isa(int i);

// Number of the kernel of that name, the same for every instruction set; -1 if there is none.
int npuserve_kernel(const char *name);

// Name and value of the i-th constant shared with Python (constants.h); null past the last.
const char *npuserve_constant(int i, int64_t *value);

// Digest of the sources and the instruction sets of this library, as passed by the build.
const char *npuserve_source(void);

// Sets the threads of later runs, including the caller. cpus: the processor of each thread, beginning with the caller.
// The caller binds itself to the first. Null leaves the choice to the system. Not allowed while a program runs. Returns
// 0, or 1 if the system refuses a thread; fewer threads are used then.
int npuserve_set_threads(int threads, const int *cpus);

// Runs ops in sequence on the i-th instruction set of npuserve_isa. rows: replaces n[0] of each op; -1 keeps it.
// seconds: receives the duration of each op, unless null. Thread-safe; each caller waits for its own ops. Returns 0, or
// 1 if the kernels got no memory for their scratch; the outputs of the ops are then undefined.
int npuserve_run(int isa, const npuserve::Op *ops, int64_t count, int64_t rows, double *seconds);

// Zeroed memory, in large pages where the system grants them; null if there is none.
void *npuserve_allocate(size_t bytes);

// Address space without memory, which begins at a large page; null if there is none.
void *npuserve_reserve(size_t bytes);

// Maps the contents of an open file in memory from `offset`, a multiple of 2 MiB, to `memory`, a large page of reserved
// address space. All processes that map the file share them. Uses large pages as far as available. Returns 0, or 1 if
// the system makes no large pages of files. The file must be at least as long as the end of the last large page.
int npuserve_share(void *memory, int file, int64_t offset, size_t bytes);

// Unmaps memory that npuserve_allocate or npuserve_reserve returned.
void npuserve_free(void *memory, size_t bytes);
}
#pragma GCC visibility pop
