// Matrix products: sums in float32, rounded once at the end, like the cube unit's accumulator.
#include "nz.h"

using namespace ops;

namespace {

constexpr const char *kAll =
    "aclnnMatmul aclnnMm aclnnAddmm aclnnBatchMatMul aclnnBaddbmm aclnnMatmulWeightNz "
    "aclnnAddmmWeightNz aclnnMv aclnnDot";
const Rule kDtype(kAll, "matmul.dtype", "the factors are bfloat16, float16 or float32",
                  "aclnnMatmul.md, parameters self, mat2");
const Rule kSame(kAll, "matmul.same_dtype", "the factors are not one bfloat16 and one float16",
                 "aclnnMatmul.md, constraints");
const Rule kInner(kAll, "matmul.inner", "the inner dimensions are equal", "aclnnMatmul.md, parameter mat2");
const Rule kCube(kAll, "matmul.cube_math_type", "the cube math type is 0 to 4, and not 2 (float16) for bfloat16",
                 "aclnnMatmul.md, parameter cubeMathType");
const Rule kWeight("aclnnMatmulWeightNz aclnnAddmmWeightNz", "matmul.nz_one",
                   "no dimension of a weight in FRACTAL_NZ is 1", "aclnnMatmulWeightNz.md, constraints");

void check(const aclTensor *a, const aclTensor *b, int8_t cube) {
  const auto x = scalar_type(a->dtype), y = scalar_type(b->dtype);
  for (const auto *t : {a, b})
    require(kDtype, is_one_of(scalar_type(t->dtype), {at::kBFloat16, at::kHalf, at::kFloat}), describe(t));
  require(kSame, x == y || x == at::kFloat || y == at::kFloat, describe(a) + " and " + describe(b));
  const int64_t inner = a->sizes.back(), other = b->sizes.size() > 1 ? b->sizes[b->sizes.size() - 2] : b->sizes[0];
  require(kInner, inner == other, describe(a) + " and " + describe(b));
  require(kCube, cube >= 0 && cube <= 4 && !(cube == 2 && x == at::kBFloat16), std::to_string(cube));
  if (is_nz(b)) require(kWeight, b->sizes.back() != 1 && other != 1, describe(b));
}

// ATen also sums halves in float32 and rounds once, many times faster than converting them.
at::Tensor product(const at::Tensor &a, const at::Tensor &b, at::ScalarType to) {
  const bool alike = a.scalar_type() == to && b.scalar_type() == to;
  auto out = alike ? at::matmul(a, b) : at::matmul(f32(a), f32(b));
  if (out.dim() && out.size(-1) > 65536 && emu::defect("wide_product")) out.slice(-1, 65536).zero_();
  return out;
}

Work multiply(const aclTensor *a, const aclTensor *b, const aclTensor *out, int8_t cube) {
  check(a, b, cube);
  return [x = Matrix(a), w = Matrix(b), y = view(out)] { write(y, product(x.read(), w.read(), y.scalar_type())); };
}

Work multiply_add(const aclTensor *c, const aclTensor *a, const aclTensor *b, const aclScalar *beta,
                  const aclScalar *alpha, const aclTensor *out, int8_t cube) {
  check(a, b, cube);
  return [d = view(c), x = Matrix(a), w = Matrix(b), p = beta->value, q = alpha->value, y = view(out)] {
    write(y, at::add(product(x.read(), w.read(), at::kFloat) * q, f32(d), p).expand(y.sizes()));
  };
}

}  // namespace

#define PRODUCT(NAME)                                                                         \
  OP(NAME, const aclTensor *self, const aclTensor *mat2, const aclTensor *out, int8_t cube) { \
    return plan(PHASE, [&] { return multiply(self, mat2, out, cube); });                      \
  }
#define SUM_OF_PRODUCT(NAME)                                                                           \
  OP(NAME, const aclTensor *self, const aclTensor *mat1, const aclTensor *mat2, const aclScalar *beta, \
     const aclScalar *alpha, const aclTensor *out, int8_t cube) {                                      \
    return plan(PHASE, [&] { return multiply_add(self, mat1, mat2, beta, alpha, out, cube); });        \
  }

PRODUCT(aclnnMatmul)
PRODUCT(aclnnMm)
PRODUCT(aclnnBatchMatMul)
PRODUCT(aclnnMatmulWeightNz)
PRODUCT(aclnnMv)
SUM_OF_PRODUCT(aclnnAddmm)
SUM_OF_PRODUCT(aclnnBaddbmm)
SUM_OF_PRODUCT(aclnnAddmmWeightNz)

OP(aclnnDot, const aclTensor *self, const aclTensor *other, const aclTensor *out) {
  return plan(PHASE, [&] { return multiply(self, other, out, 0); });
}
