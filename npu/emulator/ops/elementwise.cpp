// Elementwise operators: one input, two inputs, an input and a number; comparisons, selection and clamping.
#include "op.h"

using namespace ops;

namespace {

using Unary = at::Tensor (*)(const at::Tensor &);
using Binary = at::Tensor (*)(const at::Tensor &, const at::Tensor &);
using WithNumber = at::Tensor (*)(const at::Tensor &, const at::Scalar &);

Work unary(const aclTensor *self, const aclTensor *out, Unary f) {
  return [x = view(self), y = view(out), f] { write(y, f(x)); };
}

// `other` may be a number: its type promotes the result only by kind, as in torch.
Work binary(const aclTensor *self, const aclTensor *other, const aclTensor *out, Binary f) {
  return [a = view(self), b = view(other), y = view(out), f] { write(y, f(a, b)); };
}

Work with_number(const aclTensor *self, const aclScalar *other, const aclTensor *out, WithNumber f) {
  return [a = view(self), b = other->value, y = view(out), f] { write(y, f(a, b)); };
}

}  // namespace

// Writes f(self) to `out`, or to `self`.
#define UNARY(NAME, F)                                       \
  OP(NAME, const aclTensor *self, const aclTensor *out) {    \
    return plan(PHASE, [&] { return unary(self, out, F); }); \
  }
#define UNARY_INPLACE(NAME, F)                                \
  OP(NAME, const aclTensor *self) {                           \
    return plan(PHASE, [&] { return unary(self, self, F); }); \
  }
#define UNARY_BOTH(NAME, F) UNARY(aclnn##NAME, F) UNARY_INPLACE(aclnnInplace##NAME, F)

UNARY_BOTH(Exp, at::exp)
UNARY_BOTH(Exp2, at::exp2)
UNARY_BOTH(Expm1, at::expm1)
UNARY_BOTH(Log, at::log)
UNARY_BOTH(Log1p, at::log1p)
UNARY_BOTH(Log2, at::log2)
UNARY(aclnnNeg, at::neg)
UNARY_BOTH(Sqrt, at::sqrt)
UNARY_BOTH(Rsqrt, at::rsqrt)
UNARY_BOTH(Reciprocal, at::reciprocal)
UNARY_BOTH(Sin, at::sin)
UNARY_BOTH(Cos, at::cos)
UNARY_BOTH(Tanh, at::tanh)
UNARY_BOTH(Sigmoid, at::sigmoid)
UNARY_BOTH(Relu, at::relu)
UNARY_BOTH(Floor, at::floor)
UNARY_BOTH(Ceil, at::ceil)
UNARY(aclnnRound, at::round)
UNARY(aclnnTrunc, at::trunc)
UNARY_BOTH(Erf, at::erf)
UNARY_BOTH(LogicalNot, at::logical_not)
UNARY(aclnnAbs, at::abs)
UNARY(aclnnSign, at::sign)
UNARY(aclnnSilu, at::silu)
UNARY(aclnnBitwiseNot, at::bitwise_not)
UNARY(aclnnIsFinite, at::isfinite)
UNARY(aclnnIsPosInf, at::isposinf)
UNARY(aclnnIsNegInf, at::isneginf)

// Two tensors, broadcast to each other.
#define BINARY(NAME, F)                                                           \
  OP(NAME, const aclTensor *self, const aclTensor *other, const aclTensor *out) { \
    return plan(PHASE, [&] { return binary(self, other, out, F); });              \
  }
#define BINARY_INPLACE(NAME, F)                                       \
  OP(NAME, const aclTensor *self, const aclTensor *other) {           \
    return plan(PHASE, [&] { return binary(self, other, self, F); }); \
  }
#define NUMBER(NAME, F)                                                           \
  OP(NAME, const aclTensor *self, const aclScalar *other, const aclTensor *out) { \
    return plan(PHASE, [&] { return with_number(self, other, out, F); });         \
  }
#define NUMBER_INPLACE(NAME, F)                                            \
  OP(NAME, const aclTensor *self, const aclScalar *other) {                \
    return plan(PHASE, [&] { return with_number(self, other, self, F); }); \
  }
// A family with a tensor or a number as second operand, into `out` or in place: aclnnMul, aclnnMuls, aclnnInplaceMul,
// aclnnInplaceMuls.
#define ARITHMETIC(NAME, F) \
  BINARY(aclnn##NAME, F)    \
  BINARY_INPLACE(aclnnInplace##NAME, F) NUMBER(aclnn##NAME##s, F) NUMBER_INPLACE(aclnnInplace##NAME##s, F)
// The same with the second operand in the name: aclnnEqTensor, aclnnEqScalar and their in-place forms.
#define RELATION(NAME, F)                                                      \
  BINARY(aclnn##NAME##Tensor, F)                                               \
  BINARY_INPLACE(aclnnInplace##NAME##Tensor, F) NUMBER(aclnn##NAME##Scalar, F) \
      NUMBER_INPLACE(aclnnInplace##NAME##Scalar, F)

ARITHMETIC(Mul, at::mul)
ARITHMETIC(Div, at::div)
ARITHMETIC(FloorDivide, at::floor_divide)
RELATION(Eq, at::eq)
RELATION(Ne, at::ne)
RELATION(Lt, at::lt)
RELATION(Le, at::le)
RELATION(Gt, at::gt)
RELATION(Ge, at::ge)
RELATION(BitwiseAnd, at::bitwise_and)
BINARY(aclnnBitwiseOrTensor, at::bitwise_or)
NUMBER(aclnnBitwiseOrScalar, at::bitwise_or)
RELATION(BitwiseXor, at::bitwise_xor)
BINARY(aclnnMaximum, at::maximum)
BINARY(aclnnMinimum, at::minimum)
BINARY(aclnnLogicalAnd, at::logical_and)
BINARY_INPLACE(aclnnInplaceLogicalAnd, at::logical_and)
BINARY(aclnnLogicalOr, at::logical_or)
BINARY_INPLACE(aclnnInplaceLogicalOr, at::logical_or)
BINARY(aclnnLogicalXor, at::logical_xor)
BINARY(aclnnRemainderTensorTensor, at::remainder)
BINARY_INPLACE(aclnnInplaceRemainderTensorTensor, at::remainder)
NUMBER(aclnnRemainderTensorScalar, at::remainder)
NUMBER_INPLACE(aclnnInplaceRemainderTensorScalar, at::remainder)
BINARY(aclnnFmodTensor, at::fmod)
NUMBER(aclnnFmodScalar, at::fmod)
BINARY(aclnnPowTensorTensor, at::pow)
BINARY_INPLACE(aclnnInplacePowTensorTensor, at::pow)
NUMBER(aclnnPowTensorScalar, at::pow)
NUMBER_INPLACE(aclnnInplacePowTensorScalar, at::pow)
NUMBER(aclnnClampMin, at::clamp_min)
NUMBER(aclnnClampMax, at::clamp_max)
NUMBER_INPLACE(aclnnInplaceClampMax, at::clamp_max)
BINARY(aclnnClampMinTensor, at::clamp_min)
BINARY(aclnnClampMaxTensor, at::clamp_max)

// self + alpha * other and similar operators.
#define WITH_ALPHA(NAME, F)                                                                                         \
  OP(aclnn##NAME, const aclTensor *self, const aclTensor *other, const aclScalar *alpha, const aclTensor *out) {    \
    return plan(PHASE, [&] {                                                                                        \
      return [a = view(self), b = view(other), c = alpha->value, y = view(out)] { write(y, F(a, b, c)); };          \
    });                                                                                                             \
  }                                                                                                                 \
  OP(aclnn##NAME##s, const aclTensor *self, const aclScalar *other, const aclScalar *alpha, const aclTensor *out) { \
    return plan(PHASE, [&] {                                                                                        \
      return [a = view(self), b = other->value, c = alpha->value, y = view(out)] { write(y, F(a, b, c)); };         \
    });                                                                                                             \
  }
#define WITH_ALPHA_INPLACE(NAME, F)                                                                                    \
  OP(aclnnInplace##NAME, const aclTensor *self, const aclTensor *other, const aclScalar *alpha) {                      \
    return plan(PHASE, [&] { return [a = view(self), b = view(other), c = alpha->value] { write(a, F(a, b, c)); }; }); \
  }                                                                                                                    \
  OP(aclnnInplace##NAME##s, const aclTensor *self, const aclScalar *other, const aclScalar *alpha) {                   \
    return plan(PHASE,                                                                                                 \
                [&] { return [a = view(self), b = other->value, c = alpha->value] { write(a, F(a, b, c)); }; });       \
  }

WITH_ALPHA(Add, at::add)
WITH_ALPHA_INPLACE(Add, at::add)
WITH_ALPHA(Sub, at::sub)
WITH_ALPHA_INPLACE(Sub, at::sub)
WITH_ALPHA(Rsub, at::rsub)

// Rounding mode of div: 0 true division, 1 towards zero, 2 down.
static std::optional<c10::string_view> rounding(int mode) {
  if (mode == 1) return "trunc";
  if (mode == 2) return "floor";
  return std::nullopt;
}

OP(aclnnDivMod, const aclTensor *self, const aclTensor *other, int mode, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [a = view(self), b = view(other), mode, y = view(out)] { write(y, at::div(a, b, rounding(mode))); };
  });
}
OP(aclnnDivMods, const aclTensor *self, const aclScalar *other, int mode, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [a = view(self), b = other->value, mode, y = view(out)] { write(y, at::div(a, b, rounding(mode))); };
  });
}
OP(aclnnInplaceDivMod, const aclTensor *self, const aclTensor *other, int mode) {
  return plan(PHASE,
              [&] { return [a = view(self), b = view(other), mode] { write(a, at::div(a, b, rounding(mode))); }; });
}
OP(aclnnInplaceDivMods, const aclTensor *self, const aclScalar *other, int mode) {
  return plan(PHASE,
              [&] { return [a = view(self), b = other->value, mode] { write(a, at::div(a, b, rounding(mode))); }; });
}
OP(aclnnPowScalarTensor, const aclScalar *self, const aclTensor *exponent, const aclTensor *out) {
  return plan(PHASE, [&] { return [a = self->value, b = view(exponent), y = view(out)] { write(y, at::pow(a, b)); }; });
}
OP(aclnnRemainderScalarTensor, const aclScalar *self, const aclTensor *other, const aclTensor *out) {
  return plan(PHASE,
              [&] { return [a = self->value, b = view(other), y = view(out)] { write(y, at::remainder(a, b)); }; });
}

// Clamping; either bound may be absent.
static std::optional<at::Scalar> bound(const aclScalar *scalar) {
  return scalar ? std::optional(scalar->value) : std::nullopt;
}
static std::optional<at::Tensor> bound(const aclTensor *tensor) {
  return tensor ? std::optional(view(tensor)) : std::nullopt;
}

OP(aclnnClamp, const aclTensor *self, const aclScalar *low, const aclScalar *high, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [x = view(self), a = bound(low), b = bound(high), y = view(out)] { write(y, at::clamp(x, a, b)); };
  });
}
OP(aclnnClampTensor, const aclTensor *self, const aclTensor *low, const aclTensor *high, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [x = view(self), a = bound(low), b = bound(high), y = view(out)] { write(y, at::clamp(x, a, b)); };
  });
}
OP(aclnnNanToNum, const aclTensor *self, float nan, float high, float low, const aclTensor *out) {
  return plan(PHASE,
              [&] { return [=, x = view(self), y = view(out)] { write(y, at::nan_to_num(x, nan, high, low)); }; });
}

// Selection by a mask.
OP(aclnnSWhere, const aclTensor *condition, const aclTensor *self, const aclTensor *other, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [c = view(condition), a = view(self), b = view(other), y = view(out)] { write(y, at::where(c, a, b)); };
  });
}
OP(aclnnInplaceMaskedFillScalar, const aclTensor *self, const aclTensor *mask, const aclScalar *value) {
  return plan(PHASE, [&] { return [x = view(self), m = view(mask), v = value->value] { x.masked_fill_(m, v); }; });
}
OP(aclnnInplaceMaskedFillTensor, const aclTensor *self, const aclTensor *mask, const aclTensor *value) {
  return plan(PHASE,
              [&] { return [x = view(self), m = view(mask), v = view(value)] { x.masked_fill_(m, v.reshape({})); }; });
}
OP(aclnnSoftplus, const aclTensor *self, const aclScalar *beta, const aclScalar *threshold, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [x = view(self), b = beta->value, most = threshold->value, y = view(out)] {
      write(y, at::softplus(x, b, most));
    };
  });
}
OP(aclnnAddcmul, const aclTensor *self, const aclTensor *first, const aclTensor *second, const aclScalar *value,
   const aclTensor *out) {
  return plan(PHASE, [&] {
    return [x = view(self), a = view(first), b = view(second), c = value->value, y = view(out)] {
      write(y, at::addcmul(x, a, b, c));
    };
  });
}
