// Attention over a paged key-value cache, and writes to the cache.
#include "op.h"

using namespace ops;

namespace {

constexpr const char *kFia = "aclnnFusedInferAttentionScoreV3 aclnnFusedInferAttentionScoreV4";
#define FIA_RULE(NAME, ID, TEXT, SOURCE) const Rule NAME(kFia, "fia." ID, TEXT, SOURCE)
#define V3 "aclnnFusedInferAttentionScoreV3.md, constraints, "
#define V4 "aclnnFusedInferAttentionScoreV4.md, constraints, "

FIA_RULE(kDtype, "dtype", "query is float16 or bfloat16 (int8 is not emulated)",
         "aclnnFusedInferAttentionScoreV4.md, parameter query");
FIA_RULE(kSameDtype, "kv_dtype", "key and value have the dtype of query, or both are int8 (int4 is not emulated)",
         "aclnnFusedInferAttentionScoreV3.md, parameters key, value");
FIA_RULE(kSameShape, "kv_shape", "key and value have one shape", V3 "key and value");
FIA_RULE(kDense, "contiguous", "query, key, value, the mask and the block table are contiguous",
         "aclnnFusedInferAttentionScoreV3.md, parameters, non-contiguous tensors");
FIA_RULE(kLayout, "layout", "the input layout is TND, BSH, BSND or BNSD (the others are not emulated)",
         "aclnnFusedInferAttentionScoreV3.md, parameter inputLayout");
FIA_RULE(kHeads, "heads", "the query has num_heads heads, 256 at most", V3 "Q_S > 1, N");
FIA_RULE(kGroup, "group", "num_heads is a multiple of num_key_value_heads, 64 times at most", V3 "numKeyValueHeads");
FIA_RULE(kKvHeads, "kv_heads", "key and value have num_key_value_heads heads of the query's head_dim",
         V3 "numKeyValueHeads");
FIA_RULE(kTndHead, "tnd_head_dim",
         "with TND head_dim is 128, or 64 without groups and without paging, or above 128 up to 256 with more query heads "
         "than KV heads, inner_precise 0 and, with paging, a cache of (blocks, block_size, kv_heads * head_dim)",
         V4 "TND, Q_D, K_D, V_D (CANN 9.0.0); torch_npu-npu_fused_infer_attention_score_v2.md, MHA; "
         "fused_infer_attention_score_tiling.cpp, IsUsingFAI (CANN 8.5.0)");
FIA_RULE(kHeadDim, "head_dim", "head_dim is a multiple of 16, 512 at most", V3 "Q_S > 1, D");
FIA_RULE(kTokens, "tokens", "with TND there are 1048576 tokens at most", V3 "TND, T");
FIA_RULE(kGiven, "lengths",
         "with TND actual_seq_lengths and actual_seq_lengths_kv are given, with paging actual_seq_lengths_kv",
         V3 "TND and page attention");
FIA_RULE(kBatch, "batch", "with TND there are 1 to 4096 requests", V3 "TND, actualSeqLengths");
FIA_RULE(kCumulative, "cumulative",
         "with TND actual_seq_lengths counts from the start of the batch and never decreases",
         V3 "TND, actualSeqLengths");
FIA_RULE(kLast, "last", "the last of actual_seq_lengths is the number of tokens T",
         "fused_infer_attention_score_tiling_check_feature.cpp, CheckFeatureActualSeqLensQData");
FIA_RULE(kKvLength, "kv_lengths", "actual_seq_lengths_kv has one length per request, no more than its blocks hold",
         V3 "actualSeqLengthsKv");
FIA_RULE(kCausal, "causal_lengths", "with sparse_mode 3 no request has more query than key tokens", V3 "TND, sparse=3");
FIA_RULE(kBlockSize, "block_size",
         "block_size is a multiple of 16 up to 512 (TND: 128), and of 128 if a request has more than one token",
         V3 "page attention, blockSize; TND and page attention");
FIA_RULE(kTable, "block_table", "the block table is int32 of (requests, at least the blocks of the longest)",
         V3 "page attention, blockTable");
FIA_RULE(kCache, "cache_shape",
         "a paged cache is (blocks, block_size, kv_heads * head_dim) or (blocks, kv_heads, block_size, head_dim)",
         V3 "page attention, BnBsH and BnNBsD");
FIA_RULE(kStride, "cache_width",
         "kv_heads * head_dim is at most 65535 where the cache is (blocks, block_size, kv_heads * head_dim)",
         V3 "page attention, BnBsH");
FIA_RULE(kSparse, "sparse_mode",
         "with TND sparse_mode is 0 without a mask or 3 with one, else 0, 2 or 3 (1 and 4 are not emulated)",
         V3 "TND, sparse; sparseMode");
FIA_RULE(kMask, "mask", "with sparse_mode 2 or 3 the mask is bool, int8 or uint8 of (2048, 2048)",
         V3 "sparseMode; parameter attenMaskOptional");
FIA_RULE(kScales, "antiquant", "int8 keys and values have a key and a value antiquant scale, and others have none",
         V3 "Q_S = 1, separate antiquant parameters of key and value");
FIA_RULE(kScale, "antiquant_scale", "in mode 5 the scales are contiguous float32 of (blocks, kv_heads, block_size)",
         "torch_npu-npu_fused_infer_attention_score_v2.md, Q_S = 1, per token and head with page attention; "
         "incre_flash_attention_tiling_check.cpp, CheckKVAntiQuantParamsShapeInPagedAttention");
FIA_RULE(kMode, "antiquant_mode",
         "key and value antiquant mode are equal, and 5 with paging (the others are not emulated)",
         V3 "keyAntiquantMode, valueAntiquantMode; incre_flash_attention_tiling_check.cpp, CheckKVAntiQuantMode");
FIA_RULE(kOneQuery, "antiquant_queries", "with antiquant mode 5 a request has one query",
         V3 "keyAntiquantMode, Q_S >= 2 on A2");
FIA_RULE(kAntiLayout, "antiquant_layout", "with antiquant scales the layout is not TND",
         "torch_npu-npu_fused_infer_attention_score.md, constraints of TND");
FIA_RULE(kAntiBlock, "antiquant_block", "with an int8 cache block_size is a multiple of 32",
         V3 "Q_S = 1, page attention, blockSize on A2");
FIA_RULE(kAntiHead, "antiquant_head_dim", "with an int8 cache head_dim is a multiple of 32",
         V3 "Q_S > 1, D on A2");
FIA_RULE(kPrecise, "inner_precise", "inner_precise is 0 to 3", V3 "innerPrecise");
FIA_RULE(kOther, "features",
         "full quantization, offsets, prefixes, padding sizes, position shifts, sinks and rope inputs are not emulated",
         "this emulator");
FIA_RULE(kLse, "lse", "the log-sum-exp is float32 of (T, N, 1), or (B, N, S, 1), where it is asked for",
         V3 "softmaxLse");

// Keys from which the device may split a context over its cores (fused_infer_attention_score_tiling.cpp).
constexpr int64_t kSplit = 1024;

struct Attention {
  const aclTensor *query;
  const aclTensorList *keys, *values;
  const aclTensor *mask;
  const aclIntArray *lengths, *kv_lengths;
  const aclTensor *table;
  int64_t heads;
  double scale;
  const char *layout;
  int64_t kv_heads, sparse_mode, inner_precise, block_size;
  bool wants_lse;
  const aclTensor *out, *lse;
  const aclTensor *key_scale, *value_scale;
  int64_t key_mode, value_mode;
  bool other;  // an input that is not emulated
};

struct Request {
  int64_t tokens, start, context;
};

bool dense(const aclTensor *tensor) { return !tensor || view(tensor).is_contiguous(); }

// Mask of the keys that a query may not see, by (key's position - query's position). It is read from the first row and
// column of the (2048, 2048) mask. A wrong mask thus gives wrong numbers, as on the device.
at::Tensor hidden(const at::Tensor &mask, int64_t queries, int64_t keys, int64_t shift) {
  const auto distance = (at::arange(keys).unsqueeze(0) - (at::arange(queries) + shift).unsqueeze(1)).clamp(-2047, 2047);
  const auto flags = mask.reshape({2048, 2048});
  const auto by_distance =
      at::cat({flags.select(1, 0).slice(0, 1).flip(0), flags.select(0, 0)}).to(at::kBool);  // -2047 ... 2047
  return by_distance.index_select(0, (distance + 2047).flatten()).reshape(distance.sizes());
}

// Attends for one request: q (S, N, D), k and v (L, kv_heads, D); `masked` (S, L) or (1 or N, S, L) or undefined.
// Returns (S, N, D) and (S, N, 1) in float32.
std::pair<at::Tensor, at::Tensor> attend(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, double scale,
                                         const at::Tensor &masked) {
  const int64_t s = q.size(0), n = q.size(1), d = q.size(2), kv = k.size(1), l = k.size(0);
  if (l == 0)
    return {at::zeros({s, n, v.size(2)}, at::kFloat),
            at::full({s, n, 1}, -std::numeric_limits<double>::infinity(), at::kFloat)};
  const auto queries = f32(q).permute({1, 0, 2}).reshape({kv, n / kv * s, d});
  auto scores = at::bmm(queries, f32(k).permute({1, 2, 0})).mul_(scale).reshape({n, s, l});
  if (masked.defined()) scores = scores.masked_fill(masked, -std::numeric_limits<double>::infinity());
  const auto lse = at::logsumexp(scores, {-1}, true);
  const auto weights = at::nan_to_num((scores - lse).exp(), 0.0);
  const auto mixed = at::bmm(weights.reshape({kv, n / kv * s, l}), f32(v).permute({1, 0, 2}));
  return {mixed.reshape({n, s, v.size(2)}).permute({1, 0, 2}), lse.permute({1, 0, 2})};
}

std::vector<Request> requests_of(const Attention &a, bool tnd, bool paged, int64_t batch, int64_t tokens,
                                 int64_t context) {
  std::vector<Request> out;
  if (tnd) {
    require(kGiven, a.lengths && a.kv_lengths, a.lengths ? "no actual_seq_lengths_kv" : "no actual_seq_lengths");
    const auto &ends = a.lengths->values;
    require(kBatch, !ends.empty() && ends.size() <= 4096, std::to_string(ends.size()));
    int64_t last = 0;
    for (const auto end : ends) {
      require(kCumulative, end >= last, describe(ends));
      out.push_back({end - last, last, 0});
      last = end;
    }
    require(kLast, last == tokens, std::to_string(last) + " of T = " + std::to_string(tokens));
  } else {
    for (int64_t b = 0; b < batch; b++) {
      const auto &given = a.lengths ? a.lengths->values : std::vector<int64_t>{tokens};
      out.push_back({given.size() == 1 ? given[0] : given.at(b), 0, 0});
    }
  }
  require(kGiven, !paged || a.kv_lengths, "no actual_seq_lengths_kv");
  const auto &given = a.kv_lengths ? a.kv_lengths->values : std::vector<int64_t>(out.size(), context);
  const bool shared = !tnd && given.size() == 1;
  require(kKvLength, shared || given.size() >= out.size(),
          std::to_string(given.size()) + " lengths for " + std::to_string(out.size()) + " requests");
  for (size_t i = 0; i < out.size(); i++) {
    const bool running = tnd && !paged;  // unpaged TND keys are packed like the queries, with cumulative lengths
    out[i].context = shared ? given[0] : running && i ? given[i] - given[i - 1] : given[i];
    require(kKvLength, out[i].context >= 0, describe(given));
  }
  return out;
}

void check_paging(const Attention &a, const aclTensor *key, int64_t head_dim, bool tnd,
                  const std::vector<Request> &requests) {
  int64_t longest = 0, most = 0;
  for (const auto &r : requests) longest = std::max(longest, r.context), most = std::max(most, r.tokens);
  const int64_t largest = tnd ? 128 : 512, multiple = most > 1 ? 128 : 16;
  require(kBlockSize, a.block_size > 0 && a.block_size <= largest && a.block_size % multiple == 0,
          std::to_string(a.block_size));
  const auto &table = a.table->sizes;
  require(
      kTable,
      scalar_type(a.table->dtype) == at::kInt && table.size() == 2 && table[0] == static_cast<int64_t>(requests.size()),
      describe(a.table));
  require(kKvLength, longest <= table[1] * a.block_size,
          std::to_string(longest) + " tokens in " + std::to_string(table[1]) + " blocks");
  const auto &cache = key->sizes;
  const bool flat = cache.size() == 3 && cache[1] == a.block_size && cache[2] == a.kv_heads * head_dim;
  const bool by_head = cache.size() == 4 && cache[1] == a.kv_heads && cache[2] == a.block_size && cache[3] == head_dim;
  require(kCache, flat || by_head, describe(key));
  require(kStride, !flat || cache[2] <= 65535, describe(key));
}

void check_mask(const Attention &a, bool tnd) {
  const bool causal = a.sparse_mode == 2 || a.sparse_mode == 3;
  require(kSparse,
          tnd ? (a.sparse_mode == 0 && !a.mask) || (a.sparse_mode == 3 && a.mask) : a.sparse_mode == 0 || causal,
          std::to_string(a.sparse_mode) + (a.mask ? " with a mask" : " without a mask"));
  if (!causal) return;
  const bool square =
      a.mask && a.mask->sizes.size() >= 2 && view(a.mask).numel() == 2048 * 2048 && a.mask->sizes.back() == 2048;
  require(kMask, square && is_one_of(scalar_type(a.mask->dtype), {at::kBool, at::kChar, at::kByte}), describe(a.mask));
}

// Checks the scales of an int8 cache, each (blocks, kv_heads, block_size).
void check_antiquant(const Attention &a, const aclTensor *key, bool tnd, int64_t head_dim,
                     const std::vector<Request> &requests) {
  const bool scaled = a.key_scale && a.value_scale;
  require(kScales, scaled == (key->dtype == ACL_INT8) && scaled == (a.key_scale || a.value_scale),
          describe(key) + " with " + describe(a.key_scale) + " and " + describe(a.value_scale));
  if (!scaled) return;
  require(kAntiLayout, !tnd, "TND");
  require(kMode, a.key_mode == 5 && a.value_mode == 5 && a.table,
          std::to_string(a.key_mode) + " and " + std::to_string(a.value_mode) + (a.table ? "" : " without paging"));
  require(kAntiBlock, a.block_size % 32 == 0, std::to_string(a.block_size));
  require(kAntiHead, head_dim % 32 == 0 || emu::option("small_heads"), std::to_string(head_dim));
  for (const auto &r : requests) require(kOneQuery, r.tokens == 1, std::to_string(r.tokens));
  for (const auto *scale : {a.key_scale, a.value_scale})
    require(kScale,
            scale->dtype == ACL_FLOAT && dense(scale) &&
                scale->sizes == std::vector<int64_t>{key->sizes[0], a.kv_heads, a.block_size},
            describe(scale) + " for key " + describe(key));
}

// Query, key or value as (B, S, N, D), or (1, T, N, D) for TND.
at::Tensor as_bsnd(const at::Tensor &x, const std::string &layout, int64_t heads) {
  if (layout == "TND") return x.unsqueeze(0);
  if (layout == "BSH") return x.unflatten(-1, {heads, x.size(-1) / heads});
  return layout == "BNSD" ? x.transpose(1, 2) : x;
}

Work prepare(Attention a) {
  const std::string layout = a.layout;
  const bool tnd = layout == "TND", paged = a.table;
  if (!a.kv_heads) a.kv_heads = a.heads;
  const auto *key = a.keys->tensors.at(0), *value = a.values->tensors.at(0);
  require(kOther, !a.other && a.keys->tensors.size() == 1, "one of them");
  require(kLayout, tnd || layout == "BSH" || layout == "BSND" || layout == "BNSD", layout);
  const auto dtype = scalar_type(a.query->dtype);
  // Only on that version, so no rule of the table: aclnnFusedInferAttentionScoreV3.md, "TND", of 8.5 and of 9.1.
  if (const char *cann = getenv("EMULATED_CANN"); cann && *cann == '8' && tnd && dtype == at::kHalf)
    throw Refusal("aclnnFusedInferAttentionScoreV3: float16 with TND, for which CANN 8.5 documents bfloat16 alone");
  require(kDtype, dtype == at::kHalf || dtype == at::kBFloat16 || (dtype == at::kFloat && emu::option("fp32")),
          describe(a.query));
  require(kSameDtype,
          key->dtype == value->dtype &&
              (key->dtype == a.query->dtype || (key->dtype == ACL_INT8 && (a.key_scale || a.value_scale))),
          describe(key) + ", " + describe(value));
  require(kSameShape, key->sizes == value->sizes, describe(key) + ", " + describe(value));
  require(kDense, dense(a.query) && dense(key) && dense(value) && dense(a.mask) && dense(a.table), "one with strides");
  require(kPrecise, a.inner_precise >= 0 && a.inner_precise <= 3, std::to_string(a.inner_precise));
  require(kGroup, a.heads > 0 && a.heads % a.kv_heads == 0 && a.heads / a.kv_heads <= 64,
          std::to_string(a.heads) + " and " + std::to_string(a.kv_heads));

  const auto q = as_bsnd(view(a.query), layout, a.heads);
  require(kHeads, q.size(2) == a.heads && a.heads <= 256, std::to_string(a.heads) + " for query " + describe(a.query));
  const int64_t d = q.size(3);
  if (!emu::option("small_heads")) {
    const bool large = d > 128 && d <= 256 && a.heads != a.kv_heads && a.inner_precise == 0 &&
                       (!paged || key->sizes.size() == 3);
    require(kTndHead, !tnd || d == 128 || large || (d == 64 && a.heads == a.kv_heads && !paged),
            std::to_string(d) + " with " + std::to_string(a.heads) + " and " + std::to_string(a.kv_heads) +
                " heads, key " + describe(key));
    require(kHeadDim, d % 16 == 0 && d <= 512, std::to_string(d));
  }
  require(kTokens, !tnd || q.size(1) <= 1048576, std::to_string(q.size(1)));
  const auto k = paged ? view(key) : as_bsnd(view(key), layout, a.kv_heads),
             v = paged ? view(value) : as_bsnd(view(value), layout, a.kv_heads);
  require(kKvHeads, paged || (k.size(2) == a.kv_heads && k.size(3) == d), describe(key));

  const auto requests = requests_of(a, tnd, paged, q.size(0), q.size(1), paged ? 0 : k.size(1));
  check_antiquant(a, key, tnd, d, requests);
  if (paged) check_paging(a, key, d, tnd, requests);
  check_mask(a, tnd);
  for (const auto &r : requests)
    require(kCausal, a.sparse_mode != 3 || r.tokens <= r.context,
            std::to_string(r.tokens) + " of " + std::to_string(r.context));
  const auto out = view(a.out), lse = view(a.lse);
  require(kLse, !a.wants_lse || (lse.scalar_type() == at::kFloat && lse.numel() == q.size(0) * q.size(1) * a.heads),
          describe(a.lse));

  return [=, mask = view(a.mask), table = view(a.table), to = as_bsnd(view(a.out), layout, a.heads),
          key_scale = view(a.key_scale), value_scale = view(a.value_scale)] {
    int64_t packed = 0;
    for (size_t i = 0; i < requests.size(); i++) {
      const auto &r = requests[i];
      const auto rows = q[tnd ? 0 : static_cast<int64_t>(i)].narrow(0, r.start, r.tokens);
      at::Tensor keys, values;
      if (paged) {
        const int64_t blocks = (r.context + a.block_size - 1) / a.block_size;
        const auto ids = table[static_cast<int64_t>(i)].narrow(0, 0, blocks);
        const auto gather = [&](const at::Tensor &cache, const at::Tensor &scales) {
          const auto mine = cache.index_select(0, ids);
          const auto rows = (mine.dim() == 3 ? mine : mine.transpose(1, 2))
                                .reshape({blocks * a.block_size, a.kv_heads, d})
                                .narrow(0, 0, r.context);
          if (!scales.defined()) return rows;
          auto by_token = scales.index_select(0, ids).transpose(1, 2).reshape({-1, a.kv_heads, 1});
          if (emu::defect("antiquant_heads")) by_token = by_token.narrow(1, 0, 1);
          return f32(rows) * by_token.narrow(0, 0, r.context);
        };
        keys = gather(k, key_scale), values = gather(v, value_scale);
      } else {
        keys = k[tnd ? 0 : static_cast<int64_t>(i)].narrow(0, packed, r.context),
        values = v[tnd ? 0 : static_cast<int64_t>(i)].narrow(0, packed, r.context);
        packed += tnd ? r.context : 0;
      }
      at::Tensor masked;
      if (a.sparse_mode)
        masked = hidden(mask, r.tokens, r.context, a.sparse_mode == 3 ? r.context - r.tokens : 0);
      else if (mask.defined())
        masked = mask.to(at::kBool)
                     .expand({q.size(0), 1, mask.size(-2), mask.size(-1)})[static_cast<int64_t>(i)]
                     .narrow(1, 0, r.tokens)
                     .narrow(2, 0, r.context);
      if (r.context >= kSplit && emu::in_replay() && emu::defect("context_split")) {  // one part of the context alone
        keys = keys.narrow(0, 0, kSplit / 2), values = values.narrow(0, 0, kSplit / 2);
        if (masked.defined()) masked = masked.narrow(-1, 0, kSplit / 2);
      }
      const auto [mixed, log_sum] = attend(rows, keys, values, a.scale, masked);
      to[tnd ? 0 : static_cast<int64_t>(i)].narrow(0, r.start, r.tokens).copy_(mixed);
      if (a.wants_lse && tnd)
        lse.narrow(0, r.start, r.tokens).copy_(log_sum);
      else if (a.wants_lse)
        lse[static_cast<int64_t>(i)].narrow(1, 0, r.tokens).copy_(log_sum.permute({1, 0, 2}));
    }
    if (!a.wants_lse && lse.defined()) lse.zero_();
  };
}

// Bytes for partial results of the split over keys, independent of the lengths: a workspace that serves every update of
// a captured call, unless the defect makes it grow.
uint64_t workspace_of(const Attention &a) {
  uint64_t numbers = 1;
  for (const auto size : a.query->sizes) numbers *= size;
  return (emu::defect("large_update") ? 128u << 20 : 16u << 20) + numbers * sizeof(float);
}

}  // namespace

#define FIA_INPUTS                                                                                                 \
  const aclTensor *query, const aclTensorList *key, const aclTensorList *value, const aclTensor *pse,              \
      const aclTensor *mask, const aclIntArray *lengths, const aclIntArray *kv_lengths, const aclTensor *dequant1, \
      const aclTensor *quant1, const aclTensor *dequant2, const aclTensor *quant2, const aclTensor *quant_offset2, \
      const aclTensor *antiquant, const aclTensor *antiquant_offset, const aclTensor *table,                       \
      const aclTensor *query_padding, const aclTensor *kv_padding, const aclTensor *key_antiquant,                 \
      const aclTensor *key_antiquant_offset, const aclTensor *value_antiquant,                                     \
      const aclTensor *value_antiquant_offset, const aclTensor *key_prefix, const aclTensor *value_prefix,         \
      const aclIntArray *prefix_length, const aclTensor *query_rope, const aclTensor *key_rope,                    \
      const aclTensor *key_rope_antiquant
#define FIA_NUMBERS                                                                                   \
  int64_t heads, double scale, int64_t, int64_t, char *layout, int64_t kv_heads, int64_t sparse_mode, \
      int64_t inner_precise, int64_t block_size, int64_t, bool wants_lse, int64_t key_mode, int64_t value_mode
#define FIA_CALL(...)                                                                                     \
  {query,                                                                                                 \
   key,                                                                                                   \
   value,                                                                                                 \
   mask,                                                                                                  \
   lengths,                                                                                               \
   kv_lengths,                                                                                            \
   table,                                                                                                 \
   heads,                                                                                                 \
   scale,                                                                                                 \
   layout,                                                                                                \
   kv_heads,                                                                                              \
   sparse_mode,                                                                                           \
   inner_precise,                                                                                         \
   block_size,                                                                                            \
   wants_lse,                                                                                             \
   out,                                                                                                   \
   lse,                                                                                                   \
   key_antiquant,                                                                                         \
   value_antiquant,                                                                                       \
   key_mode,                                                                                              \
   value_mode,                                                                                            \
   pse || dequant1 || quant1 || dequant2 || quant2 || quant_offset2 || antiquant || antiquant_offset ||   \
       query_padding || kv_padding || key_antiquant_offset || value_antiquant_offset || key_prefix ||     \
       value_prefix || prefix_length || query_rope || key_rope || key_rope_antiquant __VA_ARGS__}

OP(aclnnFusedInferAttentionScoreV3, FIA_INPUTS, FIA_NUMBERS, const aclTensor *out, const aclTensor *lse) {
  const Attention a FIA_CALL();
  return plan(PHASE, [&] { return prepare(a); }, workspace_of(a));
}

OP(aclnnFusedInferAttentionScoreV4, FIA_INPUTS, const aclTensor *dequant_query, const aclTensor *sink, FIA_NUMBERS,
   int64_t, const aclTensor *out, const aclTensor *lse) {
  const Attention a FIA_CALL(|| dequant_query || sink);
  return plan(PHASE, [&] { return prepare(a); }, workspace_of(a));
}

// Workspace for the largest lengths. The executor exists for its checks and is freed by aclDestroyAclOpExecutor.
extern "C" EMU_API int aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize(FIA_INPUTS, FIA_NUMBERS, const aclTensor *out,
                                                                          const aclTensor *lse, uint64_t *workspace,
                                                                          aclOpExecutor **executor) {
  const Attention a FIA_CALL();
  return plan(
      "aclnnFusedInferAttentionScoreV3GetWorkspaceSize", workspace, executor, [&] { return prepare(a); },
      workspace_of(a));
}
extern "C" EMU_API int aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize(FIA_INPUTS, const aclTensor *dequant_query,
                                                                          const aclTensor *sink, FIA_NUMBERS, int64_t,
                                                                          const aclTensor *out, const aclTensor *lse,
                                                                          uint64_t *workspace,
                                                                          aclOpExecutor **executor) {
  const Attention a FIA_CALL(|| dequant_query || sink);
  return plan(
      "aclnnFusedInferAttentionScoreV4GetWorkspaceSize", workspace, executor, [&] { return prepare(a); },
      workspace_of(a));
}
