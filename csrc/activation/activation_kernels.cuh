// A block computes one tile of one row. ACTIVATION_PACKS packs of N elements per thread are in flight: all are loaded before
// the first is used.
#pragma once
#include "../common/cuda.cuh"
#include "activation.h"

namespace dt {

constexpr int ACTIVATION_THREADS = 256;
constexpr int ACTIVATION_PACKS = 2;  // per thread
template <int N> constexpr int ACTIVATION_TILE = ACTIVATION_THREADS * ACTIVATION_PACKS * N;

// Where the result is rounded to 16 bits anyhow, the fast instructions do.
template <class T> __device__ __forceinline__ float fast_exp(float v) {
  if constexpr (sizeof(T) == 4) return expf(v);
  else return __expf(v);
}
template <class T> __device__ __forceinline__ float fast_divide(float a, float b) {
  if constexpr (sizeof(T) == 4) return a / b;
  else return __fdividef(a, b);
}

// f(first column, elements in a pack and number of packs as a type) for this thread's part of the tile. The packs lie
// ACTIVATION_THREADS packs apart. At the end of a row: packs one by one, then single elements.
template <int N, int PACKS> struct Step {
  static constexpr int pack = N, packs = PACKS;
};
template <int N, class F> __device__ __forceinline__ void each_pack_of_tile(int64_t columns, int64_t tile, F f) {
  const int64_t start = tile * ACTIVATION_TILE<N>;
  if (start + ACTIVATION_TILE<N> <= columns) {
    f(start + threadIdx.x * N, Step<N, ACTIVATION_PACKS>());
    return;
  }
  for (int64_t i = start + threadIdx.x * N; i + N <= columns; i += ACTIVATION_THREADS * N) f(i, Step<N, 1>());
  const int64_t last = columns / N * N + threadIdx.x;
  if (last < columns) f(last, Step<1, 1>());
}

template <class T, int N, int A, bool GATED>
__global__ void __launch_bounds__(ACTIVATION_THREADS) activation_forward_kernel(ActivationForward a, int64_t tiles) {
  const int64_t row = blockIdx.x / tiles;
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  const T* up = GATED ? static_cast<const T*>(a.up) + row * a.up_stride : nullptr;
  T* y = static_cast<T*>(a.y) + row * a.columns;
  each_pack_of_tile<N>(a.columns, blockIdx.x % tiles, [&](int64_t first, auto step) {
    constexpr int M = decltype(step)::pack, PACKS = decltype(step)::packs;
    Pack<T, M> xs[PACKS], ups[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      xs[p] = load_pack<M>(x + first + p * ACTIVATION_THREADS * M);
      if (GATED) ups[p] = load_pack<M>(up + first + p * ACTIVATION_THREADS * M);
    }
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
#pragma unroll
      for (int k = 0; k < M; ++k) {
        const float v = to_float(xs[p].v[k]);
        float value = fast_divide<T>(v, 1.f + fast_exp<T>(-sigmoid_argument<A>(v)));
        if (GATED) value *= to_float(ups[p].v[k]);
        xs[p].v[k] = from_float<T>(value);
      }
      store_pack<M>(y + first + p * ACTIVATION_THREADS * M, xs[p]);
    }
  });
}

template <class T, int N, int A, bool GATED>
__global__ void __launch_bounds__(ACTIVATION_THREADS) activation_backward_kernel(ActivationBackward a, int64_t tiles) {
  const int64_t row = blockIdx.x / tiles;
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  const T* up = GATED ? static_cast<const T*>(a.up) + row * a.up_stride : nullptr;
  const T* dy = static_cast<const T*>(a.dy) + row * a.columns;
  T *dx = static_cast<T*>(a.dx) + row * a.columns, *dup = GATED ? static_cast<T*>(a.dup) + row * a.columns : nullptr;
  each_pack_of_tile<N>(a.columns, blockIdx.x % tiles, [&](int64_t first, auto step) {
    constexpr int M = decltype(step)::pack, PACKS = decltype(step)::packs;
    Pack<T, M> xs[PACKS], ups[PACKS], dys[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      xs[p] = load_pack<M>(x + first + p * ACTIVATION_THREADS * M);
      dys[p] = load_pack<M>(dy + first + p * ACTIVATION_THREADS * M);
      if (GATED) ups[p] = load_pack<M>(up + first + p * ACTIVATION_THREADS * M);
    }
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
#pragma unroll
      for (int k = 0; k < M; ++k) {
        const float v = to_float(xs[p].v[k]), e = fast_exp<T>(-sigmoid_argument<A>(v)), s = fast_divide<T>(1.f, 1.f + e);
        float d = to_float(dys[p].v[k]);
        if (GATED) {
          dys[p].v[k] = from_float<T>(d * v * s);
          d *= to_float(ups[p].v[k]);
        }
        xs[p].v[k] = from_float<T>(d * activation_slope<A>(v, e, s));
      }
      store_pack<M>(dx + first + p * ACTIVATION_THREADS * M, xs[p]);
      if (GATED) store_pack<M>(dup + first + p * ACTIVATION_THREADS * M, dys[p]);
    }
  });
}

}  // namespace dt
