// Mixtures of experts: choice of a token's experts, order of its rows by expert, and the sum of their results.
//
// All computation is in float32. Rows that belong to no expert of the range keep the memory's earlier contents.
#include "op.h"

using namespace ops;

namespace {

constexpr const char *kChoose = "aclnnMoeGatingTopKSoftmaxV2";
constexpr const char *kOrder = "aclnnMoeInitRoutingV3";
constexpr const char *kSum = "aclnnMoeFinalizeRoutingV2 aclnnMoeFinalizeRoutingV4";
#define DOCS "https://github.com/cannmirror/ops-transformer/blob/05c401f9ddebdc9ebf008bb974f9ec1256e9e6f9/moe/"
#define CHOOSE(NAME, ID, TEXT, PLACE)           \
  const Rule NAME(kChoose, "gating." ID, TEXT,  \
                  DOCS "moe_gating_top_k_softmax_v2/docs/aclnnMoeGatingTopKSoftmaxV2.md, " PLACE)
#define ORDER(NAME, ID, TEXT, PLACE) \
  const Rule NAME(kOrder, "initrouting." ID, TEXT, DOCS "moe_init_routing_v3/docs/aclnnMoeInitRoutingV3.md, " PLACE)
#define SUM(NAME, ID, TEXT, PLACE) \
  const Rule NAME(kSum, "finalizerouting." ID, TEXT, DOCS "moe_finalize_routing_v2/docs/aclnnMoeFinalizeRoutingV2.md, " PLACE)

CHOOSE(kLogits, "x", "x is float16, bfloat16 or float32 of 2 or 3 dimensions", "parameter x");
CHOOSE(kTopK, "k", "k is 1 to the size of x's last dimension, and 1024 at most", "return value 561002");
CHOOSE(kRenorm, "renorm", "renorm is 0 or 1", "parameter renorm");
CHOOSE(kChosen, "y", "y has the dtype of x, expertIdx is int32, both of x's shape but for k columns",
       "parameters yOut, expertIdxOut");
CHOOSE(kFinished, "finished", "finished is absent, and the softmax is no output (they are not emulated)",
       "this emulator");

ORDER(kRows, "x", "x is float16, bfloat16, float32 or int8 of (NUM_ROWS, H), contiguous", "parameter x");
ORDER(kExperts, "expert_idx", "expertIdx is int32 of (NUM_ROWS, K), contiguous", "parameter expertIdx");
ORDER(kScale, "scale",
      "scale is absent, or float32 of (NUM_ROWS) for rows that are not quantized (others are not emulated)",
      "parameter scaleOptional");
ORDER(kOffset, "offset", "offset is absent", "parameter offsetOptional");
ORDER(kActive, "active_num", "activeNum is NUM_ROWS * K", "constraints");
ORDER(kDrop, "drop_pad_mode", "dropPadMode is 0", "constraints");
ORDER(kType, "expert_tokens_num_type",
      "expertTokensNumType is 1 or 2, and expertTokensNumFlag true (2 is not emulated)", "constraints");
ORDER(kQuant, "quant_mode", "quantMode is -1, or 1 for rows of floats", "constraints; parameter expandedScaleOut");
ORDER(kRange, "active_expert_range",
      "activeExpertRange is [start, end] with 0 <= start <= end <= expertNum, and expertNum is 10240 at most",
      "parameters activeExpertRangeOptional, expertNum");
ORDER(kIndex, "row_idx_type", "rowIdxType is 0 or 1 (1 is not emulated)", "parameter rowIdxType");
ORDER(kOrdered, "outputs",
      "expandedX is of (NUM_ROWS * K, H), int8 if it is quantized, expandedRowIdx int32 and expandedScale float32 of "
      "(NUM_ROWS * K), the counts int64 of (end - start)",
      "parameters expandedXOut, expandedRowIdxOut, expertTokensCountOrCumsumOut, expandedScaleOut");
ORDER(kKnown, "expert", "an expert is at least 0 and less than expertNum", "parameter expertIdx");

SUM(kExpanded, "expanded_x",
    "expandedX is float16, bfloat16 or float32, of 2 dimensions in the modes 0 and 2, and of 3 in 1 and 3",
    "parameter expandedX");
SUM(kPlaces, "row_idx", "expandedRowIdx is int32 of one dimension, (NUM_ROWS * K)", "parameter expandedRowIdx");
SUM(kMode, "mode", "dropPadMode is 0 to 3 (those by columns, 0 and 1, are not emulated)", "parameter dropPadMode");
SUM(kSkip, "skip", "x1 and x2 have the dtype of expandedX and the shape of out; x2 comes with x1",
    "parameters x1Optional, x2Optional; constraints");
SUM(kFactors, "scales",
    "scales are of (NUM_ROWS, K) and have the dtype of expandedX, or float32 beside bfloat16; without scales K is 1",
    "parameter scalesOptional on A2/A3; constraints");
SUM(kNoBias, "bias", "bias and expertIdx are absent, and V4's inputs of constant experts (they are not emulated)",
    "this emulator");
SUM(kTotal, "out", "out has the dtype of expandedX and is of (NUM_ROWS, H)", "parameter out");
SUM(kPlace, "place",
    "an index is 0 to NUM_ROWS * K - 1 in mode 2, and -1 to E * C - 1 in mode 3, for expandedX of (E, C, H)",
    "constraints");

using Sizes = std::vector<int64_t>;

// Rounds to int8 as the kernel: x / (max / 127), cut to float16, then halves away from zero
// (moe_init_routing_v3/op_kernel/moe_v3_gather_dynamic_quant.h, lines 124 to 138).
at::Tensor quantized(const at::Tensor &x, const at::Tensor &scale) {
  const auto cut = (x / scale).contiguous().view(at::kInt).bitwise_and(~0x1fff).view(at::kFloat);
  return at::nan_to_num(cut.sign() * (cut.abs() + 0.5).floor(), 0.0);
}

Work order_rows(const aclTensor *x, const aclTensor *experts, const aclTensor *scale, const aclTensor *offset,
                int64_t active, int64_t count, int64_t drop, int64_t type, bool flag, int64_t quant,
                const aclIntArray *range, int64_t index, const aclTensor *expanded, const aclTensor *row_idx,
                const aclTensor *counts, const aclTensor *expanded_scale) {
  const auto dtype = scalar_type(x->dtype);
  require(kRows,
          x->sizes.size() == 2 && is_contiguous(x) && is_one_of(dtype, {at::kHalf, at::kBFloat16, at::kFloat, at::kChar}),
          describe(x));
  const int64_t tokens = x->sizes[0], width = x->sizes[1];
  require(kExperts,
          experts->dtype == ACL_INT32 && experts->sizes.size() == 2 && experts->sizes[0] == tokens && is_contiguous(experts),
          describe(experts) + " for x " + describe(x));
  const int64_t k = experts->sizes[1], rows = tokens * k;
  require(kQuant, quant == -1 || (quant == 1 && dtype != at::kChar), std::to_string(quant) + " of " + describe(x));
  require(kScale, !scale || (quant == -1 && scale->dtype == ACL_FLOAT && scale->sizes == Sizes{tokens}),
          describe(scale) + " for x " + describe(x));
  require(kOffset, !offset, describe(offset));
  require(kActive, active == rows, std::to_string(active) + " of " + std::to_string(rows));
  require(kDrop, drop == 0, std::to_string(drop));
  require(kType, type == 1 && flag, std::to_string(type) + (flag ? ", true" : ", false"));
  const auto ends = range ? range->values : Sizes{};
  require(kRange, ends.size() == 2 && 0 <= ends[0] && ends[0] <= ends[1] && ends[1] <= count && count <= 10240,
          describe(at::IntArrayRef(ends)) + " of " + std::to_string(count));
  require(kIndex, index == 0, std::to_string(index));
  const auto to = quant == 1 ? ACL_INT8 : x->dtype;
  require(kOrdered,
          expanded->dtype == to && expanded->sizes == Sizes{rows, width} && row_idx->dtype == ACL_INT32 &&
              row_idx->sizes == Sizes{rows} && counts->dtype == ACL_INT64 && counts->sizes == Sizes{ends[1] - ends[0]} &&
              expanded_scale->dtype == ACL_FLOAT && expanded_scale->sizes == Sizes{rows},
          describe(expanded) + ", " + describe(row_idx) + ", " + describe(counts) + " and " + describe(expanded_scale));
  return [=, first = ends[0], end = ends[1], a = view(x), e = view(experts), s = view(scale), out = view(expanded),
          places = view(row_idx), n = view(counts), by = view(expanded_scale)] {
    const auto all = e.flatten().to(at::kLong);
    if (all.numel())
      require(kKnown, all.min().item<int64_t>() >= 0 && all.max().item<int64_t>() < count,
              std::to_string(all.min().item<int64_t>()) + " to " + std::to_string(all.max().item<int64_t>()) + " of " +
                  std::to_string(count));
    const auto active = all.ge(first).logical_and(all.lt(end));
    const auto order = at::argsort(at::where(active, all, end), true, 0, false);
    const int64_t used = active.sum().item<int64_t>();
    const auto sources = order.narrow(0, 0, used);
    places.fill_(-1);
    places.index_put_({sources}, at::arange(used, at::TensorOptions(at::kInt)));
    write(n, at::bincount(all.masked_select(active) - first, {}, end - first));
    const auto from = at::floor_divide(sources, k);
    const auto chosen = a.index_select(0, from);
    if (quant == 1) {
      const auto step = f32(chosen).abs().amax(1, true) / 127.0f;
      write(out.narrow(0, 0, used), quantized(f32(chosen), step));
      write(by.narrow(0, 0, used), step.squeeze(1));
      return;
    }
    write(out.narrow(0, 0, used), chosen);
    if (s.defined()) write(by.narrow(0, 0, used), s.index_select(0, from));
  };
}

Work sum_rows(const aclTensor *rows, const aclTensor *places, const aclTensor *x1, const aclTensor *x2, bool biased,
              const aclTensor *scales, int64_t mode, const aclTensor *out) {
  const auto dtype = scalar_type(rows->dtype);
  require(kMode, mode == 2 || mode == 3, std::to_string(mode));
  require(kExpanded,
          is_one_of(dtype, {at::kHalf, at::kBFloat16, at::kFloat}) && rows->sizes.size() == (mode == 2 ? 2u : 3u),
          describe(rows) + " in mode " + std::to_string(mode));
  require(kPlaces, places->dtype == ACL_INT32 && places->sizes.size() == 1, describe(places));
  require(kNoBias, !biased, "one of them");
  const int64_t k = scales && scales->sizes.size() == 2 ? scales->sizes[1] : 1;
  const int64_t tokens = places->sizes[0] / std::max<int64_t>(k, 1), width = rows->sizes.back();
  if (scales)
    require(kFactors,
            scales->sizes == Sizes{tokens, k} && tokens * k == places->sizes[0] &&
                (scales->dtype == rows->dtype || (scales->dtype == ACL_FLOAT && dtype == at::kBFloat16)),
            describe(scales) + " for expandedX " + describe(rows) + " and indices " + describe(places));
  require(kTotal, out->dtype == rows->dtype && out->sizes == Sizes{tokens, width}, describe(out));
  for (const auto *skip : {x1, x2})
    if (skip)
      require(kSkip, x1 && skip->dtype == rows->dtype && skip->sizes == out->sizes,
              describe(skip) + " for out " + describe(out) + (x1 ? "" : ", without x1"));
  return [=, a = view(rows), index = view(places), skips = std::vector<at::Tensor>{view(x1), view(x2)},
          by = view(scales), y = view(out)] {
    auto flat = f32(a).flatten(0, -2);
    if (emu::defect("expert_places")) flat = flat.roll(1, 0);
    const auto where = index.to(at::kLong).view({tokens, k});
    const int64_t last = mode == 2 ? tokens * k : flat.size(0);
    if (where.numel())
      require(kPlace, where.min().item<int64_t>() >= (mode == 3 ? -1 : 0) && where.max().item<int64_t>() < last,
              std::to_string(where.min().item<int64_t>()) + " to " + std::to_string(where.max().item<int64_t>()) + " of " +
                  std::to_string(last));
    auto sum = at::zeros({tokens, width});
    for (const auto &skip : skips)
      if (skip.defined()) sum = sum + f32(skip);
    for (int64_t i = 0; i < k; i++) {
      const auto place = where.select(1, i), used = place.ge(0).unsqueeze(1);
      auto row = flat.index_select(0, place.clamp_min(0));
      if (by.defined()) row = row * f32(by).narrow(1, i, 1);
      sum = sum + at::where(used, row, at::zeros_like(row));
    }
    write(y, sum);
  };
}

}  // namespace

OP(aclnnMoeGatingTopKSoftmaxV2, const aclTensor *self, const aclTensor *finished, int64_t k, int64_t renorm, bool softmax,
   const aclTensor *out, const aclTensor *experts, const aclTensor *) {
  return plan(PHASE, [&] {
    const auto dtype = scalar_type(self->dtype);
    const auto dims = self->sizes.size();
    require(kLogits, (dims == 2 || dims == 3) && is_one_of(dtype, {at::kHalf, at::kBFloat16, at::kFloat}), describe(self));
    require(kTopK, k >= 1 && k <= std::min<int64_t>(self->sizes.back(), 1024),
            std::to_string(k) + " of " + describe(self));
    require(kRenorm, renorm == 0 || renorm == 1, std::to_string(renorm));
    require(kFinished, !finished && !softmax, "one of them");
    auto sizes = self->sizes;
    sizes.back() = k;
    require(kChosen,
            out->dtype == self->dtype && out->sizes == sizes && experts->dtype == ACL_INT32 && experts->sizes == sizes,
            describe(out) + " and " + describe(experts));
    return [=, x = view(self), y = view(out), e = view(experts)] {
      const auto scores = renorm ? f32(x) : f32(x).softmax(-1);
      const auto [sorted, order] = scores.sort(true, -1, true);
      const auto largest = sorted.narrow(-1, 0, k);
      write(y, renorm ? largest.softmax(-1) : largest);
      write(e, order.narrow(-1, 0, k));
    };
  });
}

OP(aclnnMoeInitRoutingV3, const aclTensor *x, const aclTensor *experts, const aclTensor *scale, const aclTensor *offset,
   int64_t active, int64_t, int64_t count, int64_t drop, int64_t type, bool flag, int64_t quant, const aclIntArray *range,
   int64_t index, const aclTensor *expanded, const aclTensor *row_idx, const aclTensor *counts,
   const aclTensor *expanded_scale) {
  return plan(PHASE, [&] {
    return order_rows(x, experts, scale, offset, active, count, drop, type, flag, quant, range, index, expanded, row_idx,
                      counts, expanded_scale);
  });
}

OP(aclnnMoeFinalizeRoutingV2, const aclTensor *rows, const aclTensor *places, const aclTensor *x1, const aclTensor *x2,
   const aclTensor *bias, const aclTensor *scales, const aclTensor *experts, int64_t mode, const aclTensor *out) {
  return plan(PHASE, [&] { return sum_rows(rows, places, x1, x2, bias || experts, scales, mode, out); });
}

OP(aclnnMoeFinalizeRoutingV4, const aclTensor *rows, const aclTensor *places, const aclTensor *x1, const aclTensor *x2,
   const aclTensor *bias, const aclTensor *scales, const aclTensor *experts, const aclTensor *x, const aclTensor *alpha1,
   const aclTensor *alpha2, const aclTensor *v, int64_t mode, const aclIntArray *zero, const aclIntArray *copy,
   const aclIntArray *constant, int64_t k, const aclTensor *out) {
  return plan(PHASE, [&] {
    const bool more = x || alpha1 || alpha2 || v || zero || copy || constant || k != 1;
    return sum_rows(rows, places, x1, x2, bias || experts || more, scales, mode, out);
  });
}
