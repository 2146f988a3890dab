// A thread takes the four elements of one counter of the stream.
#pragma once
#include "../common/cuda.cuh"
#include "dropout.h"

namespace dt {

constexpr int DROPOUT_THREADS = 256;

template <class T> __global__ void __launch_bounds__(DROPOUT_THREADS) dropout_add_kernel(Dropout a, bool packed) {
  const uint64_t seed = uint64_t(a.stream[0]), offset = uint64_t(a.stream[1]);
  const uint64_t counter = offset / 4 + uint64_t(blockIdx.x) * DROPOUT_THREADS + threadIdx.x;
  const int64_t first = int64_t(counter * 4 - offset);  // below 0 where the tensor begins within a counter
  if (first >= a.numel) return;
  uint32_t word[4];
  philox(counter, seed, word);
  const T *x = static_cast<const T*>(a.x), *residual = static_cast<const T*>(a.residual);
  T* y = static_cast<T*>(a.y);
  const auto result = [&](int k, float xk, float rk) {
    const float kept = int64_t(word[k]) < a.threshold ? 0.f : exact_product(xk, a.scale);
    return from_float<T>(a.residual ? kept + rk : kept);
  };
  if (packed && offset % 4 == 0 && first + 4 <= a.numel) {
    const Pack<T, 4> px = load_pack<4>(x + first);
    Pack<T, 4> pr = {}, py;
    if (residual) pr = load_pack<4>(residual + first);
#pragma unroll
    for (int k = 0; k < 4; ++k) py.v[k] = result(k, to_float(px.v[k]), to_float(pr.v[k]));
    store_pack<4>(y + first, py);
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (first + k >= 0 && first + k < a.numel)
      y[first + k] = result(k, to_float(x[first + k]), residual ? to_float(residual[first + k]) : 0.f);
}

}  // namespace dt
