// Root-mean-square norms: alone, with addition of the residual, and with quantization or a float32 copy of the result.
//
// All computation is in float32. Kernels with an addition round where the device's kernels do (ops-nn,
// norm/add_rms_norm*/op_kernel). In bfloat16 the norm is computed from the unrounded sum. In float16 it is computed
// from the sum in float16. aclnnAddRmsNorm and aclnnAddRmsNormCast round the normalized values before gamma.
#include "op.h"

using namespace ops;

namespace {

constexpr const char *kAdding =
    "aclnnAddRmsNorm aclnnAddRmsNormCast aclnnAddRmsNormQuantV2 aclnnAddRmsNormDynamicQuantV2";
constexpr const char *kQuantizing = "aclnnAddRmsNormQuantV2 aclnnAddRmsNormDynamicQuantV2";
constexpr Dtypes kFloats = {at::kFloat, at::kHalf, at::kBFloat16};
constexpr Dtypes kHalves = {at::kHalf, at::kBFloat16};

const Rule kX("aclnnRmsNorm aclnnAddRmsNorm", "rmsnorm.x", "x is float32, float16 or bfloat16 of 1 to 8 dimensions",
              "aclnnRmsNorm.md and aclnnAddRmsNorm.md, parameter x");
const Rule kGammaShape("aclnnRmsNorm aclnnAddRmsNorm aclnnAddRmsNormCast aclnnAddRmsNormQuantV2", "rmsnorm.gamma_shape",
                       "gamma has the shape of the last dimensions of x",
                       "aclnnRmsNorm.md, aclnnAddRmsNorm.md, aclnnAddRmsNormCast.md and aclnnAddRmsNormQuantV2.md, "
                       "parameter gamma");
const Rule kGammaDtype("aclnnRmsNorm", "rmsnorm.gamma_dtype", "gamma has the dtype of x, or float32",
                       "aclnnRmsNorm.md, constraints, dtypes on A2/A3");
const Rule kPair(kAdding, "addrmsnorm.x2", "x2 has the shape and dtype of x1", "aclnnAddRmsNorm.md, parameter x2");
const Rule kGammaSame(kAdding, "addrmsnorm.gamma_dtype", "gamma has the dtype of x1",
                      "aclnnAddRmsNorm.md, parameter gamma");
const Rule kHalfX(kQuantizing, "addrmsnormquant.x", "x1 is float16 or bfloat16",
                  "aclnnAddRmsNormQuantV2.md and aclnnAddRmsNormDynamicQuantV2.md, dtypes on A2/A3");
const Rule kCastX("aclnnAddRmsNormCast", "addrmsnormcast.x",
                  "x1 is float16 or bfloat16 of 1 to 8 dimensions, y1 float32, y2 and the sum of x1's dtype",
                  "https://github.com/hicann/ops-nn/blob/0037ab39e3db9034426cd596ff06f913847fc838/norm/"
                  "add_rms_norm_cast/docs/aclnnAddRmsNormCast.md, parameters");
const Rule kScales("aclnnAddRmsNormQuantV2", "addrmsnormquant.scales",
                   "scales1 is float32 for float16 x1 and bfloat16 for bfloat16, shaped as gamma",
                   "aclnnAddRmsNormQuantV2.md, constraints, dtypes on A2/A3");
const Rule kZeros("aclnnAddRmsNormQuantV2", "addrmsnormquant.zero_points",
                  "zero_points1 is int32 for float16 x1 and bfloat16 for bfloat16, shaped as scales1",
                  "aclnnAddRmsNormQuantV2.md, constraints, dtypes on A2/A3");
const Rule kDivMode("aclnnAddRmsNormQuantV2", "addrmsnormquant.div_mode", "div_mode is true",
                    "aclnnAddRmsNormQuantV2.md, parameters on A2/A3");
const Rule kInt8(kQuantizing, "addrmsnormquant.y", "the quantized output is int8",
                 "aclnnAddRmsNormQuantV2.md, dtypes on A2/A3 (int4 is not emulated)");
const Rule kLastDim("aclnnAddRmsNormDynamicQuantV2", "addrmsnormdynamicquant.gamma_shape",
                    "gamma has one dimension, the last of x1", "aclnnAddRmsNormDynamicQuantV2.md, parameter gamma");
const Rule kSmooth(
    "aclnnAddRmsNormDynamicQuantV2", "addrmsnormdynamicquant.smooth",
    "smooth scales and beta have gamma's shape and dtype",
    "aclnnAddRmsNormDynamicQuantV2.md, parameters smoothScale1Optional, smoothScale2Optional, betaOptional");
const Rule kSmoothPair("aclnnAddRmsNormDynamicQuantV2", "addrmsnormdynamicquant.smooth_mask",
                       "smooth_scale2 comes with smooth_scale1, or an output mask allows for those that are given",
                       "aclnnAddRmsNormDynamicQuantV2.md, constraints on inputs");

bool ends_with(const std::vector<int64_t> &sizes, const std::vector<int64_t> &tail) {
  return tail.size() <= sizes.size() && std::equal(tail.rbegin(), tail.rend(), sizes.rbegin());
}

// 1 / sqrt(mean of squares + epsilon) over the last `dims` dimensions, which are kept with size 1.
at::Tensor reciprocal_rms(const at::Tensor &x, int64_t dims, double epsilon) {
  std::vector<int64_t> over;
  for (int64_t d = -dims; d < 0; d++) over.push_back(d);
  return (x.square().mean(over, true) + epsilon).rsqrt();
}

void check_addition(const aclTensor *x1, const aclTensor *x2, const aclTensor *gamma) {
  require(kPair, x1->sizes == x2->sizes && x1->dtype == x2->dtype, describe(x2) + " with x1 " + describe(x1));
  require(kGammaSame, gamma->dtype == x1->dtype, describe(gamma) + " for x1 " + describe(x1));
}

// The sum in float32, from which the norm is computed.
at::Tensor sum_of(const at::Tensor &a, const at::Tensor &b) {
  return f32(a.scalar_type() == at::kHalf ? a + b : f32(a) + f32(b));
}

}  // namespace

OP(aclnnRmsNorm, const aclTensor *self, const aclTensor *gamma, double epsilon, const aclTensor *out,
   const aclTensor *rstd) {
  return plan(PHASE, [&] {
    const auto dtype = scalar_type(self->dtype);
    require(kX, is_one_of(dtype, kFloats) && self->sizes.size() >= 1 && self->sizes.size() <= 8, describe(self));
    require(kGammaShape, ends_with(self->sizes, gamma->sizes), describe(gamma) + " for x " + describe(self));
    require(kGammaDtype, gamma->dtype == self->dtype || gamma->dtype == ACL_FLOAT,
            describe(gamma) + " for x " + describe(self));
    return [=, x = view(self), g = view(gamma), y = view(out), r = view(rstd)] {
      const auto scale = reciprocal_rms(f32(x), g.dim(), epsilon);
      write(y, f32(x) * scale * f32(g));
      write(r, scale);
    };
  });
}

OP(aclnnAddRmsNorm, const aclTensor *x1, const aclTensor *x2, const aclTensor *gamma, double epsilon,
   const aclTensor *out, const aclTensor *rstd, const aclTensor *sum) {
  return plan(PHASE, [&] {
    require(kX, is_one_of(scalar_type(x1->dtype), kFloats) && x1->sizes.size() >= 1 && x1->sizes.size() <= 8,
            describe(x1));
    check_addition(x1, x2, gamma);
    require(kGammaShape, ends_with(x1->sizes, gamma->sizes), describe(gamma) + " for x1 " + describe(x1));
    return [=, a = view(x1), b = view(x2), g = view(gamma), y = view(out), r = view(rstd), s = view(sum)] {
      const auto x = sum_of(a, b);
      const auto scale = reciprocal_rms(x, g.dim(), epsilon);
      write(y, f32((x * scale).to(a.scalar_type())) * f32(g));
      write(r, scale);
      write(s, x);
    };
  });
}

OP(aclnnAddRmsNormCast, const aclTensor *x1, const aclTensor *x2, const aclTensor *gamma, double epsilon,
   const aclTensor *wide, const aclTensor *out, const aclTensor *rstd, const aclTensor *sum) {
  return plan(PHASE, [&] {
    require(kCastX,
            is_one_of(scalar_type(x1->dtype), kHalves) && x1->sizes.size() >= 1 && x1->sizes.size() <= 8 &&
                wide->dtype == ACL_FLOAT && out->dtype == x1->dtype && sum->dtype == x1->dtype,
            describe(x1) + " to " + describe(wide) + ", " + describe(out) + " and " + describe(sum));
    check_addition(x1, x2, gamma);
    require(kGammaShape, ends_with(x1->sizes, gamma->sizes), describe(gamma) + " for x1 " + describe(x1));
    return [=, a = view(x1), b = view(x2), g = view(gamma), w = view(wide), y = view(out), r = view(rstd), s = view(sum)] {
      const auto x = sum_of(a, b);
      const auto scale = reciprocal_rms(x, g.dim(), epsilon);
      write(y, f32((x * scale).to(a.scalar_type())) * f32(g));
      write(w, f32(y));
      write(r, scale);
      write(s, x);
    };
  });
}

OP(aclnnAddRmsNormQuantV2, const aclTensor *x1, const aclTensor *x2, const aclTensor *gamma, const aclTensor *scales1,
   const aclTensor *scales2, const aclTensor *zeros1, const aclTensor *zeros2, const aclTensor *beta, int64_t,
   double epsilon, bool div_mode, const aclTensor *y1, const aclTensor *y2, const aclTensor *sum,
   const aclTensor *normed) {
  return plan(PHASE, [&] {
    const auto dtype = scalar_type(x1->dtype);
    const bool half = dtype == at::kHalf;
    require(kHalfX, is_one_of(dtype, kHalves) || emu::option("fp32"), describe(x1));
    check_addition(x1, x2, gamma);
    require(kGammaShape, ends_with(x1->sizes, gamma->sizes), describe(gamma) + " for x1 " + describe(x1));
    const auto scales_dtype = dtype == at::kBFloat16 ? at::kBFloat16 : at::kFloat;
    const auto zeros_dtype = half ? at::kInt : scales_dtype;
    for (const auto *s : {scales1, scales2})
      if (s)
        require(kScales, scalar_type(s->dtype) == scales_dtype && s->sizes == gamma->sizes,
                describe(s) + " for gamma " + describe(gamma));
    for (const auto *z : {zeros1, zeros2})
      if (z)
        require(kZeros, scalar_type(z->dtype) == zeros_dtype && z->sizes == gamma->sizes,
                describe(z) + " for gamma " + describe(gamma));
    require(kDivMode, div_mode, "false");
    require(kInt8, y1->dtype == ACL_INT8, describe(y1));
    return [=, a = view(x1), b = view(x2), g = view(gamma), c1 = view(scales1), c2 = view(scales2), z1 = view(zeros1),
            z2 = view(zeros2), shift = view(beta), q1 = view(y1), q2 = view(y2), s = view(sum), n = view(normed)] {
      const auto x = sum_of(a, b);
      auto y = x * reciprocal_rms(x, g.dim(), epsilon) * f32(g);
      if (n.defined()) write(n, y);
      if (shift.defined()) y = y + f32(shift);
      const auto quantized = [&](const at::Tensor &scale, const at::Tensor &zero) {
        const auto q = y / f32(scale);
        return (zero.defined() ? q + f32(zero) : q).round().clamp(-128, 127);
      };
      write(q1, quantized(c1, z1));
      if (c2.defined()) write(q2, quantized(c2, z2));
      write(s, x);
    };
  });
}

OP(aclnnAddRmsNormDynamicQuantV2, const aclTensor *x1, const aclTensor *x2, const aclTensor *gamma,
   const aclTensor *smooth1, const aclTensor *smooth2, const aclTensor *beta, double epsilon, const aclBoolArray *mask,
   const aclTensor *y1, const aclTensor *y2, const aclTensor *sum, const aclTensor *scale1, const aclTensor *scale2) {
  return plan(PHASE, [&] {
    require(kHalfX, is_one_of(scalar_type(x1->dtype), kHalves) || emu::option("fp32"), describe(x1));
    check_addition(x1, x2, gamma);
    require(kLastDim, gamma->sizes == std::vector<int64_t>{x1->sizes.back()},
            describe(gamma) + " for x1 " + describe(x1));
    for (const auto *t : {smooth1, smooth2, beta})
      if (t)
        require(kSmooth, t->sizes == gamma->sizes && t->dtype == gamma->dtype,
                describe(t) + " for gamma " + describe(gamma));
    const bool first = mask ? mask->values.at(0) : true, second = mask ? mask->values.at(1) : smooth1 && smooth2;
    require(kSmoothPair, (first || !smooth1) && (second || !smooth2),
            std::string("smooth_scale1 ") + describe(smooth1) + ", smooth_scale2 " + describe(smooth2));
    require(kInt8, (first ? y1 : y2)->dtype == ACL_INT8, describe(first ? y1 : y2));
    return [=, a = view(x1), b = view(x2), g = view(gamma), m1 = view(smooth1), m2 = view(smooth2), shift = view(beta),
            q1 = view(y1), q2 = view(y2), s = view(sum), c1 = view(scale1), c2 = view(scale2)] {
      const auto x = sum_of(a, b);
      auto y = x * reciprocal_rms(x, 1, epsilon) * f32(g);
      if (shift.defined()) y = y + f32(shift);
      // Rounds as the device's kernels: q = rint(y * (127 / max|y|)), scale = 1 / (127 / max|y|), each step in float32
      // (ops-nn at e5c3fa93, op_kernel/add_rms_norm_dynamic_quant_normal_kernel.h, lines 333 to 339).
      const auto quantize = [&](const at::Tensor &smooth, const at::Tensor &q, const at::Tensor &scale) {
        const auto v = smooth.defined() ? y * f32(smooth) : y;
        const auto inverse = 127.0f / v.abs().amax(-1, true);
        write(q, at::nan_to_num(v * inverse, 0.0).round());
        scale.reshape(-1).copy_((1 / inverse).reshape(-1));
      };
      if (first) quantize(m1, q1, c1);
      if (second) quantize(m2, q2, c2);
      write(s, x);
    };
  });
}
