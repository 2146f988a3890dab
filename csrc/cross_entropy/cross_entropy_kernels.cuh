// A block has one row. Rows need not begin at 16 bytes (a vocabulary of 50257 in bf16): the elements before the first whole
// pack and after the last one are taken one by one.
#pragma once
#include "../common/reduce.cuh"
#include "cross_entropy.h"

namespace dt {

constexpr int CROSS_ENTROPY_THREADS = 512;
constexpr int CROSS_ENTROPY_PACKS = 4;  // in flight per thread

// f(column, elements in a pack and number of packs as a type) for the columns of this thread; packs lie blockDim.x packs
// apart. N = 1 where x and the other pointer are not aligned alike.
template <int N, int PACKS> struct Step {
  static constexpr int pack = N, packs = PACKS;
};
template <int N, class T, class F> __device__ __forceinline__ void each_pack_of_row(const T* x, int64_t columns, F f) {
  const int64_t before = N > 1 ? (16 - reinterpret_cast<uintptr_t>(x) % 16) % 16 / sizeof(T) : 0;
  const int64_t head = before < columns ? before : columns, whole = head + (columns - head) / N * N;
  if (N > 1 && threadIdx.x < head) f(int64_t(threadIdx.x), Step<1, 1>());
  const int64_t stride = int64_t(blockDim.x) * N;
  int64_t i = head + threadIdx.x * N;
  for (; i + (CROSS_ENTROPY_PACKS - 1) * stride < whole; i += CROSS_ENTROPY_PACKS * stride) f(i, Step<N, CROSS_ENTROPY_PACKS>());
  for (; i < whole; i += stride) f(i, Step<N, 1>());
  if (N > 1 && whole + threadIdx.x < columns) f(whole + threadIdx.x, Step<1, 1>());
}

template <class T> __global__ void __launch_bounds__(CROSS_ENTROPY_THREADS) cross_entropy_terms_kernel(CrossEntropyTerms a) {
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(a.logits) + row * a.stride;
  float mine = -HIGHEST, total = 0.f;
  each_pack_of_row<PACK<T>>(x, a.columns, [&](int64_t first, auto step) {
    constexpr int M = decltype(step)::pack, PACKS = decltype(step)::packs;
    Pack<T, M> packs[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) packs[p] = load_pack<M>(x + first + int64_t(p) * blockDim.x * M);
    float top = mine, part = 0.f;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
#pragma unroll
      for (int k = 0; k < M; ++k) top = Max::of(top, to_float(packs[p].v[k]));
    }
    top = fminf(top, HIGHEST);
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
#pragma unroll
      for (int k = 0; k < M; ++k) part += __expf(to_float(packs[p].v[k]) - top);
    }
    total = total * __expf(mine - top) + part;
    mine = top;
  });
  const float top = block_reduce<Max>(mine, 0);
  total = block_reduce<Sum>(total * __expf(mine - top), 1);
  if (threadIdx.x != 0) return;
  a.maximum[row] = top;
  a.sum[row] = total;
  const int64_t at = a.labels[row] - a.first;
  a.target[row] = a.labels[row] != IGNORED && at >= 0 && at < a.columns ? to_float(x[at]) : 0.f;
}

struct CrossEntropyFinish {
  const int64_t* labels;
  const float *maximum, *sum, *target;
  float *lse, *objective, *entropy;
  int64_t rows, columns;
  float z_loss;
};
// One block: the sums over all rows, in an order that depends on their number alone.
inline __global__ void __launch_bounds__(CROSS_ENTROPY_THREADS) cross_entropy_finish_kernel(CrossEntropyFinish a) {
  float totals[2] = {0.f, 0.f};  // of lse - target and of lse²
  for (int64_t row = threadIdx.x; row < a.rows; row += blockDim.x) {
    const float lse = a.maximum[row] + logf(a.sum[row]);
    a.lse[row] = lse;
    const int64_t label = a.labels[row];
    if (label == IGNORED) continue;
    const float wrong = label >= 0 && label < a.columns ? 0.f : __builtin_nanf("");
    totals[0] += lse - a.target[row] + wrong;
    totals[1] += lse * lse;
  }
  block_reduce<Sum>(totals, 0);
  if (threadIdx.x != 0) return;
  *a.entropy = totals[0];
  *a.objective = a.z_loss != 0.f ? totals[0] + a.z_loss * totals[1] : totals[0];
}

template <class T, int N>
__global__ void __launch_bounds__(CROSS_ENTROPY_THREADS) cross_entropy_backward_kernel(CrossEntropyBackward a) {
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(a.logits) + row * a.stride;
  T* dx = static_cast<T*>(a.dlogits) + row * a.out_stride;
  const bool live = a.labels[row] != IGNORED;
  const float lse = a.lse[row], hit = a.upstream[a.per_row ? row : 0], slope = hit * (1.f + 2.f * a.z_loss * lse);
  const int64_t at = a.labels[row] - a.first;
  each_pack_of_row<N>(x, a.columns, [&](int64_t first, auto step) {
    constexpr int M = decltype(step)::pack, PACKS = decltype(step)::packs;
    Pack<T, M> packs[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      if (live) packs[p] = load_pack<M>(x + first + int64_t(p) * blockDim.x * M);
    }
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int64_t i = first + int64_t(p) * blockDim.x * M;
#pragma unroll
      for (int k = 0; k < M; ++k) {
        const float d = __expf(to_float(packs[p].v[k]) - lse) * slope;
        packs[p].v[k] = from_float<T>(live ? i + k == at ? d - hit : d : 0.f);
      }
      store_pack<M>(dx + i, packs[p]);
    }
  });
}

}  // namespace dt
