// Constants that both sides of the interface use. tables.cpp lists them for Python, which reads them when it loads the
// library (kernels/native/binding.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace npuserve {

constexpr int OP_POINTERS = 13, OP_SIZES = 12, OP_FLOATS = 4;  // p, n and f of an op
constexpr int LANES = 16;  // lanes of a vector; columns of a panel of packed weights, tokens of a panel of packed keys
constexpr int WORD_BYTES = 4;                          // bytes of a word along K in products with weights
constexpr int INT8_CACHE_PER_WORD = 2;                 // numbers to a word of an int8 KV cache
constexpr int64_t COMPACT_BLOCK = 128;                 // numbers along K to a block of a compact weight
constexpr int64_t COMPACT_HEADER_BYTES = 64;           // bytes of such a block's header
constexpr int64_t ATTENTION_SPLIT = 256;               // tokens of a split of a context
constexpr int64_t ATTENTION_UNITS_PER_THREAD = 16;     // fewer units than this are divided by splits
constexpr int64_t GREEDY_PART = 16384;                 // columns of a part of `greedy`
constexpr int64_t LOGPROBS_PART = 16384;               // columns of a part of `logprobs`
constexpr int64_t LOGPROBS_BLOCK = 128;                // columns of a block, whose largest logit `logprobs` keeps
constexpr int64_t RANK_LINE_BYTES = 64;                 // bytes of a rank's counter in the region of a group
constexpr size_t LARGE_PAGE = size_t(2) << 20;         // bytes

}  // namespace npuserve
