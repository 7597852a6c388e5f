// Products of floats with weights of 4 bits, in words of 8 numbers.
#include "op.h"

using namespace ops;

namespace {

constexpr const char *kProduct = "aclnnWeightQuantBatchMatmulV2";
#define RULE(NAME, ID, TEXT, PLACE) \
  const Rule NAME(kProduct, "weightquantbatchmatmul." ID, TEXT, "aclnnWeightQuantBatchMatmulV2.md, " PLACE)
RULE(kX, "x", "x is float16 or bfloat16 of 2 dimensions, contiguous or transposed", "parameter x");
RULE(kWeight, "weight",
     "weight is int32 of 2 dimensions in ND, contiguous or transposed (int8, int4 and FRACTAL_NZ are not emulated)",
     "parameter weight; constraints on A2/A3");
RULE(kEmpty, "empty", "no tensor is empty", "return value 161002");
RULE(kInner, "inner", "x and weight have the same k", "return value 161002");
RULE(kSize, "size", "k and n are 1 to 65535, and m of a transposed x too", "constraints on A2/A3");
RULE(kGroup, "group_size", "antiquantGroupSize is 0, or a multiple of 32 from 32 to k - 1", "parameter antiquantGroupSize");
RULE(kScale, "scale",
     "antiquantScale has the dtype of x and one number, or n, or (ceil(k / group size), n) (int64 is not emulated)",
     "constraints on A2/A3, antiquantScale");
RULE(kOffset, "offset", "antiquantOffset has the dtype and the shape of antiquantScale",
     "constraints on A2/A3, antiquantOffsetOptional");
RULE(kBias, "bias", "bias is of (n) or (1, n): float16 beside float16, float32 beside bfloat16",
     "constraints on A2/A3, biasOptional");
RULE(kOutput, "quantized", "quantScale and quantOffset are absent (a quantized output is not emulated)", "this emulator");
RULE(kY, "y", "y is of (m, n) and has the dtype of x", "constraints on A2/A3, y");
#undef RULE

constexpr int64_t WORD = 8;

bool is_transposed(const aclTensor *t) { return t->strides[0] == 1 && t->strides[1] == t->sizes[0]; }

// The whole numbers -8 to 7 of words along the last dimension: [..., w] -> [..., 8 w].
at::Tensor unpacked(const at::Tensor &words) {
  std::vector<at::Tensor> parts;
  for (int64_t i = 0; i < WORD; i++) parts.push_back(words.bitwise_left_shift(28 - 4 * i).bitwise_right_shift(28));
  return at::stack(parts, -1).flatten(-2);
}

Work multiply(const aclTensor *x, const aclTensor *weight, const aclTensor *scale, const aclTensor *offset, bool quantized,
              const aclTensor *bias, int group, const aclTensor *y) {
  const auto dtype = scalar_type(x->dtype);
  const bool single = dtype == at::kFloat && emu::option("fp32");
  for (const auto *t : {x, weight, scale, offset, bias})
    if (t) require(kEmpty, std::find(t->sizes.begin(), t->sizes.end(), 0) == t->sizes.end(), describe(t));
  require(kX,
          (is_one_of(dtype, {at::kHalf, at::kBFloat16}) || single) && x->sizes.size() == 2 &&
              (is_contiguous(x) || is_transposed(x)),
          describe(x));
  require(kWeight,
          weight->dtype == ACL_INT32 && weight->format == ACL_FORMAT_ND && weight->sizes.size() == 2 &&
              (is_contiguous(weight) || is_transposed(weight)),
          describe(weight));
  require(kOutput, !quantized, "one of them");
  const bool transposed = !is_contiguous(weight);
  const int64_t m = x->sizes[0], k = x->sizes[1], n = weight->sizes[1] * (transposed ? 1 : WORD);
  require(kInner, weight->sizes[0] * (transposed ? WORD : 1) == k, describe(x) + " and " + describe(weight));
  require(kSize, k <= 65535 && n <= 65535 && (is_contiguous(x) || m <= 65535), describe(x) + " and " + describe(weight));
  require(kGroup, group == 0 || (group >= 32 && group < k && group % 32 == 0), std::to_string(group));
  const std::vector<int64_t> &s = scale->sizes;
  const bool fits = group ? s == std::vector<int64_t>{(k + group - 1) / group, n}
                          : (s.size() == 1 || (s.size() == 2 && s[0] == 1)) && (s.back() == n || s.back() == 1);
  require(kScale, scale->dtype == x->dtype && fits, describe(scale) + " for x " + describe(x));
  if (offset)
    require(kOffset, offset->dtype == scale->dtype && offset->sizes == s, describe(offset) + " for " + describe(scale));
  if (bias) {
    const auto wanted = dtype == at::kHalf ? at::kHalf : at::kFloat;
    require(kBias,
            scalar_type(bias->dtype) == wanted && bias->sizes.back() == n &&
                (bias->sizes.size() == 1 || (bias->sizes.size() == 2 && bias->sizes[0] == 1)),
            describe(bias) + " for x " + describe(x));
  }
  require(kY, y->dtype == x->dtype && y->sizes == std::vector<int64_t>{m, n}, describe(y));
  return [group, k, transposed, dtype, a = view(x), w = view(weight), by = view(scale), add = view(offset),
          c = view(bias), out = view(y)] {
    const auto numbers = transposed ? unpacked(w.t()).t() : unpacked(w);
    const auto of_rows = [&](const at::Tensor &t) {  // by rows of the weight
      const auto whole = f32(t.dim() == 1 ? t.unsqueeze(0) : t);
      return group ? whole.repeat_interleave(group, 0).narrow(0, 0, k) : whole;
    };
    auto floats = f32(numbers);
    if (add.defined()) floats = floats + of_rows(add);
    // The cube unit multiplies numbers of x's dtype.
    floats = f32((floats * of_rows(by)).to(dtype));
    const auto sum = at::matmul(f32(a), floats);
    write(out, c.defined() ? sum + f32(c) : sum);
  };
}

}  // namespace

OP(aclnnWeightQuantBatchMatmulV2, const aclTensor *x, const aclTensor *weight, const aclTensor *scale,
   const aclTensor *offset, const aclTensor *quant_scale, const aclTensor *quant_offset, const aclTensor *bias, int group,
   const aclTensor *y) {
  return plan(PHASE, [&] { return multiply(x, weight, scale, offset, quant_scale || quant_offset, bias, group, y); });
}
