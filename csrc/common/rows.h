// A tensor as a matrix whose rows may lie apart: halves of one projection and sliced logits need no copy. Host code only.
#pragma once
#include "tensor.h"

namespace dt {

struct Rows {
  Tensor tensor;                  // keeps the memory alive
  int64_t rows, columns, stride;  // row r begins r · stride elements after the first
};

inline Rows as_rows(const Tensor& tensor) {
  const int64_t dims = tensor.dim(), columns = dims ? tensor.size(dims - 1) : 1, rows = columns ? tensor.numel() / columns : 0;
  if (rows == 0 || tensor.is_contiguous()) return {tensor, rows, columns, columns};
  bool apart = columns == 1 || tensor.stride(dims - 1) == 1;
  int64_t stride = 0, next = 0;  // of the rows; what the stride of the next outer dim must be
  for (int64_t i = dims - 2; i >= 0 && apart; --i) {
    if (tensor.size(i) == 1) continue;
    if (stride == 0) next = stride = tensor.stride(i);
    apart = stride > 0 && tensor.stride(i) == next;
    next *= tensor.size(i);
  }
  if (apart) return {tensor, rows, columns, rows > 1 ? stride : columns};
  return {dense(tensor), rows, columns, columns};
}

}  // namespace dt
