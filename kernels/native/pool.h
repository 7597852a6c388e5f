#pragma once

#include "op.h"

namespace npuserve {

// The kernels of each instruction set that this library was built with, the widest first.
extern const KernelTable *const TABLES[];

// True if this processor has the instruction set of that name.
bool supported(const char *isa);

}  // namespace npuserve

// What Python calls.
#pragma GCC visibility push(default)
extern "C" {

// The name of the i-th instruction set that was built and that this processor has; null past the last.
const char *npuserve_isa(int i);

// The number of the kernel of that name, the same for every instruction set; -1 if there is none.
int npuserve_kernel(const char *name);

// The digest of the sources that this library was built from and its instruction sets, as the build was told.
const char *npuserve_source(void);

// Threads of all runs from now on, the caller's included. cpus: the processor of each, the caller's first, which is for
// the caller to go to; null leaves them to the system. Not while a program runs. Returns 0, or 1 if the system refuses a
// thread: fewer serve then.
int npuserve_set_threads(int threads, const int *cpus);

// Runs ops one after the other on the i-th instruction set of npuserve_isa. rows: in place of each op's own n[0]; -1
// for none. seconds: of each op, where not null. May be called from several threads; each waits for its own ops.
// Returns 0, or 1 if there was no memory for the kernels' own use: what the ops write is undefined then.
int npuserve_run(int isa, const npuserve::Op *ops, int64_t count, int64_t rows, double *seconds);

// Zeroed memory in large pages where the system grants them; null if there is none.
void *npuserve_allocate(size_t bytes);

// What lies in an open file in memory from `offset` on, a multiple of 2 MiB, for all who map it, in large pages as far
// as there are such; null where the system makes none of a file. The file is at least as long as the end of the last
// large page.
void *npuserve_share(int file, int64_t offset, size_t bytes);
void npuserve_free(void *memory, size_t bytes);
}
#pragma GCC visibility pop
