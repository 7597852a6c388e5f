// Rotary position embedding.
#include "op.h"

using namespace ops;

namespace {

constexpr Dtypes kFloats = {at::kFloat, at::kHalf, at::kBFloat16};
constexpr const char *kMul = "aclnnRotaryPositionEmbeddingV2";

const Rule kX(kMul, "rotarymul.x", "x has 4 dimensions in bfloat16, float16 or float32",
              "aclnnRotaryPositionEmbedding.md, parameter x");
const Rule kSame(kMul, "rotarymul.dtype", "cos and sin have the dtype of x",
                 "aclnnRotaryPositionEmbedding.md, parameters cos, sin");
const Rule kHead(kMul, "rotarymul.head_dim", "the last dimension is even, below 896, and the same in x, cos and sin",
                 "aclnnRotaryPositionEmbedding.md, constraints on A2/A3");
const Rule kShape(kMul, "rotarymul.cos_shape",
                  "cos and sin have one shape, with each dimension x's or 1 and one of the first three 1 (11SD, B1SD, "
                  "1S1D, BS1D, S11D, SB1D), or x's own",
                  "aclnnRotaryPositionEmbedding.md, constraints on A2/A3, half mode");
const Rule kBatch(kMul, "rotarymul.batch", "batch and heads are below 1000",
                  "aclnnRotaryPositionEmbedding.md, constraints on A2/A3, half mode");
const Rule kMode(kMul, "rotarymul.mode", "the mode is half (0) or interleave (1)",
                 "aclnnRotaryPositionEmbedding.md, parameter mode on A2/A3");

const Rule kPair("aclnnApplyRotaryPosEmbV2", "applyrope.dtype",
                 "query, key, cos and sin have one dtype, bfloat16, float16 or float32",
                 "aclnnApplyRotaryPosEmbV2.md, constraints");
const Rule kPairHead("aclnnApplyRotaryPosEmbV2", "applyrope.head_dim",
                     "the last dimension of query, key, cos and sin is 128", "aclnnApplyRotaryPosEmbV2.md, parameters");
const Rule kPairShape("aclnnApplyRotaryPosEmbV2", "applyrope.shape",
                      "query and key differ only in heads, and cos and sin have one head",
                      "aclnnApplyRotaryPosEmbV2.md, constraints");
const Rule kPairLayout("aclnnApplyRotaryPosEmbV2", "applyrope.layout",
                       "the layout is BSND (1), SBND (2), BNSD (3) with 4 dimensions or TND (4) with 3",
                       "aclnnApplyRotaryPosEmbV2.md, parameter layout");
const Rule kPairMode("aclnnApplyRotaryPosEmbV2", "applyrope.mode", "the rotary mode is half or interleave",
                     "aclnnApplyRotaryPosEmbV2.md, parameter rotaryMode (quarter is not emulated)");

// x * cos + rotated(x) * sin: half rotates (x1, x2) to (-x2, x1), interleave rotates pairs of neighbours.
at::Tensor rotated(const at::Tensor &x, const at::Tensor &cos, const at::Tensor &sin, bool interleave) {
  const auto v = f32(x);
  const auto pairs =
      interleave ? v.unflatten(-1, {v.size(-1) / 2, 2}) : v.unflatten(-1, {2, v.size(-1) / 2}).transpose(-1, -2);
  const auto turned = at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, interleave ? -1 : -2).flatten(-2);
  return v * f32(cos) + turned * f32(sin);
}

bool fits(at::IntArrayRef x, at::IntArrayRef cos) {
  bool own = true;
  int64_t ones = 0;
  for (int d = 0; d < 3; d++) {
    if (cos[d] != x[d] && cos[d] != 1) return false;
    own = own && cos[d] == x[d];
    ones += cos[d] == 1;
  }
  return own || ones > 0;
}

int plan_mul(const char *entry, uint64_t *workspace, aclOpExecutor **executor, const aclTensor *self,
             const aclTensor *cos, const aclTensor *sin, int64_t mode, const aclTensor *out) {
  return plan(entry, workspace, executor, [&] {
    const auto x = view(self), c = view(cos), s = view(sin);
    require(kX, x.dim() == 4 && is_one_of(x.scalar_type(), kFloats), describe(self));
    require(kSame, self->dtype == cos->dtype && self->dtype == sin->dtype,
            describe(cos) + " and " + describe(sin) + " for x " + describe(self));
    require(kMode, mode == 0 || mode == 1, std::to_string(mode));
    require(kShape, c.dim() == 4 && cos->sizes == sin->sizes && fits(x.sizes(), c.sizes()),
            describe(cos) + " and " + describe(sin) + " for x " + describe(self));
    require(kHead, x.size(3) % 2 == 0 && x.size(3) < 896 && c.size(3) == x.size(3),
            describe(cos) + " for x " + describe(self));
    // The dimensions of size 1 in cos determine the layout; in each, the sequence is the dimension that may be long.
    const bool heads_second = c.size(1) == 1 && c.size(2) == x.size(2);
    const bool sequence_first = c.size(0) == x.size(0) && c.size(1) == 1 && c.size(2) == 1 && x.size(0) > 1;
    require(kBatch,
            (sequence_first ? x.size(1) < 1000 && x.size(2) < 1000
                            : x.size(0) < 1000 && x.size(heads_second ? 1 : 2) < 1000),
            describe(self));
    return [=, y = view(out)] { write(y, rotated(x, c, s, mode == 1)); };
  });
}

}  // namespace

OP(aclnnRotaryPositionEmbeddingV2, const aclTensor *self, const aclTensor *cos, const aclTensor *sin, int64_t mode,
   const aclTensor *rotate, const aclTensor *out) {
  return rotate ? emu::refuse("aclnnRotaryPositionEmbeddingV2: rotate is not emulated")
                : plan_mul(PHASE, self, cos, sin, mode, out);
}

// In place, into query and key.
OP(aclnnApplyRotaryPosEmbV2, const aclTensor *query, const aclTensor *key, const aclTensor *cos, const aclTensor *sin,
   int64_t layout, char *mode) {
  return plan(PHASE, [&] {
    const auto q = view(query), k = view(key), c = view(cos), s = view(sin);
    const std::string all =
        "query " + describe(query) + ", key " + describe(key) + ", cos " + describe(cos) + ", sin " + describe(sin);
    require(kPairMode, std::string(mode) == "half" || std::string(mode) == "interleave", mode);
    require(kPair,
            is_one_of(q.scalar_type(), kFloats) && query->dtype == key->dtype && query->dtype == cos->dtype &&
                query->dtype == sin->dtype,
            all);
    require(kPairLayout,
            layout >= 1 && layout <= 4 && q.dim() == (layout == 4 ? 3 : 4) && k.dim() == q.dim() && c.dim() == q.dim(),
            "layout " + std::to_string(layout) + ", " + all);
    const bool wide = q.size(-1) == 128 && k.size(-1) == 128 && c.size(-1) == 128;
    require(kPairHead, wide || (emu::option("small_heads") && q.size(-1) == k.size(-1) && q.size(-1) == c.size(-1)),
            all);
    auto one = [&](std::vector<int64_t> sizes) {
      sizes[layout == 3 ? 1 : q.dim() - 2] = 1;
      return sizes;
    };
    require(kPairShape, cos->sizes == sin->sizes && one(query->sizes) == cos->sizes && one(key->sizes) == cos->sizes,
            all);
    return [=, interleave = std::string(mode) == "interleave"] {
      write(q, rotated(q, c, s, interleave));
      write(k, rotated(k, c, s, interleave));
    };
  });
}
