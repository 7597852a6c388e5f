// Reads and writes of elements at positions given by other tensors. An index out of range is an error of the stream, as
// on the device.
#include "op.h"

using namespace ops;

static const Rule kIndices("aclnnEmbedding", "embedding.indices", "indices are int32 or int64",
                           "aclnnEmbedding.md, parameter indices");
static const Rule kWeight("aclnnEmbedding", "embedding.weight", "the weight has 2 dimensions",
                          "aclnnEmbedding.md, parameter weight");

OP(aclnnEmbedding, const aclTensor *weight, const aclTensor *indices, const aclTensor *out) {
  return plan(PHASE, [&] {
    require(kIndices, is_one_of(scalar_type(indices->dtype), {at::kInt, at::kLong}), describe(indices));
    require(kWeight, weight->sizes.size() == 2, describe(weight));
    return [w = view(weight), i = view(indices), y = view(out)] { write(y, at::embedding(w, i)); };
  });
}
OP(aclnnIndexSelect, const aclTensor *self, int64_t dim, const aclTensor *index, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [x = view(self), dim, i = view(index), y = view(out)] { write(y, at::index_select(x, dim, i)); };
  });
}
OP(aclnnGather, const aclTensor *self, int64_t dim, const aclTensor *index, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [x = view(self), dim, i = view(index), y = view(out)] { write(y, at::gather(x, dim, i.to(at::kLong))); };
  });
}
OP(aclnnTake, const aclTensor *self, const aclTensor *index, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [x = view(self), i = view(index), y = view(out)] { write(y, at::take(x, i.to(at::kLong))); };
  });
}

// The plugin passes an empty one-dimensional tensor for a whole dimension; a real empty index has an empty output.
static c10::List<std::optional<at::Tensor>> places(const std::vector<at::Tensor> &indices, bool some) {
  c10::List<std::optional<at::Tensor>> out;
  for (const auto &index : indices) {
    const bool whole = some && index.dim() == 1 && index.numel() == 0;
    const bool mask = index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    out.push_back(whole ? std::nullopt : std::optional(mask ? index : index.to(at::kLong)));
  }
  return out;
}

OP(aclnnIndex, const aclTensor *self, const aclTensorList *indices, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [x = view(self), i = views(indices), y = view(out)] { write(y, at::index(x, places(i, y.numel() > 0))); };
  });
}
OP(aclnnIndexPutImpl, const aclTensor *self, const aclTensorList *indices, const aclTensor *value, bool accumulate,
   bool) {
  return plan(PHASE, [&] {
    return [x = view(self), i = views(indices), v = view(value), accumulate] {
      at::index_put_(const_cast<at::Tensor &>(x), places(i, v.numel() > 0), v, accumulate);
    };
  });
}

// Scatter; reduction 0 replaces, 1 adds, 2 multiplies.
static at::Tensor scattered(const at::Tensor &x, int64_t dim, const at::Tensor &index, const at::Tensor &source,
                            int64_t reduction) {
  const auto i = index.to(at::kLong);
  if (reduction == 0) return at::scatter(x, dim, i, source);
  return at::scatter(x, dim, i, source, reduction == 1 ? "add" : "multiply");
}
static at::Tensor scattered(const at::Tensor &x, int64_t dim, const at::Tensor &index, const at::Scalar &value,
                            int64_t reduction) {
  return scattered(x, dim, index, at::full({}, value, x.options()).expand(index.sizes()), reduction);
}

OP(aclnnScatter, const aclTensor *self, int64_t dim, const aclTensor *index, const aclTensor *source, int64_t reduction,
   const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), i = view(index), s = view(source), y = view(out)] {
      write(y, scattered(x, dim, i, s, reduction));
    };
  });
}
OP(aclnnScatterValue, const aclTensor *self, int64_t dim, const aclTensor *index, const aclScalar *value,
   int64_t reduction, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), i = view(index), v = value->value, y = view(out)] {
      write(y, scattered(x, dim, i, v, reduction));
    };
  });
}
OP(aclnnInplaceScatter, const aclTensor *self, int64_t dim, const aclTensor *index, const aclTensor *source,
   int64_t reduction) {
  return plan(PHASE, [&] {
    return [=, x = view(self), i = view(index), s = view(source)] { write(x, scattered(x, dim, i, s, reduction)); };
  });
}
OP(aclnnInplaceScatterValue, const aclTensor *self, int64_t dim, const aclTensor *index, const aclScalar *value,
   int64_t reduction) {
  return plan(PHASE, [&] {
    return [=, x = view(self), i = view(index), v = value->value] { write(x, scattered(x, dim, i, v, reduction)); };
  });
}
OP(aclnnScatterAdd, const aclTensor *self, int64_t dim, const aclTensor *index, const aclTensor *source,
   const aclTensor *out) {
  return plan(PHASE, [&] {
    return
        [=, x = view(self), i = view(index), s = view(source), y = view(out)] { write(y, scattered(x, dim, i, s, 1)); };
  });
}
OP(aclnnIndexAdd, const aclTensor *self, int64_t dim, const aclTensor *index, const aclTensor *source,
   const aclScalar *alpha, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), i = view(index), s = view(source), a = alpha->value, y = view(out)] {
      write(y, at::index_add(x, dim, i, s, a));
    };
  });
}
OP(aclnnIndexCopy, const aclTensor *self, int64_t dim, const aclTensor *index, const aclTensor *source,
   const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, x = view(self), i = view(index), s = view(source), y = view(out)] {
      write(y, at::index_copy(x, dim, i.to(at::kLong), s));
    };
  });
}
OP(aclnnInplaceIndexCopy, const aclTensor *self, int64_t dim, const aclTensor *index, const aclTensor *source) {
  return plan(PHASE, [&] {
    return [=, x = view(self), i = view(index), s = view(source)] {
      write(x, at::index_copy(x, dim, i.to(at::kLong), s));
    };
  });
}
OP(aclnnInplaceIndexFill, const aclTensor *self, int64_t dim, const aclTensor *index, const aclScalar *value) {
  return plan(PHASE, [&] {
    return [=, x = view(self), i = view(index), v = value->value] {
      write(x, at::index_fill(x, dim, i.to(at::kLong), v));
    };
  });
}

// Positions or elements where a condition holds. Their number is known only after the run, so the call waits for it.
static void fill_front(const aclTensor *out, const at::Tensor &found) {
  at::from_blob(out->data, found.sizes(), at::TensorOptions(scalar_type(out->dtype)).device(at::kCPU)).copy_(found);
  const_cast<aclTensor *>(out)->sizes = found.sizes().vec();
}
OP(aclnnNonzero, const aclTensor *self, const aclTensor *out) {
  return plan(PHASE, [&] { return [x = view(self), out] { fill_front(out, at::nonzero(x)); }; }, 0, true);
}
OP(aclnnNonzeroV2, const aclTensor *self, const aclTensor *out) {  // one row per dimension
  return plan(PHASE, [&] { return [x = view(self), out] { fill_front(out, at::nonzero(x).t()); }; }, 0, true);
}
OP(aclnnMaskedSelect, const aclTensor *self, const aclTensor *mask, const aclTensor *out) {
  return plan(
      PHASE, [&] { return [x = view(self), m = view(mask), out] { fill_front(out, at::masked_select(x, m)); }; }, 0,
      true);
}

OP(aclnnSearchSorted, const aclTensor *sorted, const aclTensor *self, bool out_int32, bool right,
   const aclTensor *sorter, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, s = view(sorted), x = view(self), o = view(sorter), y = view(out)] {
      write(y, at::searchsorted(s, x, out_int32, right, std::nullopt, o.defined() ? std::optional(o) : std::nullopt));
    };
  });
}
OP(aclnnSearchSorteds, const aclTensor *sorted, const aclScalar *self, bool out_int32, bool right,
   const aclTensor *sorter, const aclTensor *out) {
  return plan(PHASE, [&] {
    return [=, s = view(sorted), v = self->value, o = view(sorter), y = view(out)] {
      write(y, at::searchsorted(s, v, out_int32, right, std::nullopt, o.defined() ? std::optional(o) : std::nullopt));
    };
  });
}
