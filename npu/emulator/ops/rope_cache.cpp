// Rotary position embedding of queries and keys by position, from one table of cosines and sines.
#include "op.h"

using namespace ops;

namespace {

constexpr const char *kOp = "aclnnRopeWithSinCosCache aclnnRopeWithSinCosCacheV2";
constexpr const char *kDoc = "torch_npu-npu_mrope.md, constraints";

const Rule kMode("aclnnRopeWithSinCosCacheV2", "ropecache.cache_mode", "cache_mode is default without sections",
                 "torch_npu-npu_mrope.md, parameter cache_mode");
const Rule kSection(
    kOp, "ropecache.section",
    "mrope_section is absent or zeros, and positions have one dimension (several sections are not emulated)",
    "torch_npu-npu_mrope.md, parameters mrope_section, positions");
const Rule kPositions(kOp, "ropecache.positions", "positions are int32 or int64, one per token",
                      "torch_npu-npu_mrope.md, parameter positions");
const Rule kDtype(kOp, "ropecache.dtype", "query, key and the table have one dtype, bfloat16, float16 or float32",
                  "torch_npu-npu_mrope.md, parameter cos_sin_cache");
const Rule kShape(kOp, "ropecache.shape", "query and key are (tokens, heads * head_size)",
                  "torch_npu-npu_mrope.md, parameters query, key");
const Rule kTable(kOp, "ropecache.table",
                  "the table is (positions, rotary_dim), and rotary_dim is even and at most head_size", kDoc);
const Rule kRange(kOp, "ropecache.range", "a position is within the table",
                  "torch_npu-npu_mrope.md, parameter positions");
const Rule kRows(kOp, "ropecache.rows", "the numbers of a row of query and key are contiguous; rows may be apart",
                 "aclnn_rope_with_sin_cos_cache.cpp, queryStride and keyStride (cann/ops-transformer)");
const Rule kGap(kOp, "ropecache.gap",
                "rows begin at multiples of 32 bytes, and 0 to 65535 blocks of 32 bytes lie between two",
                "rope_with_sin_cos_cache_f_bf16.h and _fp32.h, srcStride of DataCopy (cann/ops-transformer 3311e26e5)");
const Rule kEmpty(kOp, "ropecache.empty", "positions, query, key and the table are not empty",
                  "aclnnRopeWithSinCosCacheV2.md, parameters");
const Rule kHead(kOp, "ropecache.head_size", "head_size and rotary_dim are multiples of 32, of 16 in float32", kDoc);

// x (tokens, heads * head_size), cos and sin (tokens, 1, rotary_dim / 2). `half` rotates the first with the second half
// of the rotary dimensions; otherwise neighbours are rotated.
at::Tensor turned(const at::Tensor &x, const at::Tensor &cos, const at::Tensor &sin, int64_t head_size, bool half) {
  const auto heads = f32(x).unflatten(-1, {x.size(1) / head_size, head_size});
  const int64_t rotary = 2 * cos.size(-1);
  const auto part = heads.narrow(-1, 0, rotary);
  const auto pairs = half ? part.unflatten(-1, {2, rotary / 2}) : part.unflatten(-1, {rotary / 2, 2}).transpose(-1, -2);
  const auto a = pairs.select(-2, 0), b = pairs.select(-2, 1);
  const auto made = at::stack({a * cos - b * sin, b * cos + a * sin}, half ? -2 : -1).flatten(-2);
  return at::cat({made, heads.narrow(-1, rotary, head_size - rotary)}, -1).flatten(-2);
}

// True if the kernel's copies can take the rows apart: in blocks of 32 bytes, with the gap as a number of 16 bits.
bool apart(const at::Tensor &x) {
  constexpr int64_t block = 32, most_blocks = 65535;
  const int64_t size = x.element_size(), gap = (x.stride(0) - x.size(1)) * size;
  const bool aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % block == 0;
  return aligned && (x.size(0) < 2 || (gap >= 0 && gap % block == 0 && gap / block <= most_blocks));
}

int plan_cache(const char *entry, uint64_t *workspace, aclOpExecutor **executor, const aclTensor *positions,
               const aclTensor *query, const aclTensor *key, const aclTensor *table, const aclIntArray *section,
               int64_t head_size, bool half, int64_t mode, const aclTensor *query_out, const aclTensor *key_out) {
  return plan(entry, workspace, executor, [&] {
    require(kMode, mode == 0, std::to_string(mode));
    const auto p = view(positions), q = view(query), k = view(key), t = view(table);
    const bool plain =
        !section || std::all_of(section->values.begin(), section->values.end(), [](int64_t n) { return n == 0; });
    require(kSection, plain && p.dim() == 1, describe(positions));
    require(kDtype,
            is_one_of(q.scalar_type(), {at::kFloat, at::kHalf, at::kBFloat16}) && query->dtype == key->dtype &&
                query->dtype == table->dtype,
            describe(query) + ", " + describe(key) + " and " + describe(table));
    require(kShape,
            q.dim() == 2 && k.dim() == 2 && q.size(0) == k.size(0) && head_size > 0 && q.size(1) % head_size == 0 &&
                k.size(1) % head_size == 0,
            describe(query) + " and " + describe(key) + " of heads of " + std::to_string(head_size));
    require(kRows, (q.size(1) < 2 || q.stride(1) == 1) && (k.size(1) < 2 || k.stride(1) == 1),
            "strides " + describe(query->strides) + " and " + describe(key->strides));
    require(kEmpty, p.numel() && q.numel() && k.numel() && t.numel(), describe(positions) + " and " + describe(query));
    require(kGap, emu::option("small_heads") || (apart(q) && apart(k)),
            "strides " + describe(query->strides) + " and " + describe(key->strides));
    require(kPositions, is_one_of(p.scalar_type(), {at::kInt, at::kLong}) && p.size(0) == q.size(0),
            describe(positions) + " for query " + describe(query));
    require(kTable, t.dim() == 2 && t.size(1) % 2 == 0 && t.size(1) <= head_size,
            describe(table) + " for heads of " + std::to_string(head_size));
    const int64_t multiple = q.scalar_type() == at::kFloat ? 16 : 32;
    require(kHead, emu::option("small_heads") || (head_size % multiple == 0 && t.size(1) % multiple == 0),
            std::to_string(head_size) + " and " + std::to_string(t.size(1)));
    return [=, q_out = view(query_out), k_out = view(key_out)] {
      const auto at_positions = p.to(at::kLong);
      if (at_positions.numel())
        for (const auto &position : {at_positions.min(), at_positions.max()}) {
          const auto given = position.item<int64_t>();
          require(kRange, given >= 0 && given < t.size(0), std::to_string(given) + " of " + std::to_string(t.size(0)));
        }
      const auto both = f32(t.index_select(0, at_positions)).unsqueeze(1).chunk(2, -1);
      write(q_out, turned(q, both[0], both[1], head_size, half));
      write(k_out, turned(k, both[0], both[1], head_size, half));
    };
  });
}

}  // namespace

// Of CANN 8.5, which lacks the other.
OP(aclnnRopeWithSinCosCache, const aclTensor *positions, const aclTensor *query, const aclTensor *key,
   const aclTensor *table, const aclIntArray *section, int64_t head_size, bool half, const aclTensor *query_out,
   const aclTensor *key_out) {
  return plan_cache(PHASE, positions, query, key, table, section, head_size, half, 0, query_out, key_out);
}

OP(aclnnRopeWithSinCosCacheV2, const aclTensor *positions, const aclTensor *query, const aclTensor *key,
   const aclTensor *table, const aclIntArray *section, int64_t head_size, bool half, int64_t mode,
   const aclTensor *query_out, const aclTensor *key_out) {
  return plan_cache(PHASE, positions, query, key, table, section, head_size, half, mode, query_out, key_out);
}
