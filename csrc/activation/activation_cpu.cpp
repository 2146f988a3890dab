#include "activation.h"

#include "../common/simd_exp.h"

namespace dt::DT_ISA {
namespace {

template <class T, int A, bool GATED> void forward(const ActivationForward& a, int64_t begin, int64_t end) {
  for (int64_t n; begin < end; begin += n) {  // the piece of one row
    const int64_t row = begin / a.columns, column = begin % a.columns;
    n = end - begin < a.columns - column ? end - begin : a.columns - column;
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride + column;
    const T* up = GATED ? static_cast<const T*>(a.up) + row * a.up_stride + column : nullptr;
    T* y = static_cast<T*>(a.y) + begin;
    each_vector(n, [&](int64_t i, auto part, int) DT_LAMBDA {
      const vf xi = load(x + i, part);
      vf value = xi / (exp(-sigmoid_argument<A>(xi)) + 1.f);
      if constexpr (GATED) value *= load(up + i, part);
      store(y + i, value, part);
    });
  }
}

template <class T, int A, bool GATED> void backward(const ActivationBackward& a, int64_t begin, int64_t end) {
  for (int64_t n; begin < end; begin += n) {
    const int64_t row = begin / a.columns, column = begin % a.columns;
    n = end - begin < a.columns - column ? end - begin : a.columns - column;
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride + column;
    const T* up = GATED ? static_cast<const T*>(a.up) + row * a.up_stride + column : nullptr;
    const T* dy = static_cast<const T*>(a.dy) + begin;
    T *dx = static_cast<T*>(a.dx) + begin, *dup = GATED ? static_cast<T*>(a.dup) + begin : nullptr;
    each_vector(n, [&](int64_t i, auto part, int) DT_LAMBDA {
      const vf xi = load(x + i, part), e = exp(-sigmoid_argument<A>(xi)), s = 1.f / (1.f + e);
      vf d = load(dy + i, part);
      if constexpr (GATED) {
        store(dup + i, d * xi * s, part);
        d *= load(up + i, part);
      }
      store(dx + i, d * activation_slope<A>(xi, e, s), part);
    });
  }
}

}  // namespace

void activation_forward(const ActivationForward& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    if (a.activation == SILU) a.up ? forward<T, SILU, true>(a, begin, end) : forward<T, SILU, false>(a, begin, end);
    else a.up ? forward<T, GELU, true>(a, begin, end) : forward<T, GELU, false>(a, begin, end);
  });
}

void activation_backward(const ActivationBackward& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    if (a.activation == SILU) a.up ? backward<T, SILU, true>(a, begin, end) : backward<T, SILU, false>(a, begin, end);
    else a.up ? backward<T, GELU, true>(a, begin, end) : backward<T, GELU, false>(a, begin, end);
  });
}

}  // namespace dt::DT_ISA
