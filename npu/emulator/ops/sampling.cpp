// Sampling: softmax, top-k and top-p, and random numbers.
#include "op.h"

using namespace ops;

OP(aclnnSoftmax, const aclTensor *self, int64_t dim, const aclTensor *out) {
  return plan(PHASE, [&] { return [=, x = view(self), y = view(out)] { write(y, at::softmax(f32(x), dim)); }; });
}
OP(aclnnLogSoftmax, const aclTensor *self, int64_t dim, const aclTensor *out) {
  return plan(PHASE, [&] { return [=, x = view(self), y = view(out)] { write(y, at::log_softmax(f32(x), dim)); }; });
}

static const Rule kLogits("aclnnApplyTopKTopP", "topktopp.logits",
                          "logits are float32, float16 or bfloat16 of 2 dimensions",
                          "aclnnApplyTopKTopP.md, parameter logits");
static const Rule kP("aclnnApplyTopKTopP", "topktopp.p", "p has the dtype of the logits and one value per row",
                     "aclnnApplyTopKTopP.md, parameter p");
static const Rule kK("aclnnApplyTopKTopP", "topktopp.k", "k is int32 with one value per row",
                     "aclnnApplyTopKTopP.md, parameter k; aclnn_apply_top_k_top_p.cpp, CheckDtypeValid, CheckShapeValid");
static const Rule kPRange("aclnnApplyTopKTopP", "topktopp.p_range", "p is from 0 to 1",
                          "aclnnApplyTopKTopP.md, parameter p");
// Larger numbers are right, and take 20 ms at 151,936 columns: https://github.com/vllm-project/vllm-ascend/pull/12232.
static const Rule kKRange("aclnnApplyTopKTopP", "topktopp.k_range", "k is from 1 to 1024 and to the number of columns",
                          "torch_npu-npu_top_k_top_p.md, parameter k; aclnnApplyTopKTopP.md, parameter k");
static const Rule kGiven("aclnnApplyTopKTopP", "topktopp.given", "p or k is given",
                       "aclnn_apply_top_k_top_p.cpp, CheckNotNull");

// Applies top_k and top_p by the formulas of aclnnApplyTopKTopP.md. Sorts ascending and stably. Drops values below the
// k-th largest. Then drops values, from the smallest up, while the cumulative probability is at most 1 - p, but never
// the largest. Restores the original positions.
OP(aclnnApplyTopKTopP, const aclTensor *logits, const aclTensor *p, const aclTensor *k, const aclTensor *out) {
  return plan(PHASE, [&] {
    const auto dtype = scalar_type(logits->dtype);
    require(kLogits, is_one_of(dtype, {at::kFloat, at::kHalf, at::kBFloat16}) && logits->sizes.size() == 2,
            describe(logits));
    require(kGiven, p || k, "neither");
    const std::vector<int64_t> rows{logits->sizes[0]};
    if (p)
      require(kP, scalar_type(p->dtype) == dtype && p->sizes == rows, describe(p) + " for logits " + describe(logits));
    if (k)
      require(kK, scalar_type(k->dtype) == at::kInt && k->sizes == rows,
              describe(k) + " for logits " + describe(logits));
    return [x = view(logits), top_p = view(p), top_k = view(k), y = view(out)] {
      auto [sorted, order] = at::sort(f32(x), std::optional(true), -1, false);
      const double inf = std::numeric_limits<double>::infinity();
      if (top_p.defined())
        require(kPRange, ((f32(top_p) >= 0) & (f32(top_p) <= 1)).all().item<bool>(),
                std::to_string(at::min(f32(top_p)).item<float>()) + " to " +
                    std::to_string(at::max(f32(top_p)).item<float>()));
      if (top_k.defined())
        require(kKRange, ((top_k >= 1) & (top_k <= std::min<int64_t>(1024, sorted.size(1)))).all().item<bool>(),
                std::to_string(at::min(top_k).item<int>()) + " to " + std::to_string(at::max(top_k).item<int>()));
      if (top_k.defined() && !emu::defect("top_k")) {
        const auto last = sorted.size(1) - top_k.to(at::kLong);
        sorted =
            sorted.masked_fill(sorted < at::gather(sorted, 1, last.clamp(0, sorted.size(1) - 1).unsqueeze(1)), -inf);
      }
      if (top_p.defined()) {
        auto dropped = at::cumsum(at::softmax(sorted, -1), -1) <= 1 - f32(top_p).unsqueeze(1);
        dropped.select(1, -1).fill_(false);
        sorted = sorted.masked_fill(dropped, -inf);
      }
      write(y, at::scatter(sorted, 1, order, sorted));
    };
  });
}

// Random numbers are a function of the seed and offset from the plugin's generator, not the device's Philox sequence.
static at::Generator generator(int64_t seed, int64_t offset) {
  return at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15ull +
                                                  static_cast<uint64_t>(offset));
}
// In a captured graph seed and offset are on the device, so that each replay draws new numbers.
static at::Generator generator(const at::Tensor &seed, const at::Tensor &offset, int64_t within) {
  return generator(seed.item<int64_t>(), offset.item<int64_t>() + within);
}

OP(aclnnInplaceUniform, const aclTensor *self, double low, double high, int64_t seed, int64_t offset) {
  return plan(PHASE, [&] { return [=, x = view(self)] { x.uniform_(low, high, generator(seed, offset)); }; });
}
OP(aclnnInplaceUniformTensor, const aclTensor *self, double low, double high, const aclTensor *seed,
   const aclTensor *offset, int64_t within) {
  return plan(PHASE, [&] {
    return [=, x = view(self), s = view(seed), o = view(offset)] { x.uniform_(low, high, generator(s, o, within)); };
  });
}
OP(aclnnInplaceNormal, const aclTensor *self, float mean, float deviation, int64_t seed, int64_t offset) {
  return plan(PHASE, [&] { return [=, x = view(self)] { x.normal_(mean, deviation, generator(seed, offset)); }; });
}
OP(aclnnInplaceNormalTensor, const aclTensor *self, float mean, float deviation, const aclTensor *seed,
   const aclTensor *offset, int64_t within) {
  return plan(PHASE, [&] {
    return
        [=, x = view(self), s = view(seed), o = view(offset)] { x.normal_(mean, deviation, generator(s, o, within)); };
  });
}
OP(aclnnInplaceRandom, const aclTensor *self, int64_t from, int64_t to, int64_t seed, int64_t offset) {
  return plan(PHASE, [&] { return [=, x = view(self)] { x.random_(from, to, generator(seed, offset)); }; });
}
OP(aclnnInplaceBernoulli, const aclTensor *self, const aclScalar *p, int64_t seed, int64_t offset) {
  return plan(PHASE, [&] {
    return [=, x = view(self), q = p->value.toDouble()] { x.bernoulli_(q, generator(seed, offset)); };
  });
}
OP(aclnnInplaceBernoulliTensor, const aclTensor *self, const aclTensor *p, int64_t seed, int64_t offset) {
  return plan(PHASE, [&] { return [=, x = view(self), q = view(p)] { x.bernoulli_(q, generator(seed, offset)); }; });
}
OP(aclnnRandperm, int64_t n, int64_t seed, int64_t offset, const aclTensor *out) {
  return plan(PHASE,
              [&] { return [=, y = view(out)] { write(y, at::randperm(n, generator(seed, offset), at::kLong)); }; });
}
OP(aclnnMultinomial, const aclTensor *self, int64_t samples, bool replacement, int64_t seed, int64_t offset,
   const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), y = view(out)] {
      write(y, at::multinomial(f32(x), samples, replacement, generator(seed, offset)));
    };
  });
}
