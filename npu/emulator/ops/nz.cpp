#include "nz.h"

#include "aclop.h"

namespace ops {
namespace {

const Rule kView(
    "aclnnMatmulWeightNz aclnnAddmmWeightNz aclnnQuantMatmulWeightNz aclnnNpuFormatCast aclnnGroupedMatmulWeightNz "
    "aclnnGroupedMatmulSwigluQuantWeightNzV2",
    "nz.view", "a tensor in FRACTAL_NZ is whole, or a transposed view of it",
    "aclnnNpuFormatCast.md, constraints on A2/A3");

int64_t tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

bool is_transposed(const aclTensor *t) {
  const auto n = t->sizes.size();
  return n >= 2 && t->strides[n - 2] == 1 && t->strides[n - 1] == t->sizes[n - 2] && t->sizes[n - 2] != 1;
}

}  // namespace

std::vector<int64_t> nz_sizes(at::IntArrayRef sizes, int64_t c) {
  std::vector<int64_t> out(sizes.begin(), sizes.end() - 2);
  for (const int64_t size : {tiles(sizes[sizes.size() - 1], c), tiles(sizes[sizes.size() - 2], 16), int64_t{16}, c})
    out.push_back(size);
  return out;
}

at::Tensor pack_nz(const at::Tensor &matrix, int64_t c) {
  const int64_t k = matrix.size(-2), n = matrix.size(-1);
  const auto padded = at::constant_pad_nd(matrix, {0, tiles(n, c) * c - n, 0, tiles(k, 16) * 16 - k});
  return padded.unflatten(-1, {tiles(n, c), c})
      .unflatten(-3, {tiles(k, 16), 16})
      .transpose(-2, -3)
      .transpose(-3, -4)
      .contiguous();
}

at::Tensor unpack_nz(const at::Tensor &stored, int64_t rows, int64_t columns) {
  const auto tiles = stored.transpose(-3, -4).transpose(-2, -3);  // (..., rows of tiles, 16, columns of tiles, c)
  return tiles.flatten(-2).flatten(-3, -2).narrow(-2, 0, rows).narrow(-1, 0, columns);
}

Matrix::Matrix(const aclTensor *tensor) : nz_(is_nz(tensor)) {
  if (!nz_) {
    stored_ = view(tensor);
    return;
  }
  auto sizes = tensor->sizes;
  transposed_ = is_transposed(tensor);
  if (transposed_) std::swap(sizes[sizes.size() - 1], sizes[sizes.size() - 2]);
  require(kView, tensor->offset == 0 && nz_sizes(sizes, tensor->storage_sizes.back()) == tensor->storage_sizes,
          describe(tensor->sizes) + " of storage " + describe(tensor->storage_sizes));
  stored_ = at::from_blob(tensor->data, tensor->storage_sizes,
                          at::TensorOptions(scalar_type(tensor->dtype)).device(at::kCPU));
  rows_ = sizes[sizes.size() - 2], columns_ = sizes.back();
}

at::Tensor Matrix::read() const {
  if (!nz_) return stored_;
  const auto matrix = unpack_nz(stored_, rows_, columns_);
  return transposed_ ? matrix.transpose(-1, -2) : matrix;
}

}  // namespace ops

using namespace ops;

static const Rule kRank("aclnnNpuFormatCast", "nz.rank", "the source has 2 to 6 dimensions",
                        "aclnnNpuFormatCast.md, srcTensor");
static const Rule kDtype("aclnnNpuFormatCast", "nz.dtype",
                         "the source is int8, uint8, int32, float32, float16 or bfloat16",
                         "aclnnNpuFormatCast.md, dtypes on A2/A3");
static const Rule kFormat("aclnnNpuFormatCast", "nz.format",
                          "the cast is between ND (2) and FRACTAL_NZ (29) (the others are not emulated)",
                          "aclnnNpuFormatCast.md, dstFormat");

static void check_source(const aclTensor *source) {
  require(kRank, source->sizes.size() >= 2 && source->sizes.size() <= 6, describe(source));
  require(kDtype,
          is_one_of(scalar_type(source->dtype), {at::kChar, at::kByte, at::kInt, at::kFloat, at::kHalf, at::kBFloat16}),
          describe(source));
}

// Returns the storage's shape, in an array that the caller deletes, and its format. `dtype` (-1: the source's)
// determines a tile's width.
extern "C" EMU_API int aclnnNpuFormatCastCalculateSizeAndFormat(const aclTensor *source, int format, int dtype,
                                                                int64_t **sizes, uint64_t *dims, int *actual) {
  const auto shape = [&] {
    check_source(source);
    const int64_t c = 32 / static_cast<int64_t>(c10::elementSize(
                               scalar_type(dtype < 0 ? source->dtype : static_cast<aclDataType>(dtype))));
    require(kFormat, format == ACL_FORMAT_FRACTAL_NZ || format == ACL_FORMAT_ND, std::to_string(format));
    return format == ACL_FORMAT_FRACTAL_NZ ? nz_sizes(source->sizes, c) : source->sizes;
  };
  try {
    const auto out = shape();
    *dims = out.size();
    *sizes = new int64_t[out.size()];
    std::copy(out.begin(), out.end(), *sizes);
    *actual = format;
    return 0;
  } catch (const Refusal &refusal) {
    return emu::refuse("aclnnNpuFormatCastCalculateSizeAndFormat%s", refusal.what());
  }
}

OP(aclnnNpuFormatCast, const aclTensor *source, const aclTensor *target) {
  return plan(PHASE, [&]() -> Work {
    check_source(source);
    require(kFormat, is_nz(source) != is_nz(target), is_nz(source) ? "both in FRACTAL_NZ" : "both in ND");
    if (is_nz(source)) return [x = Matrix(source), y = view(target)] { write(y, x.read()); };
    const auto y = at::from_blob(target->data, target->storage_sizes,
                                 at::TensorOptions(scalar_type(target->dtype)).device(at::kCPU));
    return [x = view(source), y] { write(y, pack_nz(x, y.size(-1))); };
  });
}

// The compiled operator by which torch_npu 2.10 casts between ND and FRACTAL_NZ: a copy into the target's layout.
static std::function<void()> identity(const emu::OldOp &op) {
  const auto &from = op.input_descs.at(0), &to = op.output_descs.at(0);
  const auto blob = [](const aclTensorDesc &desc, void *data) {
    return at::from_blob(data, desc.storage_shape.empty() ? desc.shape : desc.storage_shape,
                         at::TensorOptions(scalar_type(desc.type)).device(at::kCPU));
  };
  const auto x = blob(from, op.inputs.at(0).data), y = blob(to, op.outputs.at(0).data);
  const bool packed = from.storage_format == ACL_FORMAT_FRACTAL_NZ, packs = to.storage_format == ACL_FORMAT_FRACTAL_NZ;
  if (from.shape.size() < 2) return [x, y] { write(y, x); };
  const int64_t rows = from.shape[from.shape.size() - 2], columns = from.shape.back();
  return [=] {
    const Plainly plainly;
    if (packed == packs)
      write(y, x);
    else
      write(y, packs ? pack_nz(x, y.size(-1)) : unpack_nz(x, rows, columns));
  };
}

static const bool kIdentity = (emu::register_aclop("Identity", identity), true);
