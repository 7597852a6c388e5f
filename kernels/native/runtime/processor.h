// Instruction sets of this processor, whether or not this library has kernels for them.
#pragma once

namespace npuserve {

// True if this processor and its system have the instruction set of that name.
bool supported(const char *isa);

}  // namespace npuserve

#pragma GCC visibility push(default)
extern "C" {

// Name of the i-th instruction set that this processor has, the widest first; null past the last.
const char *npuserve_processor_isa(int i);

}
#pragma GCC visibility pop
