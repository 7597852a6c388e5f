// Writes of new keys and values to slots of a paged cache.
#include "op.h"

using namespace ops;

namespace {

constexpr const char *kOp = "aclnnScatterPaKvCache";
constexpr const char *kDoc = "torch_npu-npu_scatter_pa_kv_cache.md, constraints";

const Rule kDtype(kOp, "scatter.dtype", "key is float16, bfloat16 or int8",
                  "aclnnScatterPaKvCache.md, parameter key on A2/A3");
const Rule kSame(kOp, "scatter.same_dtype", "key, value and the caches have one dtype", kDoc);
const Rule kShape(
    kOp, "scatter.shape",
    "key and value have 3 dimensions and agree in the first two (4 dimensions, with compression, are not emulated)",
    kDoc);
const Rule kSlots(kOp, "scatter.slots", "slot_mapping is int32 or int64 with one slot per token",
                  "torch_npu-npu_scatter_pa_kv_cache.md, parameter slot_mapping");
const Rule kDense(kOp, "scatter.contiguous", "all tensors are contiguous", kDoc);
const Rule kMode(kOp, "scatter.cache_mode", "cache_mode is Norm or PA_NZ",
                 "torch_npu-npu_scatter_pa_kv_cache.md, parameter cache_mode");
const Rule kNorm(kOp, "scatter.norm_shape", "with Norm a cache is (blocks, block_size, heads, head_dim)",
                 "aclnnScatterPaKvCache.md, scenario 2");
const Rule kNz(kOp, "scatter.nz_shape",
               "with PA_NZ a cache is (blocks, heads * head_dim / c, block_size, c) of c elements in 32 bytes",
               "aclnnScatterPaKvCache.md, scenario 1");

const Rule kRange(kOp, "scatter.range", "a slot is within the cache, from 0", kDoc);
const Rule kDistinct(kOp, "scatter.distinct", "no slot is given twice", kDoc);

void check_cache(const at::Tensor &x, const aclTensor *cache, bool nz) {
  const auto &s = cache->sizes;
  const int64_t width = x.size(1) * x.size(2), c = 32 / x.element_size();
  if (nz)
    require(kNz, s.size() == 4 && s[3] == c && width % c == 0 && s[1] == width / c,
            describe(cache) + " for " + describe(x.sizes()));
  else
    require(kNorm, s.size() == 4 && s[2] == x.size(1) && s[3] == x.size(2),
            describe(cache) + " for " + describe(x.sizes()));
}

// Writes row i of x to slot slots[i].
void scatter(const at::Tensor &x, const at::Tensor &cache, const at::Tensor &slots, bool nz) {
  const int64_t block = cache.size(nz ? 2 : 1);
  const auto at_block = at::floor_divide(slots, block), offset = at::remainder(slots, block);
  const auto rows = x.reshape(nz ? std::vector<int64_t>{x.size(0), cache.size(1), cache.size(3)} : x.sizes().vec());
  auto place = nz ? cache.transpose(1, 2) : cache;  // (blocks, block_size, ...)
  place.index_put_({at_block, offset}, rows);
}

}  // namespace

OP(aclnnScatterPaKvCache, const aclTensor *key, const aclTensor *key_cache, const aclTensor *slots,
   const aclTensor *value, const aclTensor *value_cache, const aclTensor *compress_lens,
   const aclTensor *compress_offsets, const aclTensor *lengths, char *mode, char *, const aclIntArray *,
   const aclIntArray *) {
  return plan(PHASE, [&] {
    const std::string cache_mode = mode && *mode ? mode : "Norm";
    require(kMode, cache_mode == "Norm" || cache_mode == "PA_NZ", cache_mode);
    const bool nz = cache_mode == "PA_NZ";
    const auto k = view(key), v = view(value), s = view(slots);
    const auto k_cache = nz && is_nz(key_cache)
                             ? at::from_blob(key_cache->data, key_cache->sizes, at::TensorOptions(k.scalar_type()))
                             : view(key_cache);
    const auto v_cache = nz && is_nz(value_cache)
                             ? at::from_blob(value_cache->data, value_cache->sizes, at::TensorOptions(v.scalar_type()))
                             : view(value_cache);
    require(kDtype,
            is_one_of(k.scalar_type(), {at::kHalf, at::kBFloat16, at::kChar}) ||
                (k.scalar_type() == at::kFloat && emu::option("fp32")),
            describe(key));
    require(kSame, key->dtype == value->dtype && key->dtype == key_cache->dtype && key->dtype == value_cache->dtype,
            describe(key) + ", " + describe(value) + ", " + describe(key_cache) + ", " + describe(value_cache));
    require(kShape,
            !compress_lens && !compress_offsets && !lengths && k.dim() == 3 && v.dim() == 3 && k.size(0) == v.size(0) &&
                k.size(1) == v.size(1),
            describe(key) + " and " + describe(value));
    require(kSlots,
            is_one_of(s.scalar_type(), {at::kInt, at::kLong}) && slots->sizes == std::vector<int64_t>{k.size(0)},
            describe(slots) + " for key " + describe(key));
    require(kDense,
            k.is_contiguous() && v.is_contiguous() && k_cache.is_contiguous() && v_cache.is_contiguous() &&
                s.is_contiguous(),
            "one with strides");
    check_cache(k, key_cache, nz);
    check_cache(v, value_cache, nz);
    return [=] {
      const int64_t end = k_cache.size(0) * k_cache.size(nz ? 2 : 1);
      const auto at_slots = s.to(at::kLong);
      if (at_slots.numel())
        for (const auto &slot : {at_slots.min(), at_slots.max()}) {
          const auto given = slot.item<int64_t>();
          require(kRange, given >= 0 && given < end, std::to_string(given) + " of " + std::to_string(end));
        }
      const auto distinct = std::get<0>(at::_unique(at_slots, /*sorted=*/false)).numel();
      require(kDistinct, distinct == at_slots.numel(),
              std::to_string(distinct) + " slots for " + std::to_string(at_slots.numel()) + " tokens");
      scatter(k, k_cache, at_slots, nz);
      scatter(v, v_cache, at_slots, nz);
    };
  });
}

static const Rule kNdDtype("aclnnScatterNdUpdate", "scatternd.dtype",
                           "the input is float32, float16, bfloat16, bool, int64 or int8, and updates have its dtype",
                           "torch_npu-npu_scatter_nd_update_.md, parameters input, updates on A2/A3");
static const Rule kNdIndices("aclnnScatterNdUpdate", "scatternd.indices",
                             "indices are int32 or int64 of 2 dimensions or more, the last at most the input's number",
                             "torch_npu-npu_scatter_nd_update_.md, constraints");
static const Rule kNdUpdates("aclnnScatterNdUpdate", "scatternd.updates",
                             "updates have the shape of indices without its last dimension a, then that of input "
                             "without its first a",
                             "torch_npu-npu_scatter_nd_update_.md, constraints");
static const Rule kNdRange("aclnnScatterNdUpdate", "scatternd.range", "an index is within the input, from 0",
                           "torch_npu-npu_scatter_nd_update_.md, parameter indices");

OP(aclnnScatterNdUpdate, const aclTensor *input, const aclTensor *indices, const aclTensor *updates) {
  return plan(PHASE, [&] {
    const auto dtype = scalar_type(input->dtype);
    require(kNdDtype,
            input->dtype == updates->dtype &&
                is_one_of(dtype, {at::kFloat, at::kHalf, at::kBFloat16, at::kBool, at::kLong, at::kChar}),
            describe(input) + " and " + describe(updates));
    const auto &places = indices->sizes, &sizes = input->sizes;
    require(kNdIndices,
            is_one_of(scalar_type(indices->dtype), {at::kInt, at::kLong}) && places.size() >= 2 &&
                places.back() <= static_cast<int64_t>(sizes.size()),
            describe(indices) + " for " + describe(input));
    std::vector<int64_t> shape(places.begin(), places.end() - 1);
    shape.insert(shape.end(), sizes.begin() + places.back(), sizes.end());
    require(kNdUpdates, updates->sizes == shape, describe(updates) + " instead of " + describe(shape));
    return [=, x = view(input), i = view(indices), u = view(updates)]() mutable {
      c10::List<std::optional<at::Tensor>> at_each;
      for (int64_t column = 0; column < i.size(-1); column++) {
        const auto at_dim = i.select(-1, column).to(at::kLong);
        if (at_dim.numel()) {
          const auto first = at_dim.min().item<int64_t>(), last = at_dim.max().item<int64_t>();
          require(kNdRange, first >= 0 && last < x.size(column),
                  std::to_string(first < 0 ? first : last) + " of " + std::to_string(x.size(column)));
        }
        at_each.push_back(at_dim);
      }
      x.index_put_(at_each, u);
    };
  });
}
