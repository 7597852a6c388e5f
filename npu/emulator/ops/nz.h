// FRACTAL_NZ: storage of a matrix (k, n) as tiles of 16 rows by c columns; a row of a tile has 32 bytes. Its shape is
// (ceil(n / c), ceil(k / 16), 16, c), padded with zeros (aclnnNpuFormatCast.md, data format FRACTAL_NZ).
#pragma once

#include "op.h"

namespace ops {

// Sizes of the storage of a matrix, or of several by leading dimensions, with c elements to a tile's row.
std::vector<int64_t> nz_sizes(at::IntArrayRef sizes, int64_t c);
at::Tensor pack_nz(const at::Tensor &matrix, int64_t c);
// The matrix of the given size in a storage of tiles.
at::Tensor unpack_nz(const at::Tensor &stored, int64_t rows, int64_t columns);

// Factor of a product, in ND or in FRACTAL_NZ, including a transposed view. It is checked on construction and read when
// the task runs.
class Matrix {
 public:
  explicit Matrix(const aclTensor *tensor);
  at::Tensor read() const;

 private:
  at::Tensor stored_;
  bool nz_, transposed_ = false;
  int64_t rows_ = 0, columns_ = 0;
};

}  // namespace ops
