// Sums, means, extremes and scans; sorting along a dimension.
#include "op.h"

using namespace ops;

// Dimensions to reduce over; none means all.
static std::vector<int64_t> dimensions(const aclIntArray *dims, const at::Tensor &x) {
  if (dims && !dims->values.empty()) return dims->values;
  std::vector<int64_t> all(x.dim());
  for (int64_t i = 0; i < x.dim(); i++) all[i] = i;
  return all;
}

OP(aclnnReduceSum, const aclTensor *self, const aclIntArray *dims, bool keepdim, aclDataType dtype,
   const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), t = scalar_type(dtype), d = dimensions(dims, view(self)), y = view(out)] {
      write(y, at::sum(x, d, keepdim, t));
    };
  });
}
OP(aclnnMean, const aclTensor *self, const aclIntArray *dims, bool keepdim, aclDataType dtype, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), t = scalar_type(dtype), d = dimensions(dims, view(self)), y = view(out)] {
      write(y, at::mean(x, d, keepdim, t));
    };
  });
}

#define REDUCED(NAME, F)                                                                                           \
  OP(NAME, const aclTensor *self, const aclIntArray *dims, bool keepdim, const aclTensor *out) {                   \
    return plan(PHASE, [&] {                                                                                       \
      return [=, x = view(self), d = dimensions(dims, view(self)), y = view(out)] { write(y, F(x, d, keepdim)); }; \
    });                                                                                                            \
  }
REDUCED(aclnnAmax, at::amax)
REDUCED(aclnnAmin, at::amin)
REDUCED(aclnnAll, at::all)
REDUCED(aclnnAny, at::any)
REDUCED(aclnnLogSumExp, at::logsumexp)

OP(aclnnMax, const aclTensor *self, const aclTensor *out) {
  return plan(PHASE, [&] { return [x = view(self), y = view(out)] { write(y, at::max(x)); }; });
}
OP(aclnnMin, const aclTensor *self, const aclTensor *out) {
  return plan(PHASE, [&] { return [x = view(self), y = view(out)] { write(y, at::min(x)); }; });
}
OP(aclnnProd, const aclTensor *self, aclDataType dtype, const aclTensor *out) {
  return plan(PHASE,
              [&] { return [x = view(self), t = scalar_type(dtype), y = view(out)] { write(y, at::prod(x, t)); }; });
}

// Extreme value and its first position.
#define EXTREME(NAME, F)                                                                                          \
  OP(NAME, const aclTensor *self, int64_t dim, bool keepdim, const aclTensor *values, const aclTensor *indices) { \
    return plan(PHASE, [&] {                                                                                      \
      return [=, x = view(self), v = view(values), i = view(indices)] {                                           \
        const auto [value, index] = F(x, dim, keepdim);                                                           \
        write(v, value);                                                                                          \
        write(i, index);                                                                                          \
      };                                                                                                          \
    });                                                                                                           \
  }
EXTREME(aclnnMaxDim, at::max)
EXTREME(aclnnMinDim, at::min)

// The last of equal numbers: aclnnArgMax.md promises the same one in each call, and not the first.
OP(aclnnArgMax, const aclTensor *self, int64_t dim, bool keepdim, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), y = view(out)] {
      const auto last = x.dim() ? x.size(dim) - 1 : 0;
      write(y, last - at::argmax(x.dim() ? at::flip(x, dim) : x, dim, keepdim));
    };
  });
}
OP(aclnnArgMin, const aclTensor *self, int64_t dim, bool keepdim, const aclTensor *out) {
  return plan(PHASE, [&] { return [=, x = view(self), y = view(out)] { write(y, at::argmin(x, dim, keepdim)); }; });
}

// Scans in float32 for smaller elements, rounded at the end.
OP(aclnnCumsum, const aclTensor *self, int64_t dim, aclDataType dtype, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), t = scalar_type(dtype), y = view(out)] {
      write(y, c10::isReducedFloatingType(t) ? at::cumsum(f32(x), dim) : at::cumsum(x, dim, t));
    };
  });
}
OP(aclnnCummax, const aclTensor *self, int64_t dim, const aclTensor *values, const aclTensor *indices) {
  return plan(PHASE, [&] {
    return [=, x = view(self), v = view(values), i = view(indices)] {
      const auto [value, index] = at::cummax(x, dim);
      write(v, value);
      write(i, index);
    };
  });
}

static const Rule kWithin("aclnnTopkV2 aclnnTopk", "topk.k", "k is between 0 and the size of the dimension",
                          "aclnnTopk.md, parameter k");

static Work top(const aclTensor *self, int64_t k, int64_t dim, bool largest, bool sorted, const aclTensor *values,
                const aclTensor *indices) {
  const auto x = view(self);
  require(kWithin, k >= 0 && k <= (x.dim() ? x.size(dim) : 1), std::to_string(k) + " of " + describe(self));
  return [=, v = view(values), i = view(indices)] {
    const auto [value, index] = at::topk(x, k, dim, largest, sorted);
    write(v, value);
    write(i, index);
  };
}
OP(aclnnTopkV2, const aclTensor *self, int64_t k, int64_t dim, bool largest, bool sorted, int64_t,
   const aclTensor *values, const aclTensor *indices) {
  return plan(PHASE, [&] { return top(self, k, dim, largest, sorted, values, indices); });
}
OP(aclnnTopk, const aclTensor *self, int64_t k, int64_t dim, bool largest, bool sorted, const aclTensor *values,
   const aclTensor *indices) {
  return plan(PHASE, [&] { return top(self, k, dim, largest, sorted, values, indices); });
}
OP(aclnnSort, const aclTensor *self, bool stable, int64_t dim, bool descending, const aclTensor *values,
   const aclTensor *indices) {
  return plan(PHASE, [&] {
    return [=, x = view(self), v = view(values), i = view(indices)] {
      const auto [value, index] = at::sort(x, std::optional(stable), dim, descending);
      write(v, value);
      write(i, index);
    };
  });
}
OP(aclnnBincount, const aclTensor *self, const aclTensor *weights, int64_t minlength, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), w = view(weights), y = view(out)] {
      write(y, at::bincount(x, w.defined() ? std::optional(w) : std::nullopt, minlength));
    };
  });
}
OP(aclnnEqual, const aclTensor *self, const aclTensor *other, const aclTensor *out) {
  return plan(PHASE, [&] { return [a = view(self), b = view(other), y = view(out)] { y.fill_(at::equal(a, b)); }; });
}
OP(aclnnIsClose, const aclTensor *self, const aclTensor *other, double rtol, double atol, bool equal_nan,
   const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, a = view(self), b = view(other), y = view(out)] { write(y, at::isclose(a, b, rtol, atol, equal_nan)); };
  });
}
