// Runtime of kernels lowered to this processor: memory for their buffers, and copies between them.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

std::vector<void*> buffers;

struct MemRef {  // MLIR's descriptor of a memref of any rank: sizes, then as many strides, in elements.
    char *allocated, *aligned;
    int64_t offset, shape[];
};

void copy(int64_t rank, int64_t size, const int64_t* sizes, const char* from, const int64_t* from_strides, char* to,
          const int64_t* to_strides) {
    if (rank == 0) {
        std::memcpy(to, from, size);
        return;
    }
    for (int64_t i = 0; i < sizes[0]; i++)
        copy(rank - 1, size, sizes + 1, from + i * from_strides[0] * size, from_strides + 1,
             to + i * to_strides[0] * size, to_strides + 1);
}

}  // namespace

extern "C" {

void* _mlir_memref_to_llvm_alloc(uint64_t size) {
    buffers.push_back(std::malloc(size));
    return buffers.back();
}

// They are kept until the program ends.
void _mlir_memref_to_llvm_free(void*) {}

void end_program() {
    for (void* buffer : buffers) std::free(buffer);
    buffers.clear();
}

struct Unranked {
    int64_t rank;
    MemRef* memref;
};

void memrefCopy(int64_t size, Unranked* from, Unranked* to) {
    const MemRef &source = *from->memref, &target = *to->memref;
    const int64_t rank = from->rank;
    copy(rank, size, source.shape, source.aligned + source.offset * size, source.shape + rank,
         target.aligned + target.offset * size, target.shape + rank);
}
}
