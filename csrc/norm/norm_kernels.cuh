// A row belongs to blockDim.x threads: one warp (then blockDim.y rows share a block) or a whole block (blockDim.y = 1).
// HELD packs of N elements per thread keep the row in registers between the passes over it, so it is read once. HELD = 0
// reads it again: for rows too long, or whose elements do not lie in whole packs (then N = 1).
#pragma once
#include "../common/reduce.cuh"
#include "norm.h"

namespace dt {

constexpr int NORM_THREADS = 512;
constexpr int NORM_SUM_ROWS = 16;  // parts that norm_sum_parts_kernel adds side by side

// f(slot, i) for each pack of this thread in a row.
template <int N, int HELD, class F> __device__ __forceinline__ void each_pack(int columns, F f) {
  if constexpr (HELD > 0) {
#pragma unroll
    for (int slot = 0; slot < HELD; ++slot) {
      const int i = (slot * blockDim.x + threadIdx.x) * N;
      if (i < columns) f(slot, i);
    }
  } else {
    for (int i = threadIdx.x * N; i < columns; i += blockDim.x * N) f(0, i);
  }
}

template <class T, int N, int HELD, bool MEAN> __global__ void __launch_bounds__(NORM_THREADS) norm_forward_kernel(NormForward a) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, start = row * a.columns;
  if (row >= a.rows) return;  // a whole warp, and only of blocks without a barrier
  const T* x = static_cast<const T*>(a.x) + start;
  Pack<T, N> held[HELD > 0 ? HELD : 1];
  each_pack<N, HELD>(a.columns, [&](int slot, int i) {  // all loads before the first use
    if (HELD > 0) held[slot] = load_pack<N>(x + i);
  });
  const auto again = [&](int slot, int i) { return HELD > 0 ? held[slot] : load_pack<N>(x + i); };

  float total[1] = {0.f};
  each_pack<N, HELD>(a.columns, [&](int slot, int i) {
    Pack<T, N> h = again(slot, i);
    if (a.residual) {
      const auto residual = load_pack<N>(static_cast<const T*>(a.residual) + start + i);
#pragma unroll
      for (int k = 0; k < N; ++k) h.v[k] = from_float<T>(to_float(h.v[k]) + to_float(residual.v[k]));
      store_pack<N>(static_cast<T*>(a.sum) + start + i, h);
      if (HELD > 0) held[slot] = h;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) total[0] += MEAN ? to_float(h.v[k]) : to_float(h.v[k]) * to_float(h.v[k]);
  });
  if (a.residual) x = static_cast<const T*>(a.sum) + start;  // where HELD = 0 this thread reads what it has just written
  block_reduce<Sum>(total, 0);

  float mean = 0.f;
  if constexpr (MEAN) {  // the variance is that of centred values: it loses no digits when the mean is large
    mean = total[0] / a.columns;
    total[0] = 0.f;
    each_pack<N, HELD>(a.columns, [&](int slot, int i) {
      const Pack<T, N> h = again(slot, i);
#pragma unroll
      for (int k = 0; k < N; ++k) total[0] += (to_float(h.v[k]) - mean) * (to_float(h.v[k]) - mean);
    });
    block_reduce<Sum>(total, 1);
    if (threadIdx.x == 0) a.mean[row] = mean;
  }
  const float rstd = rsqrtf(total[0] / a.columns + a.eps);
  if (threadIdx.x == 0) a.rstd[row] = rstd;

  const bool float_weight = a.weight_dtype == F32;
  each_pack<N, HELD>(a.columns, [&](int slot, int i) {
    const Pack<T, N> h = again(slot, i);
    float weight[N], bias[N] = {};
    load_floats<N, T>(a.weight, float_weight, i, weight);
    if (a.bias) load_floats<N, T>(a.bias, float_weight, i, bias);
    Pack<T, N> y;
#pragma unroll
    for (int k = 0; k < N; ++k) y.v[k] = from_float<T>(normal(to_float(h.v[k]), mean, rstd) * weight[k] + bias[k]);
    store_pack<N>(static_cast<T*>(a.y) + start + i, y);
  });
}

// Rows go to the blocks in turn. Where HELD > 0 a thread keeps the sums of its columns in registers until the end, and, where
// registers allow, loads the next row before it reduces this one: the barrier then hides behind that load.
template <class T, int N, int HELD, bool MEAN>
__global__ void __launch_bounds__(NORM_THREADS, HELD == 1 ? 2 : 1) norm_backward_kernel(NormBackward a) {
  constexpr int SLOTS = HELD > 0 ? HELD : 1;
  constexpr bool CROWDED = MEAN && N == 8;  // two sums for each of eight columns in a pack
  constexpr bool AHEAD = HELD == 2 || (HELD == 1 && !CROWDED);
  constexpr bool HOLDS_DY = HELD > 0 && !(HELD == 4 && CROWDED);
  const int64_t first = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, stride = int64_t(gridDim.x) * blockDim.y;
  const T *x = static_cast<const T*>(a.x), *dy = static_cast<const T*>(a.dy);
  const bool float_weight = a.weight_dtype == F32;
  float* parts[2] = {a.dweight_parts, a.dbias_parts};
  if (HELD == 0) {
    for (float* part : parts)
      each_pack<N, HELD>(part ? a.columns : 0, [&](int, int i) {
        for (int k = 0; k < N; ++k) part[int64_t(blockIdx.x) * a.columns + i + k] = 0.f;
      });
  }

  float dweight[SLOTS * N] = {}, dbias[SLOTS * N] = {};
  Pack<T, N> xs[SLOTS], dys[SLOTS];
  const auto fetch = [&](int64_t row, Pack<T, N>(&to_x)[SLOTS], Pack<T, N>(&to_dy)[SLOTS]) {
    each_pack<N, HELD>(a.columns, [&](int slot, int i) {
      to_x[slot] = load_pack<N>(x + row * a.columns + i);
      if (HOLDS_DY) to_dy[slot] = load_pack<N>(dy + row * a.columns + i);
    });
  };
  if (AHEAD && first < a.rows) fetch(first, xs, dys);
  int turn = 0;
  for (int64_t row = first; row < a.rows; row += stride, ++turn) {
    const int64_t start = row * a.columns;
    const float mean = MEAN ? a.mean[row] : 0.f, rstd = a.rstd[row];
    Pack<T, N> next_x[AHEAD ? SLOTS : 1], next_dy[AHEAD ? SLOTS : 1];
    if constexpr (AHEAD) {
      if (row + stride < a.rows) fetch(row + stride, next_x, next_dy);
    } else if (HELD > 0) {
      fetch(row, xs, dys);
    }
    const auto x_at = [&](int slot, int i) { return HELD > 0 ? xs[slot] : load_pack<N>(x + start + i); };
    const auto dy_at = [&](int slot, int i) { return HOLDS_DY ? dys[slot] : load_pack<N>(dy + start + i); };

    float totals[MEAN ? 2 : 1] = {};  // of g · n and of g
    each_pack<N, HELD>(a.columns, [&](int slot, int i) {
      const Pack<T, N> px = x_at(slot, i), pdy = dy_at(slot, i);
      float weight[N];
      load_floats<N, T>(a.weight, float_weight, i, weight);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float g = to_float(pdy.v[k]) * weight[k];
        totals[0] += g * normal(to_float(px.v[k]), mean, rstd);
        if (MEAN) totals[MEAN ? 1 : 0] += g;
      }
    });
    block_reduce<Sum>(totals, turn);
    const float mean_gn = totals[0] / a.columns, mean_g = MEAN ? totals[MEAN ? 1 : 0] / a.columns : 0.f;

    each_pack<N, HELD>(a.columns, [&](int slot, int i) {
      const Pack<T, N> px = x_at(slot, i), pdy = dy_at(slot, i);
      Pack<T, N> dsum, dx;
      if (a.dsum) dsum = load_pack<N>(static_cast<const T*>(a.dsum) + start + i);
      float weight[N];
      load_floats<N, T>(a.weight, float_weight, i, weight);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float dyk = to_float(pdy.v[k]), n = normal(to_float(px.v[k]), mean, rstd);
        const float d = norm_dx(dyk * weight[k], n, rstd, mean_gn, mean_g);
        dx.v[k] = from_float<T>(a.dsum ? d + to_float(dsum.v[k]) : d);
        if (HELD > 0) {
          dweight[slot * N + k] += dyk * n;
          if (MEAN) dbias[slot * N + k] += dyk;
        } else {  // a column belongs to the same thread in every row
          const int64_t column = int64_t(blockIdx.x) * a.columns + i + k;
          if (a.dweight_parts) a.dweight_parts[column] += dyk * n;
          if (a.dbias_parts) a.dbias_parts[column] += dyk;
        }
      }
      store_pack<N>(static_cast<T*>(a.dx) + start + i, dx);
    });
    if constexpr (AHEAD) {
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) xs[slot] = next_x[slot], dys[slot] = next_dy[slot];
    }
  }

  if constexpr (HELD > 0) {  // add the rows of the block that went side by side; write this block's part
    DT_DYNAMIC_SHARED(shared);  // blockDim.y × columns
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      if (!parts[which]) continue;
      float(&mine)[SLOTS * N] = which ? dbias : dweight;
      float* part = parts[which] + int64_t(blockIdx.x) * a.columns;
      if (blockDim.y == 1) {
        each_pack<N, HELD>(a.columns, [&](int slot, int i) {
#pragma unroll
          for (int k = 0; k < N; ++k) part[i + k] = mine[slot * N + k];
        });
        continue;
      }
      if (which && parts[0]) __syncthreads();  // the first sums have been read
      each_pack<N, HELD>(a.columns, [&](int slot, int i) {
#pragma unroll
        for (int k = 0; k < N; ++k) shared[threadIdx.y * a.columns + i + k] = mine[slot * N + k];
      });
      __syncthreads();
      for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < a.columns; i += blockDim.x * blockDim.y) {
        float total = 0.f;
        for (int y = 0; y < int(blockDim.y); ++y) total += shared[y * a.columns + i];
        part[i] = total;
      }
    }
  }
}

// out[column] = sum over parts; 32 columns and NORM_SUM_ROWS parts at a time in a block. blockIdx.y: 0 dweight, 1 dbias.
struct NormSumParts {
  const float* parts[2];
  void* out[2];
  int64_t count;
  int columns;
  int64_t dtype;
};
inline __global__ void __launch_bounds__(WARP * NORM_SUM_ROWS) norm_sum_parts_kernel(NormSumParts a) {
  __shared__ float sums[NORM_SUM_ROWS][WARP];
  const int column = blockIdx.x * WARP + threadIdx.x;
  const float* parts = blockIdx.y ? a.parts[1] : a.parts[0];
  float total = 0.f;
  if (column < a.columns)
    for (int64_t p = threadIdx.y; p < a.count; p += NORM_SUM_ROWS) total += parts[p * a.columns + column];
  sums[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y > 0 || column >= a.columns) return;
  for (int y = 1; y < NORM_SUM_ROWS; ++y) total += sums[y][threadIdx.x];
  store_float(blockIdx.y ? a.out[1] : a.out[0], a.dtype, column, total);
}

}  // namespace dt
