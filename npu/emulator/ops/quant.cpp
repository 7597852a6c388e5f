// Int8: quantization of activations, by row or by a given scale, and products of quantized matrices. swiglu.cpp and
// norm.cpp hold the fused operators.
#include "nz.h"

using namespace ops;

namespace {

constexpr const char *kDynamic = "aclnnDynamicQuantV2";
const Rule kX(kDynamic, "dynamicquant.x", "x is float16 or bfloat16 of more than one dimension",
              "aclnnDynamicQuantV2.md, parameter x");
const Rule kSmooth(kDynamic, "dynamicquant.smooth", "smooth_scales has the dtype and the last dimension of x",
                   "aclnnDynamicQuantV2.md, parameter smoothScalesOptional");
const Rule kY(kDynamic, "dynamicquant.y", "the output is int8 (int4 is not emulated)",
              "aclnnDynamicQuantV2.md, parameter yOut on A2/A3");
const Rule kGroups("aclnnDynamicQuantV2", "dynamicquant.groups", "group_index is absent (groups are not emulated)",
                   "this emulator");

// Rounds as the device's kernel for a group of rows: q = rint(x * (127 / max|x|)), scale = max|x| * (1 / 127), each step
// in float32 (ops-nn at e5c3fa93, quant/dynamic_quant/op_kernel/dynamic_quant_multi_row.h, lines 215 to 236). All its
// kernels multiply so; those for wide rows return the scale 1 / (127 / max|x|) (dynamic_quant.h, line 170). The documents
// and CANN's golden function (tests/assets/golden.py) divide by the scale, which rounds ties otherwise. With an offset,
// q = rint(x / scale + offset) spans -128 ... 127.
Work quantize(const aclTensor *self, const aclTensor *smooth, const aclTensor *out, const aclTensor *scale,
              const aclTensor *offset) {
  const auto dtype = scalar_type(self->dtype);
  require(kX,
          (is_one_of(dtype, {at::kHalf, at::kBFloat16}) || (dtype == at::kFloat && emu::option("fp32"))) &&
              self->sizes.size() > 1,
          describe(self));
  if (smooth)
    require(kSmooth, smooth->dtype == self->dtype && smooth->sizes == std::vector<int64_t>{self->sizes.back()},
            describe(smooth) + " for x " + describe(self));
  require(kY, out->dtype == ACL_INT8, describe(out));
  return [x = view(self), m = view(smooth), q = view(out), s = view(scale), o = view(offset)] {
    const auto v = m.defined() ? f32(x) * f32(m) : f32(x);
    if (!o.defined()) {
      const auto largest = v.abs().amax(-1, true);
      write(q, at::nan_to_num(v * (127.0f / largest), 0.0).round());
      auto steps = (largest * (1 / 127.0f)).squeeze(-1);
      if (emu::defect("row_scales")) steps = steps.flatten()[0].expand_as(steps);
      write(s, steps);
      return;
    }
    const auto high = v.amax(-1, true), low = v.amin(-1, true);
    const auto step = (high - low) / 255, shift = 127 - high / step;
    write(q, (v * (1 / step) + shift).round().clamp(-128, 127));
    write(s, step.squeeze(-1));
    write(o, shift.squeeze(-1));
  };
}

constexpr Dtypes kFloats = {at::kFloat, at::kHalf, at::kBFloat16};
#define QUANTIZE_RULE(NAME, ID, TEXT, PLACE) \
  const Rule NAME("aclnnQuantize", "quantize." ID, TEXT, "aclnnQuantize.md, " PLACE)
QUANTIZE_RULE(kPlain, "x", "x is float32, float16 or bfloat16 of 1 to 8 dimensions", "parameter x");
QUANTIZE_RULE(kGiven, "scales",
              "scales has one dimension, 1 or that of the axis, and the dtype of x, or any of these for a float32 x",
              "parameter scales");
QUANTIZE_RULE(kZero, "zero_points",
              "zero_points is int32, int8 or uint8, or bfloat16 beside bfloat16, and shaped as scales",
              "parameter zeroPoints on A2/A3");
QUANTIZE_RULE(kAxis, "axis", "the axis is one of x", "parameter axis");
QUANTIZE_RULE(kTo, "dtype", "the output is int8 (uint8 and int32 are not emulated)", "parameter dtype on A2/A3");

// q = rint(x / scale + zero), clamped to -128 ... 127.
Work quantize_by(const aclTensor *self, const aclTensor *scales, const aclTensor *zeros, int64_t axis,
                 const aclTensor *out) {
  const auto dtype = scalar_type(self->dtype), by = scalar_type(scales->dtype);
  const int64_t dims = static_cast<int64_t>(self->sizes.size());
  require(kPlain, is_one_of(dtype, kFloats) && dims >= 1 && dims <= 8, describe(self));
  require(kAxis, axis >= -dims && axis < dims, std::to_string(axis) + " of " + describe(self));
  const int64_t at_axis = axis < 0 ? axis + dims : axis, size = self->sizes[at_axis];
  require(kGiven,
          is_one_of(by, kFloats) && (by == dtype || dtype == at::kFloat) && scales->sizes.size() == 1 &&
              (scales->sizes[0] == 1 || scales->sizes[0] == size),
          describe(scales) + " for x " + describe(self));
  if (zeros) {
    const auto d = scalar_type(zeros->dtype);
    const bool fits = is_one_of(d, {at::kInt, at::kChar, at::kByte}) ||
                      (d == at::kBFloat16 && dtype == at::kBFloat16 && by == at::kBFloat16);
    require(kZero, fits && zeros->sizes == scales->sizes, describe(zeros) + " for scales " + describe(scales));
  }
  require(kTo, out->dtype == ACL_INT8, describe(out));
  std::vector<int64_t> shape(dims, 1);
  shape[at_axis] = scales->sizes[0];
  return [shape, x = view(self), s = view(scales), z = view(zeros), q = view(out)] {
    const auto scaled = f32(x) / f32(s).reshape(shape);
    write(q, (z.defined() ? scaled + f32(z).reshape(shape) : scaled).round().clamp(-128, 127));
  };
}

constexpr const char *kProducts = "aclnnQuantMatmulV5 aclnnQuantMatmulWeightNz";
#define DOC "aclnnQuantMatmulV5.md and aclnnQuantMatmulWeightNz.md, "
const Rule kInt8(kProducts, "quantmatmul.dtype", "x1 and x2 are int8 of 2 to 6 dimensions (int4 is not emulated)",
                 DOC "dtypes on A2/A3");
const Rule kInner(kProducts, "quantmatmul.inner", "the inner dimensions are equal", DOC "parameter x2");
const Rule kWidth(kProducts, "quantmatmul.width",
                  "the last dimensions of x1 and x2 are at most 65535, unless both scales have one dimension",
                  DOC "constraints on A2/A3");
const Rule kScale(kProducts, "quantmatmul.scale",
                  "scale is float32 or bfloat16 of one dimension, 1 or n (packed int64 scales are not emulated)",
                  DOC "parameter x2Scale");
const Rule kPerToken(kProducts, "quantmatmul.pertoken_scale", "pertoken_scale is float32 of (m)",
                     DOC "parameter x1Scale");
const Rule kOut(kProducts, "quantmatmul.out",
                "the output is bfloat16; float16 with float32 scales of both; or int32 without a pertoken_scale",
                DOC "dtype combinations on A2/A3");
const Rule kBias(kProducts, "quantmatmul.bias",
                 "bias is of (n): int32, float32 or the output's dtype, and int32 alone for an int32 output",
                 DOC "parameter bias; dtype combinations on A2/A3");
const Rule kAbsent(kProducts, "quantmatmul.absent",
                   "offsets, y_scale and group sizes are absent (offsets are not emulated)",
                   DOC "constraints on A2/A3");
const Rule kOne("aclnnQuantMatmulWeightNz", "quantmatmul.nz_one", "no dimension of a weight in FRACTAL_NZ is 1",
                "aclnnQuantMatmulWeightNz.md, constraints on A2/A3");
const Rule kNz("aclnnQuantMatmulWeightNz", "quantmatmul.nz_contiguous", "x2 in FRACTAL_NZ is contiguous",
               "aclnnQuantMatmulWeightNz.md, parameter x2 on A2/A3");

bool absent(const aclTensor *tensor) {
  return !tensor || std::find(tensor->sizes.begin(), tensor->sizes.end(), 0) != tensor->sizes.end();
}

// Exact in int32, like the cube unit's sums of int8 products.
at::Tensor int_product(const at::Tensor &a, const at::Tensor &b) {
  if (a.dim() == 2 && b.dim() == 2) return at::_int_mm(a, b);
  return at::matmul(a.to(at::kDouble), b.to(at::kDouble)).to(at::kInt);
}

Work multiply(const aclTensor *x1, const aclTensor *x2, const aclTensor *x1_scale, const aclTensor *x2_scale,
              bool extras, const aclTensor *bias, bool t1, bool t2, const aclTensor *out) {
  for (const auto *x : {x1, x2})
    require(kInt8, x->dtype == ACL_INT8 && x->sizes.size() >= 2 && x->sizes.size() <= 6, describe(x));
  require(kAbsent, !extras, "one of them");
  const bool nz = is_nz(x2);
  if (nz) require(kNz, x2->strides.back() == 1, "strides " + describe(x2->strides));
  const auto a = t1 ? view(x1).transpose(-1, -2) : view(x1);
  const auto &sizes = x2->sizes;
  const int64_t m = a.size(-2), k = a.size(-1), n = t2 ? sizes[sizes.size() - 2] : sizes.back();
  require(kInner, (t2 ? sizes.back() : sizes[sizes.size() - 2]) == k, describe(x1) + " and " + describe(x2));
  if (nz) require(kOne, k != 1 && n != 1, describe(x2));
  const auto scale_dtype = scalar_type(x2_scale->dtype), to = scalar_type(out->dtype);
  require(kScale,
          x2_scale->dtype != ACL_UINT64 && is_one_of(scale_dtype, {at::kFloat, at::kBFloat16}) &&
              x2_scale->sizes.size() == 1 && (x2_scale->sizes[0] == n || x2_scale->sizes[0] == 1),
          describe(x2_scale) + " for x2 " + describe(x2));
  if (x1_scale)
    require(kPerToken, x1_scale->dtype == ACL_FLOAT && x1_scale->sizes == std::vector<int64_t>{m},
            describe(x1_scale) + " for x1 " + describe(x1));
  require(kWidth, x1_scale || std::max(x1->sizes.back(), x2->sizes.back()) <= 65535,
          describe(x1) + " and " + describe(x2));
  const bool both = x1_scale && scale_dtype == at::kFloat;
  require(kOut,
          to == at::kBFloat16 || (to == at::kHalf && both) || (to == at::kInt && !x1_scale) ||
              (to == at::kFloat && emu::option("fp32")),
          describe(out));
  if (bias) {
    const auto d = scalar_type(bias->dtype);
    const bool fits = d == at::kInt || (to != at::kInt && (d == at::kFloat || d == to));
    require(kBias, fits && bias->sizes == std::vector<int64_t>{n}, describe(bias) + " for out " + describe(out));
  }
  return [a, t2, b = Matrix(x2), s1 = view(x1_scale), s2 = view(x2_scale), c = view(bias), y = view(out)] {
    auto sum = int_product(a, t2 ? b.read().transpose(-1, -2) : b.read());
    if (sum.size(-1) > 65536 && emu::defect("wide_int8_product")) sum.slice(-1, 65536).zero_();
    if (sum.size(-1) > 1024 && emu::defect("shifted_columns"))
      sum.slice(-1, 1024).copy_(sum.slice(-1, 1023, sum.size(-1) - 1).clone());
    if (sum.size(-1) > 1500 && emu::defect("wrong_column")) sum.select(-1, 1500).copy_(sum.select(-1, 1499));
    const bool whole = c.defined() && c.scalar_type() == at::kInt;
    if (whole) sum = sum + c;
    if (y.scalar_type() == at::kInt) return write(y, sum);
    auto value = f32(sum) * f32(emu::defect("column_scales") ? s2.roll(1) : s2);
    if (s1.defined()) value = value * s1.unsqueeze(-1);
    write(y, c.defined() && !whole ? value + f32(c) : value);
  };
}

}  // namespace

OP(aclnnDynamicQuantV2, const aclTensor *self, const aclTensor *smooth, const aclTensor *groups, int64_t,
   const aclTensor *out, const aclTensor *scale, const aclTensor *offset) {
  return plan(PHASE, [&] {
    require(kGroups, !groups, describe(groups));
    return quantize(self, smooth, out, scale, offset);
  });
}

OP(aclnnQuantize, const aclTensor *self, const aclTensor *scales, const aclTensor *zeros, aclDataType, int32_t axis,
   const aclTensor *out) {
  return plan(PHASE, [&] { return quantize_by(self, scales, zeros, axis, out); });
}

#define QUANT_PRODUCT(NAME)                                                                                            \
  OP(NAME, const aclTensor *x1, const aclTensor *x2, const aclTensor *x1_scale, const aclTensor *x2_scale,             \
     const aclTensor *y_scale, const aclTensor *x1_offset, const aclTensor *x2_offset, const aclTensor *y_offset,      \
     const aclTensor *bias, bool t1, bool t2, int64_t groups, const aclTensor *out) {                                  \
    return plan(PHASE, [&] {                                                                                           \
      const bool extras = !absent(y_scale) || !absent(x1_offset) || !absent(x2_offset) || !absent(y_offset) || groups; \
      return multiply(x1, x2, x1_scale, x2_scale, extras, absent(bias) ? nullptr : bias, t1, t2, out);                 \
    });                                                                                                                \
  }
QUANT_PRODUCT(aclnnQuantMatmulV5)
QUANT_PRODUCT(aclnnQuantMatmulWeightNz)
