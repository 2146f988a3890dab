// Rotary position embedding (Su et al., arXiv:2104.09864) of one tensor or of queries and keys at once.
//
// With a = x[r] and b = x[r + half], r < half, of a head, and the table's row of its token:
//   y[r] = a · cos[r] + b · sin[r],  y[r + half] = b · cos[r + half] + a · sin[r + half]
// The table holds the signs: its sine is negative in the first half. `inverse` swaps the two sines, which transposes the
// map (and turns by the negative angle): backward is that, whatever the table holds.
#pragma once
#include "../common/dtype.h"
#include "../common/isa.h"

namespace dt {

// batches × tokens × heads × 2·half elements of `dtype`, the last dim contiguous; y may be x.
struct RotaryTensor {
  const void* x;
  void* y;
  int64_t heads, x_batch, x_token, x_head, y_batch, y_token, y_head;  // strides in elements
};
struct Rotary {
  RotaryTensor tensors[2];
  int64_t count;           // of tensors: 1 or 2
  const float *cos, *sin;  // tokens × 2·half, for each batch, `table_batch` (0: for all) elements apart
  int64_t batches, tokens, half, table_batch, inverse, dtype;
};

// CPU kernel, over [begin, end) of batches · tokens.
DT_CPU_KERNEL(rotary, const Rotary&, int64_t, int64_t)

}  // namespace dt

// CUDA launcher. `strides`, in host memory, has x_batch, x_token, x_head, y_batch, y_token, y_head for the first tensor, then
// for the second, which is there where x1 is not null.
extern "C" {
int dt_rotary(const void* x0, void* y0, int64_t heads0, const void* x1, void* y1, int64_t heads1, const int64_t* strides,
              const float* cos, const float* sin, int64_t batches, int64_t tokens, int64_t half, int64_t table_batch,
              int64_t inverse, int64_t dtype, void* stream);
}
