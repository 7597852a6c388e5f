// Geometry of an attention call: positions of keys and values in the cache, and the division of queries into items.
// See attention.cpp for the layout of the cache and an op's p and n.
#pragma once

#include <algorithm>

#include "attention/cache.h"

namespace npuserve {
namespace NPUSERVE_ISA {

constexpr int64_t SPLIT = ATTENTION_SPLIT;
constexpr int64_t SPLIT_PANELS = SPLIT / LANES;
constexpr int64_t ITEM_ROWS = 96;  // maximum of query heads times queries of an item

struct Shape {
    const Op &op;
    int64_t tokens, q_heads, kv_heads, dim, block_size, stride, group, padded_dim, item_queries;

    explicit Shape(const Call &call)
        : op(call.op), tokens(call.rows), q_heads(op.n[2]), kv_heads(op.n[3]), dim(op.n[4]), block_size(op.n[5]),
          stride(op.n[6]), group(q_heads / kv_heads), padded_dim(ceil_div<int64_t>(dim, LANES) * LANES),
          item_queries(std::max<int64_t>(1, ITEM_ROWS / group)) {}

    int32_t context(int64_t row) const { return op.at<int32_t>(4)[row]; }
    int32_t begin(int64_t row) const { return op.at<int32_t>(5)[row]; }
    int32_t *plan() const { return op.at<int32_t>(7); }
    // Index of a head's block in the cache: the block that holds a row's token.
    int64_t block_index(int64_t row, int64_t head, int64_t token) const {
        return op.at<int32_t>(3)[row * stride + token / block_size] * kv_heads + head;
    }
    // Address of a token's key in the cache C, or of its value; the token is a multiple of the numbers to a word.
    template <class C>
    const char *key(int64_t row, int64_t head, int64_t token) const {
        return op.at<char>(1) + block_index(row, head, token) * (block_size / LANES) * key_panel<C>() +
               token % block_size / LANES * key_panel<C>() + token % LANES * C::WORD;
    }
    template <class C>
    const char *value(int64_t row, int64_t head, int64_t token) const {
        return op.at<char>(2) +
               (block_index(row, head, token) * block_size + token % block_size) / C::PER_WORD * value_stride<C>();
    }
    // Bytes of a panel of keys, and bytes from one word of keys or of values to the next.
    template <class C>
    int64_t key_panel() const {
        return dim / C::PER_WORD * key_stride<C>();
    }
    template <class C>
    static constexpr int64_t key_stride() {
        return LANES * C::WORD;
    }
    template <class C>
    int64_t value_stride() const {
        return padded_dim * C::WORD;
    }
    // Address of the scale of the keys (9) or the values (10) at a token.
    const uint16_t *scales(int which, int64_t row, int64_t head, int64_t token) const {
        return op.at<uint16_t>(which) + block_index(row, head, token) * block_size + token % block_size;
    }

    // Returns the number of rows and stores it as the plan's last number. plan[r]: the number of items before row r's.
    // An item is up to item_queries queries of one request.
    int64_t make_plan() const {
        int64_t rows = 0, items = 0;
        while (rows < op.n[1] && begin(rows) < tokens) {
            plan()[rows] = int32_t(items);
            items += ceil_div<int64_t>(begin(rows + 1) - begin(rows), item_queries);
            rows++;
        }
        plan()[rows] = int32_t(items);
        plan()[op.n[1] + 1] = int32_t(rows);
        return rows;
    }
    int64_t rows() const { return plan()[op.n[1] + 1]; }
    // True if items, each of one query, are also cut by splits, so that few long items occupy all threads.
    bool cut(int64_t items, int threads) const {
        return items == tokens && items <= op.n[7] && items * kv_heads < ATTENTION_UNITS_PER_THREAD * threads;
    }
    int64_t most_splits(int64_t rows) const {
        int64_t most = 1;
        for (int64_t r = 0; r < rows; r++) most = std::max(most, ceil_div<int64_t>(context(r), SPLIT));
        return most;
    }
    // Partial result of an item, split and query head: largest score, sum of weights; weighted sum of values one panel
    // on.
    float *partial(int64_t item, int64_t splits, int64_t split, int64_t q_head) const {
        return op.at<float>(8) + ((item * splits + split) * q_heads + q_head) * (padded_dim + LANES);
    }
};

// Item: queries [first, end) of a row, and the position of the first.
struct Item {
    int64_t row, first, end, position;

    Item(const Shape &s, int64_t rows, int64_t index) {
        row = std::upper_bound(s.plan(), s.plan() + rows, int32_t(index)) - s.plan() - 1;
        first = s.begin(row) + (index - s.plan()[row]) * s.item_queries;
        end = std::min<int64_t>(first + s.item_queries, s.begin(row + 1));
        position = s.context(row) - (s.begin(row + 1) - first);
    }
};

// Causal visibility of a split's tokens: the group of rows of each query sees one token more than the group before.
struct Visibility {
    int64_t first, group, tokens;
    INLINE int64_t by(int64_t row) const { return std::min(tokens, first + row / group); }
};

// Run of a split's tokens in one block: address of its words, number of tokens before it, number of tokens in it.
struct Run {
    const char *at;
    int64_t first, tokens;
    const uint16_t *scales;
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
