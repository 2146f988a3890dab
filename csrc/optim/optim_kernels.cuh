// A block updates OPTIM_CHUNK elements of one run. Many runs share a launch: their table travels in the kernel's arguments,
// with the first block of each. LAMB goes over its runs twice: moments and sums of squares, then the update.
#pragma once
#include "../common/reduce.cuh"
#include "optim.h"
#ifdef DT_SHIM
#define __grid_constant__
#endif

namespace dt {

constexpr int OPTIM_THREADS = 256;
constexpr int OPTIM_RUNS = 40;  // arguments of a kernel may take 4 KiB

struct OptimBatch {
  OptimRun runs[OPTIM_RUNS];
  int first[OPTIM_RUNS + 1];  // block of each run; the last entry: how many blocks there are
  int count;
  OptimOptions options;
  const float *grad_scale, *found_inf;
  double* sums;
};

// Sums of two values over the block, the same on every thread.
__device__ __forceinline__ void block_sums(double (&value)[2]) {
  __shared__ double parts[2][OPTIM_THREADS / WARP];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    for (int step = WARP / 2; step > 0; step /= 2) value[k] += __shfl_xor_sync(ALL_LANES, value[k], step);
    if (threadIdx.x % WARP == 0) parts[k][threadIdx.x / WARP] = value[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    value[k] = 0.0;
    for (int warp = 0; warp < OPTIM_THREADS / WARP; ++warp) value[k] += parts[k][warp];
  }
}

template <bool SPLIT> __device__ __forceinline__ float master_of(float upper, int16_t remainder) {
  return SPLIT ? bits_float(float_bits(upper) + uint32_t(int32_t(remainder))) : upper;
}

enum OptimPass { WHOLE_STEP, LAMB_MOMENTS, LAMB_UPDATE };

// N elements from i on. For LAMB's first pass, adds their squares to `sums`; for its second, `ratio` is |p| / |u|.
template <class G, bool SPLIT, int N, OptimPass PASS>
__device__ __forceinline__ void optim_pack(const OptimBatch& b, const OptimRun& run, const OptimFactors& f, int64_t i, float ratio,
                                           double (&sums)[2]) {
  using Upper = typename std::conditional<SPLIT, bf16, float>::type;
  const int64_t kind = b.options.kind;
  Pack<Upper, N> upper = load_pack<N>(static_cast<const Upper*>(run.master) + i);
  Pack<int16_t, N> remainder = {};
  if (SPLIT) remainder = load_pack<N>(run.remainder + i);
  Pack<G, N> grad = {};
  if (PASS != LAMB_UPDATE) grad = load_pack<N>(static_cast<const G*>(run.grad) + i);
  Pack<float, N> first = {}, second = {};
  if (run.first) first = load_pack<N>(run.first + i);
  if (run.second) second = load_pack<N>(run.second + i);
  Pack<float, N> next;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    float p = master_of<SPLIT>(to_float(upper.v[k]), remainder.v[k]), g = to_float(grad.v[k]) * f.unscale;
    float &m = first.v[k], &v = second.v[k];
    if (PASS == WHOLE_STEP) {
      g = g + f.decay * p;
      if (kind == ADAM || kind == ADAMW) {
        optim_moments(m, v, g, f);
        p = p * f.keep;
        p = p - f.rate * m / (sqrtf(v) + f.floor);
      } else if (kind == MOMENTUM) {
        m = f.momentum * m + g;
        p = p - f.lr * m;
      } else {
        p = p - f.lr * g;
      }
    } else {
      if (PASS == LAMB_MOMENTS) optim_moments(m, v, g, f);
      const float u = f.rate * m / (sqrtf(v) + f.floor) + f.decay * p;
      if (PASS == LAMB_MOMENTS) {
        sums[0] += double(p) * p;
        sums[1] += double(u) * u;
      } else {
        p = p - f.lr * ratio * u;
      }
    }
    next.v[k] = p;
  }
  if (PASS != LAMB_UPDATE) {
    if (run.first) store_pack<N>(run.first + i, first);
    if (run.second) store_pack<N>(run.second + i, second);
  }
  if (PASS == LAMB_MOMENTS) return;
  if (SPLIT) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const uint32_t bits = float_bits(next.v[k]), high = uint32_t(int32_t(bits + 0x8000) >> 16);
      const bf16 rounded = {uint16_t(high)};
      memcpy(&upper.v[k], &rounded, sizeof rounded);
      remainder.v[k] = int16_t(bits - (high << 16));
    }
    store_pack<N>(static_cast<Upper*>(run.master) + i, upper);
    store_pack<N>(run.remainder + i, remainder);
    return;
  }
  store_pack<N>(static_cast<float*>(run.master) + i, next);
  if (!run.copy) return;
  const auto write = [&](auto* copy) {
    Pack<typename std::remove_reference<decltype(*copy)>::type, N> pack;
#pragma unroll
    for (int k = 0; k < N; ++k) pack.v[k] = from_float<typename std::remove_reference<decltype(*copy)>::type>(next.v[k]);
    store_pack<N>(copy + i, pack);
  };
  if (b.options.copy_dtype == BF16) write(static_cast<bf16*>(run.copy));
  else write(static_cast<f16*>(run.copy));
}

template <class G, bool SPLIT, OptimPass PASS>
__global__ void __launch_bounds__(OPTIM_THREADS) optim_kernel(const __grid_constant__ OptimBatch b) {
  if (*b.found_inf > 0.f) return;
  int at = 0;
  while (at + 1 < b.count && int(blockIdx.x) >= b.first[at + 1]) ++at;
  const OptimRun& run = b.runs[at];
  __shared__ OptimFactors factors;  // powers in double: one thread makes them
  if (threadIdx.x == 0) factors = optim_factors(run, b.options, *b.grad_scale);
  double sums[2] = {};
  float ratio = 1.f;
  if (PASS == LAMB_UPDATE) {
    for (int block = b.first[at] + threadIdx.x; block < b.first[at + 1]; block += OPTIM_THREADS)
      sums[0] += b.sums[2 * block], sums[1] += b.sums[2 * block + 1];
    block_sums(sums);  // its barrier is also that of `factors`
    if (run.adapted && sums[0] > 0 && sums[1] > 0) ratio = float(sqrt(sums[0] / sums[1]));
  } else {
    __syncthreads();
  }
  const OptimFactors f = factors;
  const int64_t begin = int64_t(int(blockIdx.x) - b.first[at]) * OPTIM_CHUNK;
  const int64_t end = begin + OPTIM_CHUNK < run.numel ? begin + OPTIM_CHUNK : run.numel;
  constexpr int N = 4;
  const bool packed = packable(4, 4, run.master, run.remainder, run.grad, run.first, run.second, run.copy);
  const int64_t whole = packed ? begin + (end - begin) / N * N : begin;
  for (int64_t i = begin + threadIdx.x * N; i < whole; i += OPTIM_THREADS * N)
    optim_pack<G, SPLIT, N, PASS>(b, run, f, i, ratio, sums);
  for (int64_t i = whole + threadIdx.x; i < end; i += OPTIM_THREADS) optim_pack<G, SPLIT, 1, PASS>(b, run, f, i, ratio, sums);
  if (PASS == LAMB_MOMENTS) {
    block_sums(sums);
    if (threadIdx.x == 0) b.sums[2 * blockIdx.x] = sums[0], b.sums[2 * blockIdx.x + 1] = sums[1];
  }
}

}  // namespace dt
