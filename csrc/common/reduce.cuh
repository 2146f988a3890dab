// Reductions over the lanes of a warp and the threads of a block, in an order that does not depend on timing.
#pragma once
#include "cuda.cuh"

namespace dt {

struct Sum {
  static constexpr float NEUTRAL = 0.f;
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Max {  // of two values of which one is NaN, the other
  static constexpr float NEUTRAL = -__builtin_huge_valf();
  static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

template <class Op> __device__ __forceinline__ float warp_reduce(float value) {  // every lane gets the result
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) value = Op::of(value, __shfl_xor_sync(ALL_LANES, value, step));
  return value;
}

// Reduces K values over threadIdx.x (blockDim.x is a multiple of 32, at most 1024); every thread gets the results.
// Blocks of several rows (blockDim.y > 1) have one warp in a row and need no barrier.
// Calls in one kernel must alternate `turn` between even and odd. That is why one barrier is enough: who writes a half of
// the shared memory again has passed the barrier of the call between, which all threads reach after reading that half.
template <class Op, int K> __device__ __forceinline__ void block_reduce(float (&value)[K], int turn) {
  __shared__ float parts[2][K][WARP];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
#pragma unroll
  for (int k = 0; k < K; ++k) value[k] = warp_reduce<Op>(value[k]);
  if (warps == 1) return;
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) parts[turn & 1][k][warp] = value[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) value[k] = warp_reduce<Op>(lane < warps ? parts[turn & 1][k][lane] : Op::NEUTRAL);
}
template <class Op> __device__ __forceinline__ float block_reduce(float value, int turn) {
  float values[1] = {value};
  block_reduce<Op>(values, turn);
  return values[0];
}

}  // namespace dt
