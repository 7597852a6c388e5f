// FRACTAL_NZ: a matrix (k, n) stored as tiles of 16 rows by c columns of 32 bytes, column of tiles by column of tiles:
// (ceil(n / c), ceil(k / 16), 16, c), padded with zeros (aclnnNpuFormatCast.md, data format FRACTAL_NZ).
#pragma once

#include "op.h"

namespace ops {

// The sizes in which a matrix (or several, by leading dimensions) is stored, of `c` elements to a tile's row.
std::vector<int64_t> nz_sizes(at::IntArrayRef sizes, int64_t c);
at::Tensor pack_nz(const at::Tensor &matrix, int64_t c);

// A factor of a product, in ND or in FRACTAL_NZ, a transposed view included: checked when it is made, read when it is
// its turn.
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
