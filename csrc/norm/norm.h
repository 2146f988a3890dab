// RMSNorm (Zhang and Sennrich, arXiv:1910.07467) and LayerNorm (Ba, Kiros and Hinton, arXiv:1607.06450) over rows.
//
//   h = x, or x + residual rounded to the dtype of x (that sum is an output as well)
//   RMSNorm:   rstd = 1 / sqrt(mean(h²) + eps),          y = h · rstd · weight
//   LayerNorm: rstd = 1 / sqrt(mean((h - mean)²) + eps), y = (h - mean) · rstd · weight + bias
//
// Backward, with n = (h - mean) · rstd and g = dy · weight, means over the row:
//   dx = rstd · (g - n · mean(g · n) - mean(g)) + dsum; RMSNorm has no mean(g); dsum is what comes back through the sum
//   dweight = sum over rows of dy · n,  dbias = sum over rows of dy
#pragma once
#include "../common/dtype.h"
#include "../common/isa.h"

namespace dt {

// x, residual, y, sum, dy, dsum and dx are rows × columns of `dtype`, contiguous; weight, bias, dweight and dbias have
// `columns` elements of `weight_dtype` (dtype or float); mean and rstd `rows` floats. RMSNorm is where mean is null.
struct NormForward {
  const void *x, *residual, *weight, *bias;  // residual and bias may be null
  void *y, *sum;                             // sum is null where residual is
  float *mean, *rstd;
  int64_t rows;
  int columns;
  float eps;
  int64_t dtype, weight_dtype;
};
struct NormBackward {
  const void *dy, *dsum, *x, *weight;  // x is what was normalised, h above; dsum may be null
  const float *mean, *rstd;
  void *dx;
  float *dweight_parts, *dbias_parts;  // parts × columns; null where the gradient is not wanted
  int64_t rows;
  int columns;
  int64_t dtype, weight_dtype;
};

template <class V, class S> DT_HD V normal(V h, S mean, S rstd) { return (h - mean) * rstd; }
template <class V, class S> DT_HD V norm_dx(V g, V n, S rstd, S mean_gn, S mean_g) { return (g - n * mean_gn - mean_g) * rstd; }

// CPU kernels: rows [begin, end) of the forward pass; parts [begin, end) of the backward pass, of which part i of `parts`
// holds the rows from rows·i/parts to rows·(i+1)/parts; columns [begin, end) of the sum over parts.
DT_CPU_KERNEL(norm_forward, const NormForward&, int64_t, int64_t)
DT_CPU_KERNEL(norm_backward, const NormBackward&, int64_t, int64_t, int64_t)
DT_CPU_KERNEL(norm_sum_parts, const float*, void*, int64_t, int64_t, int64_t, int64_t, int64_t)

}  // namespace dt

// CUDA launchers. Sizes as above; `blocks` is what dt_norm_blocks says, and the number of parts (at
// least one: without rows the gradients of the weights are zeros).
extern "C" {
int dt_norm_forward(const void* x, const void* residual, const void* weight, const void* bias, void* y, void* sum, float* mean,
                    float* rstd, int64_t rows, int64_t columns, double eps, int64_t dtype, int64_t weight_dtype, void* stream);
int64_t dt_norm_blocks(int64_t rows, int64_t columns, int64_t dtype);
int dt_norm_backward(const void* dy, const void* dsum, const void* x, const void* weight, const float* mean, const float* rstd,
                     void* dx, float* dweight_parts, float* dbias_parts, void* dweight, void* dbias, int64_t blocks, int64_t rows,
                     int64_t columns, int64_t dtype, int64_t weight_dtype, void* stream);
}
