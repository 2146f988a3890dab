// Activations, alone or as the gate of a product: SwiGLU and GEGLU (Shazeer, arXiv:2002.05202).
//
//   y = x · sigmoid(z), times `up` where there is one
//   SiLU: z = x
//   GELU: z = 2 · sqrt(2/π) · (x + 0.044715 · x³), its approximation by tanh (Hendrycks and Gimpel, arXiv:1606.08415),
//         for (1 + tanh(u)) / 2 = sigmoid(2u)
//
// Backward, with s = sigmoid(z), both of x and up redone from the inputs:
//   dx = dy · up · (s + s · x · (1 - s) · dz/dx),  dup = dy · x · s
#pragma once
#include "../common/dtype.h"
#include "../common/isa.h"

namespace dt {

enum Activation : int64_t { SILU = 0, GELU = 1 };

// All are rows × columns of `dtype`; x and up (null: no product) may have rows apart, the others are contiguous.
struct ActivationForward {
  const void *x, *up;
  void* y;
  int64_t rows, columns, x_stride, up_stride, dtype, activation;
};
struct ActivationBackward {
  const void *dy, *x, *up;
  void *dx, *dup;  // dup is null where up is
  int64_t rows, columns, x_stride, up_stride, dtype, activation;
};

constexpr float GELU_LINEAR = 1.595769121605731f, GELU_CUBIC = 0.07135481282766f;
template <int A, class V> DT_HD V sigmoid_argument(V x) {
  if constexpr (A == SILU) return x;
  else return x * (x * x * GELU_CUBIC + GELU_LINEAR);
}
// 1 - s, where s = 1 / (1 + e), without the cancellation near s = 1; e may have become infinite.
template <class V> DT_HD V complement(V e, V s) { return e < 1e30f ? e * s : 1.f - s; }
// dx / (dy · up)
template <int A, class V> DT_HD V activation_slope(V x, V e, V s) {
  const V bend = s * x * complement(e, s);  // with s first: far to the left it is 0 before x² grows
  if constexpr (A == SILU) return s + bend;
  else return s + bend * (x * x * (3.f * GELU_CUBIC) + GELU_LINEAR);
}

// CPU kernels, over elements [begin, end) counted along the rows.
DT_CPU_KERNEL(activation_forward, const ActivationForward&, int64_t, int64_t)
DT_CPU_KERNEL(activation_backward, const ActivationBackward&, int64_t, int64_t)

}  // namespace dt

// CUDA launchers; strides in elements.
extern "C" {
int dt_activation_forward(const void* x, const void* up, void* y, int64_t rows, int64_t columns, int64_t x_stride,
                          int64_t up_stride, int64_t dtype, int64_t activation, void* stream);
int dt_activation_backward(const void* dy, const void* x, const void* up, void* dx, void* dup, int64_t rows, int64_t columns,
                           int64_t x_stride, int64_t up_stride, int64_t dtype, int64_t activation, void* stream);
}
