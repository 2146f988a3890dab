// A block adds up the squares of one chunk; one more block adds up the chunks.
#pragma once
#include "../common/reduce.cuh"
#include "reduce.h"

namespace dt {

constexpr int REDUCE_THREADS = 256;

// The sum of `value` over the block, on thread 0.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double parts[REDUCE_THREADS / WARP];
  for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
  if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = value;
  __syncthreads();
  double total = 0.0;
  for (int warp = 0; warp < REDUCE_THREADS / WARP; ++warp) total += parts[warp];
  return total;
}

template <class T, int N> __global__ void __launch_bounds__(REDUCE_THREADS) squares_kernel(const T* x, double* parts, int64_t n) {
  const int64_t begin = int64_t(blockIdx.x) * REDUCE_CHUNK, end = begin + REDUCE_CHUNK < n ? begin + REDUCE_CHUNK : n;
  double sums[N] = {};
  int64_t i = begin + int64_t(threadIdx.x) * N;
  for (; i + N <= end; i += REDUCE_THREADS * N) {
    const Pack<T, N> pack = load_pack<N>(x + i);
#pragma unroll
    for (int k = 0; k < N; ++k) sums[k] += double(to_float(pack.v[k])) * to_float(pack.v[k]);
  }
  for (; i < end; ++i) sums[0] += double(to_float(x[i])) * to_float(x[i]);  // the last pack, if it is not whole
  double total = 0.0;
  for (int k = 0; k < N; ++k) total += sums[k];
  total = block_sum(total);
  if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

inline __global__ void __launch_bounds__(REDUCE_THREADS) sum_parts_kernel(const double* parts, double* out, int64_t count) {
  double total = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += REDUCE_THREADS) total += parts[i];
  total = block_sum(total);
  if (threadIdx.x == 0) *out = total;
}

// N elements a thread; the last thread takes what is left one by one.
template <class S, class A, int N>
__global__ void __launch_bounds__(REDUCE_THREADS) add_into_kernel(S* sum, const A* addend, int64_t n) {
  const int64_t i = (int64_t(blockIdx.x) * REDUCE_THREADS + threadIdx.x) * N;
  if (i + N <= n) {
    Pack<S, N> to = load_pack<N>(sum + i);
    const Pack<A, N> from = load_pack<N>(addend + i);
#pragma unroll
    for (int k = 0; k < N; ++k) to.v[k] = from_float<S>(to_float(to.v[k]) + to_float(from.v[k]));
    store_pack<N>(sum + i, to);
  } else {
    for (int64_t k = i; k < n; ++k) sum[k] = from_float<S>(to_float(sum[k]) + to_float(addend[k]));
  }
}

}  // namespace dt
