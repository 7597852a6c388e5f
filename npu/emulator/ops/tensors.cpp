// Creation, copies, casts, concatenation and rearrangement of tensors.
#include "op.h"

using namespace ops;

OP(aclnnInplaceCopy, const aclTensor *self, const aclTensor *source) {
  return plan(PHASE, [&] { return [x = view(self), s = view(source)] { x.copy_(s); }; });
}

static const Rule kCast("aclnnCast", "cast.dtype", "the output has the dtype that is asked for",
                        "aclnnCast.md, parameter out");

OP(aclnnCast, const aclTensor *self, aclDataType dtype, const aclTensor *out) {
  return plan(PHASE, [&] {
    require(kCast, out->dtype == dtype, describe(out));
    return [x = view(self), y = view(out)] { write(y, x.to(y.scalar_type())); };
  });
}

OP(aclnnInplaceZero, const aclTensor *self) {
  return plan(PHASE, [&] { return [x = view(self)] { x.zero_(); }; });
}
OP(aclnnInplaceOne, const aclTensor *self) {
  return plan(PHASE, [&] { return [x = view(self)] { x.fill_(1); }; });
}
OP(aclnnInplaceFillScalar, const aclTensor *self, const aclScalar *value) {
  return plan(PHASE, [&] { return [x = view(self), v = value->value] { x.fill_(v); }; });
}
OP(aclnnInplaceFillTensor, const aclTensor *self, const aclTensor *value) {
  return plan(PHASE, [&] { return [x = view(self), v = view(value)] { x.fill_(v.reshape({})); }; });
}

OP(aclnnArange, const aclScalar *start, const aclScalar *end, const aclScalar *step, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [a = start->value, b = end->value, c = step->value, y = view(out)] {
      write(y, at::arange(a, b, c, at::TensorOptions(y.scalar_type()).device(at::kCPU)));
    };
  });
}
OP(aclnnLinspace, const aclScalar *start, const aclScalar *end, int64_t steps, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [a = start->value, b = end->value, steps, y = view(out)] {
      write(y, at::linspace(a, b, steps, at::TensorOptions(y.scalar_type()).device(at::kCPU)));
    };
  });
}
OP(aclnnEye, int64_t n, int64_t m, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [n, m, y = view(out)] { write(y, at::eye(n, m, at::TensorOptions(y.scalar_type()).device(at::kCPU))); };
  });
}

OP(aclnnCat, const aclTensorList *tensors, int64_t dim, const aclTensor *out) {
  return plan(PHASE, [&] { return [x = views(tensors), dim, y = view(out)] { write(y, at::cat(x, dim)); }; });
}
OP(aclnnStack, const aclTensorList *tensors, int64_t dim, const aclTensor *out) {
  return plan(PHASE, [&] { return [x = views(tensors), dim, y = view(out)] { write(y, at::stack(x, dim)); }; });
}
OP(aclnnRepeat, const aclTensor *self, const aclIntArray *repeats, const aclTensor *out) {
  return plan(PHASE, [&] { return [x = view(self), r = repeats->values, y = view(out)] { write(y, x.repeat(r)); }; });
}
OP(aclnnRepeatInterleaveInt, const aclTensor *self, int64_t repeats, int64_t size, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), y = view(out)] { write(y, at::repeat_interleave(x.flatten(), repeats, 0, size)); };
  });
}
OP(aclnnRepeatInterleaveIntWithDim, const aclTensor *self, int64_t repeats, int64_t dim, int64_t size,
   const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), y = view(out)] { write(y, at::repeat_interleave(x, repeats, dim, size)); };
  });
}
OP(aclnnRepeatInterleave, const aclTensor *self, const aclTensor *repeats, int64_t size, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), r = view(repeats), y = view(out)] {
      write(y, at::repeat_interleave(x.flatten(), r, 0, size));
    };
  });
}
OP(aclnnRepeatInterleaveWithDim, const aclTensor *self, const aclTensor *repeats, int64_t dim, int64_t size,
   const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), r = view(repeats), y = view(out)] { write(y, at::repeat_interleave(x, r, dim, size)); };
  });
}

OP(aclnnTril, const aclTensor *self, int64_t diagonal, const aclTensor *out) {
  return plan(PHASE, [&] { return [=, x = view(self), y = view(out)] { write(y, at::tril(x, diagonal)); }; });
}
OP(aclnnTriu, const aclTensor *self, int64_t diagonal, const aclTensor *out) {
  return plan(PHASE, [&] { return [=, x = view(self), y = view(out)] { write(y, at::triu(x, diagonal)); }; });
}
OP(aclnnFlip, const aclTensor *self, const aclIntArray *dims, const aclTensor *out) {
  return plan(PHASE, [&] { return [x = view(self), d = dims->values, y = view(out)] { write(y, at::flip(x, d)); }; });
}
OP(aclnnRoll, const aclTensor *self, const aclIntArray *shifts, const aclIntArray *dims, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [x = view(self), s = shifts->values, d = dims->values, y = view(out)] { write(y, at::roll(x, s, d)); };
  });
}
OP(aclnnConstantPadNd, const aclTensor *self, const aclIntArray *pad, const aclScalar *value, const aclTensor *out) {
  return plan(PHASE, [&] {
    return
        [x = view(self), p = pad->values, v = value->value, y = view(out)] { write(y, at::constant_pad_nd(x, p, v)); };
  });
}
