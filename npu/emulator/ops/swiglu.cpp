// SwiGLU: alone, and from an exact int8 product to int8.
#include "op.h"

using namespace ops;

static const Rule kSwiX("aclnnSwiGlu", "swiglu.x", "x is bfloat16, float16 or float32", "aclnnSwiGlu.md, parameter x");
static const Rule kSwiDim("aclnnSwiGlu", "swiglu.dim", "dim is a dimension of x", "aclnnSwiGlu.md, parameter dim");
static const Rule kSwiEven("aclnnSwiGlu", "swiglu.even", "the split dimension is even", "aclnnSwiGlu.md, parameter x");
static const Rule kSwiDense("aclnnSwiGlu", "swiglu.contiguous", "x is contiguous",
                            "aclnnSwiGlu.md, parameter x, non-contiguous tensors");

OP(aclnnSwiGlu, const aclTensor *self, int64_t dim, const aclTensor *out) {
  return plan(PHASE, [&] {
    const auto x = view(self);
    require(kSwiX, is_one_of(x.scalar_type(), {at::kFloat, at::kHalf, at::kBFloat16}), describe(self));
    require(kSwiDim, x.dim() > 0 && dim >= -x.dim() && dim < x.dim(), std::to_string(dim) + " of " + describe(self));
    require(kSwiEven, x.size(dim) % 2 == 0, describe(self));
    require(kSwiDense, x.is_contiguous(), "strides " + describe(self->strides));
    return [=, y = view(out)] {
      const auto halves = f32(x).chunk(2, dim);
      write(y, at::silu(halves[0]) * halves[1]);
    };
  });
}

#define FUSED(NAME, ID, TEXT, SOURCE) \
  static const Rule NAME("aclnnDequantSwigluQuantV2", "dequantswiglu." ID, TEXT, SOURCE)
#define V2 "aclnnDequantSwigluQuantV2.md, "
#define ON_A2 "aclnnDequantSwigluQuantV2.md, parameters on A2/A3"
FUSED(kX, "x", "x is int32 of 2 dimensions (bfloat16 is not emulated)", ON_A2);
FUSED(kWidth, "width", "the last dimension of x is a multiple of 64, and 7232 at most where there is a group_index",
      V2 "constraints on A2/A3");
FUSED(kGroup, "group_index", "group_index is int64 of one dimension (more groups than one are not emulated)", ON_A2);
FUSED(kCount, "count", "group_index counts no more tokens than x has", V2 "constraints");
FUSED(kWeightScale, "weight_scale", "weight_scale is float32, one for each number of x's rows",
      V2 "parameter weightScaleOptional; constraints");
FUSED(kTokenScale, "activation_scale", "activation_scale is float32, one for each token",
      V2 "parameter activationScaleOptional");
FUSED(kBias, "bias", "bias is absent beside a group_index",
      "torch_npu-npu_dequant_swiglu_quant.md, parameter bias");
FUSED(kSmooth, "quant_scale", "quant_scale is float32, one for each number of the output's rows",
      V2 "parameter quantScaleOptional");
FUSED(kOffset, "quant_offset", "with dynamic quantization quant_offset is absent", V2 "constraints on A2/A3");
FUSED(kMode, "mode", "quant_mode is dynamic and swiglu_mode 0 (the others are not emulated)", "this emulator");
FUSED(kFixed, "fixed", "the output's type is 2 (int8), its rounding rint, the split axis -1", ON_A2);
FUSED(kOut, "y", "the output is int8 of half of x's rows, its scales float32, one for each token",
      V2 "parameters yOut, scaleOut");

// True for `count` numbers of float32, with or without dimensions of size 1.
static bool numbers(const aclTensor *tensor, int64_t count) {
  return tensor && tensor->dtype == ACL_FLOAT && tensor->sizes.size() >= 1 && tensor->sizes.size() <= 2 &&
         std::max(tensor->sizes[0], tensor->sizes.back()) == count &&
         (tensor->sizes.size() == 1 || std::min(tensor->sizes[0], tensor->sizes[1]) == 1);
}

OP(aclnnDequantSwigluQuantV2, const aclTensor *self, const aclTensor *weight_scale, const aclTensor *token_scale,
   const aclTensor *bias, const aclTensor *smooth, const aclTensor *offset, const aclTensor *groups, bool left,
   const char *mode, int64_t to, const char *rounding, int64_t axis, int64_t variant, double, double, double,
   const aclTensor *out, const aclTensor *scale) {
  return plan(PHASE, [&] {
    require(kX, self->dtype == ACL_INT32 && self->sizes.size() == 2, describe(self));
    const int64_t tokens = self->sizes[0], width = self->sizes[1];
    require(kGroup, groups && groups->dtype == ACL_INT64 && groups->sizes == std::vector<int64_t>{1}, describe(groups));
    require(kWidth, width % 64 == 0 && width <= 7232, describe(self));
    require(kWeightScale, numbers(weight_scale, width), describe(weight_scale) + " for x " + describe(self));
    require(kTokenScale, numbers(token_scale, tokens), describe(token_scale) + " for x " + describe(self));
    require(kBias, !bias, describe(bias));
    require(kMode, std::string(mode) == "dynamic" && variant == 0, std::string(mode) + ", " + std::to_string(variant));
    require(kOffset, !offset, describe(offset));
    require(kSmooth, !smooth || numbers(smooth, width / 2), describe(smooth) + " for x " + describe(self));
    require(kFixed, to == ACL_INT8 && (!rounding || std::string(rounding) == "rint") && axis == -1,
            std::to_string(to) + ", " + (rounding ? rounding : "rint") + ", " + std::to_string(axis));
    require(kOut,
            out->dtype == ACL_INT8 && out->sizes == std::vector<int64_t>{tokens, width / 2} && numbers(scale, tokens),
            describe(out) + " and " + describe(scale));
    return [=, x = view(self), w = view(weight_scale), t = view(token_scale), m = view(smooth), g = view(groups),
            q = view(out), s = view(scale)] {
      const auto count = g.item<int64_t>();
      require(kCount, count >= 0 && count <= tokens, std::to_string(count) + " of " + std::to_string(tokens));
      const auto halves = (f32(x) * w.reshape({1, -1}) * t.reshape({-1, 1})).narrow(0, 0, count).chunk(2, 1);
      auto gated = at::silu(halves[left ? 0 : 1]) * halves[left ? 1 : 0];
      if (m.defined()) gated = gated * m.reshape({1, -1});
      // Rounds as the device's kernel: scale = max * (1 / 127), q = rint(y / scale), each step in float32 (ops-nn at
      // e5c3fa93, quant/dequant_swiglu_quant/op_kernel/dequant_swiglu_quant.h, lines 699 to 714).
      const auto step = gated.abs().amax(1, true) * (1 / 127.0f);
      write(q.narrow(0, 0, count), at::nan_to_num(gated / step, 0.0).round());
      write(s.narrow(0, 0, count), step.squeeze(1));
    };
  });
}
