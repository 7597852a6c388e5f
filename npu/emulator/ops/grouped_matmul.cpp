// Products of groups of rows, each with a matrix of its own: floats, int8, weights of 4 bits, and int8 through SwiGLU.
//
// Rows beyond those of the groups keep the memory's earlier contents.
#include "nz.h"

using namespace ops;

namespace {

constexpr const char *kAll = "aclnnGroupedMatmulV5 aclnnGroupedMatmulWeightNz";
constexpr const char *kPlain = "aclnnGroupedMatmulV5";
constexpr const char *kFused = "aclnnGroupedMatmulSwigluQuantWeightNzV2";
#define DOCS "https://github.com/cannmirror/ops-transformer/blob/05c401f9ddebdc9ebf008bb974f9ec1256e9e6f9/gmm/"
#define V5 DOCS "grouped_matmul/docs/aclnnGroupedMatmulV5.md, "
#define NZ_PAGE DOCS "grouped_matmul/docs/aclnnGroupedMatmulWeightNz.md, "
#define FUSED_PAGE                                                                                               \
  "https://github.com/hicann/ops-transformer/blob/7786f96c28dfeed81428cd19fc6a3846493d27ee/gmm/"                  \
  "grouped_matmul_swiglu_quant_v2/docs/aclnnGroupedMatmulSwigluQuantWeightNzV2.md, "

const Rule kOne(kAll, "gmm.one", "x, weight and the output are one tensor each (several are not emulated)",
                V5 "supported group types");
const Rule kSplit(kAll, "gmm.split",
                  "groupType is 0 and splitItem 2 or 3: groups of rows, and one output (others are not emulated)",
                  V5 "supported group types");
const Rule kAct(kAll, "gmm.act", "actType is 0, and biases and the inputs of activations are absent (not emulated)",
                "this emulator");
const Rule kShape(kAll, "gmm.shape", "x is of (M, K) and contiguous, weight of (E, K, N), the output of (M, N)",
                  V5 "supported group types, one tensor each");
const Rule kWide(kAll, "gmm.wide", "the last dimensions of x and of weight are less than 65536", V5 "constraints");
const Rule kList(kAll, "gmm.group_list",
                 "groupListType is 0 or 1 (2 is not emulated), and the group list int64 of (E), of 1024 groups at most",
                 V5 "supported group types");
const Rule kOneGroup("aclnnGroupedMatmulWeightNz", "gmm.one_group", "a list of counts does not have the length 1",
                     NZ_PAGE "constraints");
const Rule kFloats(kAll, "gmm.floats",
                   "floats are of one dtype, float16 or bfloat16, or float32 in ND, in x, weight and output",
                   V5 "products without quantization");
const Rule kTransposed(kAll, "gmm.transposed", "a weight that is not contiguous is transposed: (E, N, K) contiguous",
                       V5 "constraints");
const Rule kInt8(kAll, "gmm.int8",
                 "an int8 x has a weight in int8; scale is of (E, N), perTokenScale float32 of (M) or absent",
                 V5 "constraints on A8W8");
const Rule kScale(kAll, "gmm.scale",
                  "scale and the output are bfloat16, or scale is float32 and the output float16",
                  "https://github.com/cannmirror/ops-transformer/blob/05c401f9ddebdc9ebf008bb974f9ec1256e9e6f9/gmm/"
                  "grouped_matmul/op_host/op_api/aclnn_grouped_matmul.cpp, lines 749 to 770");
const Rule kAbsent(kAll, "gmm.absent", "what a product does not use is absent: offset, and the scales of other kinds",
                   V5 "dtypes");
const Rule kInt4(kPlain, "gmm.int4",
                 "beside floats an int32 weight of (E, K, N / 8) in ND, contiguous, has numbers of 4 bits", V5
                 "constraints on A16W4");
const Rule kAnti(kPlain, "gmm.antiquant",
                 "antiquantScale and antiquantOffset have the dtype of x and are of (E, N), or (E, G, N) where G divides K",
                 V5 "constraints on A16W4");
const Rule kOffset(kPlain, "gmm.antiquant_offset", "antiquantOffset is present",
                   "https://github.com/cannmirror/ops-transformer/blob/05c401f9ddebdc9ebf008bb974f9ec1256e9e6f9/gmm/"
                   "grouped_matmul/op_host/op_api/aclnn_grouped_matmul.cpp, line 836");
const Rule kCounts(kAll, "gmm.counts", "the groups have no more rows together than x, and none a negative number",
                   V5 "constraints");

const Rule kFusedX(kFused, "gmmswiglu.x", "x is int8 of (M, K), K less than 65536 (int4 is not emulated)",
                   FUSED_PAGE "constraints on A2/A3");
const Rule kFusedWeight(kFused, "gmmswiglu.weight",
                        "weight is one int8 tensor of (E, K, N) in FRACTAL_NZ, not transposed",
                        FUSED_PAGE "constraints on A2/A3");
const Rule kFusedColumns(kFused, "gmmswiglu.columns", "N is even and 10240 at most", FUSED_PAGE "constraints on A2/A3");
const Rule kFusedScale(kFused, "gmmswiglu.scales",
                       "weightScale is float32, float16 or bfloat16 of (E, N), xScale float32 of (M)",
                       FUSED_PAGE "constraints on A2/A3");
const Rule kFusedList(kFused, "gmmswiglu.group_list", "groupList is int64 of (E), groupListType 0 or 1",
                      FUSED_PAGE "parameters groupList, groupListType");
const Rule kFusedAbsent(kFused, "gmmswiglu.absent",
                        "bias, the assist matrix, smooth scales and tuning are absent, and the modes are 0",
                        FUSED_PAGE "constraints on A2/A3");
const Rule kFusedCounts(kFused, "gmmswiglu.counts", "the groups have no more rows together than x, and none a negative number",
                        FUSED_PAGE "parameter groupList");

using Sizes = std::vector<int64_t>;

bool is_empty(const aclTensorList *list) { return !list || list->tensors.empty(); }
const aclTensor *only(const aclTensorList *list) { return is_empty(list) ? nullptr : list->tensors[0]; }

bool is_transposed(const aclTensor *t) {
  auto turned = *t;
  const auto last = t->sizes.size() - 1;
  std::swap(turned.sizes[last], turned.sizes[last - 1]);
  std::swap(turned.strides[last], turned.strides[last - 1]);
  return is_contiguous(&turned);
}

// Calls `work` with the number of each group that has rows, and their place.
template <typename F>
void each_group(const Rule &rule, const at::Tensor &list, bool counts, int64_t rows, const F &work) {
  int64_t begin = 0;
  for (int64_t i = 0; i < list.size(0); i++) {
    const auto value = list[i].item<int64_t>();
    const int64_t end = counts ? begin + value : value;
    require(rule, begin <= end && end <= rows,
            std::to_string(value) + " of group " + std::to_string(i) + " of " + std::to_string(rows) + " rows");
    if (end > begin) work(i, begin, end - begin);
    begin = end;
  }
}

at::Tensor int_product(const at::Tensor &a, const at::Tensor &b) {
  return at::matmul(a.to(at::kDouble), b.to(at::kDouble)).to(at::kInt);  // exact
}

// The whole numbers -8 to 7 of words along the last dimension: [..., w] -> [..., 8 w].
at::Tensor unpacked(const at::Tensor &words) {
  std::vector<at::Tensor> parts;
  for (int64_t i = 0; i < 8; i++) parts.push_back(words.bitwise_left_shift(28 - 4 * i).bitwise_right_shift(28));
  return at::stack(parts, -1).flatten(-2);
}

struct Arguments {
  const aclTensorList *x, *weight, *bias, *scale, *offset, *anti_scale, *anti_offset, *token_scale;
  const aclTensor *groups;
  const aclTensorList *act_input, *act_scale, *act_offset;
  int64_t split, type, list_type, act;
  const aclTensorList *out;
};

Work multiply(const Arguments &g, bool nz) {
  for (const auto *list : {g.x, g.weight, g.out})
    require(kOne, list && list->tensors.size() == 1, list ? std::to_string(list->tensors.size()) : "nothing");
  require(kSplit, g.type == 0 && (g.split == 2 || g.split == 3), std::to_string(g.type) + ", " + std::to_string(g.split));
  require(kAct,
          g.act == 0 && is_empty(g.bias) && is_empty(g.act_input) && is_empty(g.act_scale) && is_empty(g.act_offset),
          std::to_string(g.act) + " or one of them");
  const auto *x = only(g.x), *weight = only(g.weight), *out = only(g.out), *scale = only(g.scale);
  const auto *anti_scale = only(g.anti_scale), *anti_offset = only(g.anti_offset), *token_scale = only(g.token_scale);
  const auto dtype = scalar_type(x->dtype), to = scalar_type(out->dtype);
  const bool int4 = weight->dtype == ACL_INT32, int8 = x->dtype == ACL_INT8;
  const std::string both = describe(x) + " and " + describe(weight);
  require(kShape,
          x->sizes.size() == 2 && is_contiguous(x) && weight->sizes.size() == 3 &&
              x->sizes[1] == weight->sizes[1] && out->sizes == Sizes{x->sizes[0], weight->sizes[2] * (int4 ? 8 : 1)},
          both + " to " + describe(out));
  const int64_t m = x->sizes[0], k = x->sizes[1], n = out->sizes[1], groups = weight->sizes[0];
  require(kWide, k < 65536 && (nz || is_transposed(weight) || weight->sizes[2] < 65536), both);
  require(kList,
          (g.list_type == 0 || g.list_type == 1) && g.groups && g.groups->dtype == ACL_INT64 &&
              g.groups->sizes == Sizes{groups} && groups <= 1024,
          describe(g.groups) + " of type " + std::to_string(g.list_type) + " for " + both);
  if (nz) require(kOneGroup, g.list_type == 0 || groups > 1, describe(g.groups));
  if (!nz && !int4) require(kTransposed, is_contiguous(weight) || is_transposed(weight), "strides " + describe(weight->strides));
  require(kAbsent, is_empty(g.offset) && (int8 || (!scale && !token_scale)) && (int4 || (!anti_scale && !anti_offset)),
          "one of them");
  if (int8) {
    require(kInt8,
            weight->dtype == ACL_INT8 && scale && scale->sizes == Sizes{groups, n} &&
                (!token_scale || (token_scale->dtype == ACL_FLOAT && token_scale->sizes == Sizes{m})),
            describe(scale) + " and " + describe(token_scale) + " for " + both);
    const bool single = emu::option("fp32") && scale->dtype == ACL_FLOAT && to == at::kFloat;
    require(kScale,
            single || (scale->dtype == ACL_BF16 && to == at::kBFloat16) || (scale->dtype == ACL_FLOAT && to == at::kHalf),
            describe(scale) + " to " + describe(out));
  } else if (int4) {
    const bool is_float = is_one_of(dtype, {at::kHalf, at::kBFloat16}) || (emu::option("fp32") && dtype == at::kFloat);
    require(kInt4, is_float && to == dtype && is_contiguous(weight), both + " to " + describe(out));
    require(kOffset, anti_offset, describe(anti_offset));
    const auto fits = [&](const aclTensor *t) {
      const auto &s = t->sizes;
      return t->dtype == x->dtype &&
             (s == Sizes{groups, n} || (s.size() == 3 && s[0] == groups && s[1] > 0 && k % s[1] == 0 && s[2] == n));
    };
    require(kAnti, anti_scale && fits(anti_scale) && fits(anti_offset) && anti_scale->sizes == anti_offset->sizes,
            describe(anti_scale) + " and " + describe(anti_offset) + " for " + both);
  } else {
    require(kFloats,
            weight->dtype == x->dtype && to == dtype &&
                (is_one_of(dtype, {at::kHalf, at::kBFloat16}) || (dtype == at::kFloat && !nz)),
            both + " to " + describe(out));
  }
  return [=, counts = g.list_type == 1, a = view(x), w = Matrix(weight), list = view(g.groups), by = view(scale),
          of_token = view(token_scale), anti = view(anti_scale), shift = view(anti_offset), y = view(out)] {
    const auto matrices = w.read();
    each_group(kCounts, list, counts, m, [&](int64_t i, int64_t begin, int64_t size) {
      const auto rows = a.narrow(0, begin, size), matrix = matrices[i], place = y.narrow(0, begin, size);
      if (int8) {
        auto sum = f32(int_product(rows, matrix)) * f32(by)[i];
        if (of_token.defined()) sum = sum * of_token.narrow(0, begin, size).unsqueeze(1);
        write(place, sum);
      } else if (int4) {
        const auto spread = [&](const at::Tensor &t) {
          const auto one = f32(t)[i];
          return one.dim() == 1 ? one.unsqueeze(0) : one.repeat_interleave(k / one.size(0), 0);
        };
        // The cube unit multiplies numbers of x's dtype.
        const auto floats = ((f32(unpacked(matrix)) + spread(shift)) * spread(anti)).to(a.scalar_type());
        write(place, at::matmul(f32(rows), f32(floats)));
      } else {
        write(place, at::matmul(rows, matrix));
      }
    });
  };
}

}  // namespace

OP(aclnnGroupedMatmulV5, const aclTensorList *x, const aclTensorList *weight, const aclTensorList *bias,
   const aclTensorList *scale, const aclTensorList *offset, const aclTensorList *anti_scale,
   const aclTensorList *anti_offset, const aclTensorList *token_scale, const aclTensor *groups,
   const aclTensorList *act_input, const aclTensorList *act_scale, const aclTensorList *act_offset, int64_t split,
   int64_t type, int64_t list_type, int64_t act, const aclIntArray *, const aclTensorList *out, const aclTensorList *,
   const aclTensorList *) {
  return plan(PHASE, [&] {
    return multiply({x, weight, bias, scale, offset, anti_scale, anti_offset, token_scale, groups, act_input, act_scale,
                     act_offset, split, type, list_type, act, out},
                    false);
  });
}

OP(aclnnGroupedMatmulWeightNz, const aclTensorList *x, const aclTensorList *weight, const aclTensorList *bias,
   const aclTensorList *scale, const aclTensorList *offset, const aclTensorList *anti_scale,
   const aclTensorList *anti_offset, const aclTensorList *token_scale, const aclTensor *groups,
   const aclTensorList *act_input, const aclTensorList *act_scale, const aclTensorList *act_offset, int64_t split,
   int64_t type, int64_t list_type, int64_t act, const aclIntArray *, int64_t, const aclTensorList *out,
   const aclTensorList *, const aclTensorList *) {
  return plan(PHASE, [&] {
    return multiply({x, weight, bias, scale, offset, anti_scale, anti_offset, token_scale, groups, act_input, act_scale,
                     act_offset, split, type, list_type, act, out},
                    true);
  });
}

OP(aclnnGroupedMatmulSwigluQuantWeightNzV2, const aclTensor *x, const aclTensorList *weight,
   const aclTensorList *weight_scale, const aclTensorList *assist, const aclTensor *bias, const aclTensor *token_scale,
   const aclTensor *smooth, const aclTensor *groups, int64_t dequant, int64_t type, int64_t quant, int64_t list_type,
   const aclIntArray *tuning, const aclTensor *out, const aclTensor *out_scale) {
  return plan(PHASE, [&] {
    const auto *w = only(weight), *s = only(weight_scale);
    require(kFusedX, x->dtype == ACL_INT8 && x->sizes.size() == 2 && x->sizes[1] < 65536, describe(x));
    const int64_t m = x->sizes[0], k = x->sizes[1];
    require(kFusedWeight,
            w && weight->tensors.size() == 1 && w->dtype == ACL_INT8 && is_nz(w) && w->sizes.size() == 3 &&
                w->sizes[1] == k && is_contiguous(w),
            describe(w) + " for x " + describe(x));
    const int64_t e = w->sizes[0], n = w->sizes[2];
    require(kFusedColumns, n % 2 == 0 && n <= 10240, describe(w));
    require(kFusedScale,
            s && weight_scale->tensors.size() == 1 && s->sizes == Sizes{e, n} &&
                is_one_of(scalar_type(s->dtype), {at::kFloat, at::kHalf, at::kBFloat16}) && token_scale &&
                token_scale->dtype == ACL_FLOAT && token_scale->sizes == Sizes{m},
            describe(s) + " and " + describe(token_scale));
    require(kFusedList, groups && groups->dtype == ACL_INT64 && groups->sizes == Sizes{e} && (list_type == 0 || list_type == 1),
            describe(groups) + " of type " + std::to_string(list_type));
    require(kFusedAbsent,
            is_empty(assist) && !bias && !smooth && (!tuning || tuning->values.empty()) && !dequant && !type && !quant,
            "one of them");
    return [=, a = view(x), matrix = Matrix(w), by = view(s), of_token = view(token_scale), list = view(groups), q = view(out),
            step = view(out_scale)] {
      const auto matrices = matrix.read();
      each_group(kFusedCounts, list, list_type == 1, m, [&](int64_t i, int64_t begin, int64_t size) {
        const auto scales = of_token.narrow(0, begin, size).unsqueeze(1) * f32(by)[i];
        const auto halves = (f32(int_product(a.narrow(0, begin, size), matrices[i])) * scales).chunk(2, 1);
        const auto gated = at::silu(halves[0]) * halves[1];
        // Each step in float32, to the nearest number (op_kernel/grouped_matmul_swiglu_quant_spilit_fusion.h).
        const auto scale = gated.abs().amax(1, true) * (1 / 127.0f);
        write(q.narrow(0, begin, size), at::nan_to_num(gated / scale, 0.0).round());
        write(step.narrow(0, begin, size), scale.squeeze(1));
      });
    };
  });
}
