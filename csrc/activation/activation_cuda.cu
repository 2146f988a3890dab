#include "activation_kernels.cuh"

#include <type_traits>

namespace dt {
namespace {

// Calls f(T(), pack, activation, gated) with all four as types.
template <int V> using Int = std::integral_constant<int, V>;
template <class F> int with_kernel(int64_t dtype, bool packed, int64_t activation, bool gated, F f) {
  return with_dtype(dtype, [&](auto t) {
    const auto with_pack = [&](auto n) {
      if (activation == SILU) return gated ? f(t, n, Int<SILU>(), Int<1>()) : f(t, n, Int<SILU>(), Int<0>());
      return gated ? f(t, n, Int<GELU>(), Int<1>()) : f(t, n, Int<GELU>(), Int<0>());
    };
    return packed ? with_pack(Int<PACK<decltype(t)>>()) : with_pack(Int<1>());
  });
}
// May each row be read in packs? A single row may end anywhere.
template <class A, class... P> bool in_packs(const A& a, int64_t size, P... pointers) {
  const auto steps = [&](int64_t stride) { return a.rows == 1 || packable(stride, size, pointers...); };
  return packable(0, size, pointers...) && steps(a.columns) && steps(a.x_stride) && (!a.up || steps(a.up_stride));
}
int64_t tiles_of(int64_t columns, int pack) {
  const int64_t tile = int64_t(ACTIVATION_TILE<1>) * pack;
  return (columns + tile - 1) / tile;
}
int64_t size_of(int64_t dtype) { return dtype == F32 ? 4 : 2; }

}  // namespace
}  // namespace dt

using namespace dt;

int dt_activation_forward(const void* x, const void* up, void* y, int64_t rows, int64_t columns, int64_t x_stride,
                          int64_t up_stride, int64_t dtype, int64_t activation, void* stream) {
  if (rows == 0 || columns == 0) return 0;
  const ActivationForward a{x, up, y, rows, columns, x_stride, up_stride, dtype, activation};
  const bool packed = in_packs(a, size_of(dtype), x, up, y);
  return with_kernel(dtype, packed, activation, up != nullptr, [&](auto t, auto n, auto act, auto gated) {
    const int64_t tiles = tiles_of(columns, n());
    return DT_LAUNCH((activation_forward_kernel<decltype(t), n(), act(), gated()>), dim3(unsigned(rows * tiles)),
                     dim3(ACTIVATION_THREADS), 0, stream, a, tiles);
  });
}

int dt_activation_backward(const void* dy, const void* x, const void* up, void* dx, void* dup, int64_t rows, int64_t columns,
                           int64_t x_stride, int64_t up_stride, int64_t dtype, int64_t activation, void* stream) {
  if (rows == 0 || columns == 0) return 0;
  const ActivationBackward a{dy, x, up, dx, dup, rows, columns, x_stride, up_stride, dtype, activation};
  const bool packed = in_packs(a, size_of(dtype), dy, x, up, dx, dup);
  return with_kernel(dtype, packed, activation, up != nullptr, [&](auto t, auto n, auto act, auto gated) {
    const int64_t tiles = tiles_of(columns, n());
    return DT_LAUNCH((activation_backward_kernel<decltype(t), n(), act(), gated()>), dim3(unsigned(rows * tiles)),
                     dim3(ACTIVATION_THREADS), 0, stream, a, tiles);
  });
}
