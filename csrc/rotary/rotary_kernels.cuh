// A thread has one pack of pairs of a token and keeps its part of the table in registers for ROTARY_HEADS heads at a time,
// all of which are loaded before the first is stored. threadIdx: (pack, group of heads, token).
#pragma once
#include "../common/cuda.cuh"
#include "rotary.h"

namespace dt {

constexpr int ROTARY_THREADS = 256;
constexpr int ROTARY_HEADS = 4;

template <class T, int N> __global__ void __launch_bounds__(ROTARY_THREADS) rotary_kernel(Rotary a) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.z + threadIdx.z;
  if (at >= a.batches * a.tokens) return;
  const int64_t batch = at / a.tokens, token = at % a.tokens, row = batch * a.table_batch + token * 2 * a.half;
  const int heads0 = int(a.tensors[0].heads), heads = a.count > 1 ? heads0 + int(a.tensors[1].heads) : heads0;
  const int groups = (heads + ROTARY_HEADS - 1) / ROTARY_HEADS;
  for (int64_t i = threadIdx.x * N; i < a.half; i += blockDim.x * N) {
    float cos0[N], cos1[N], sin0[N], sin1[N];
    load_floats<N, float>(a.cos + row, true, i, cos0);
    load_floats<N, float>(a.cos + row, true, a.half + i, cos1);
    load_floats<N, float>(a.sin + row, true, a.inverse ? a.half + i : i, sin0);
    load_floats<N, float>(a.sin + row, true, a.inverse ? i : a.half + i, sin1);
    for (int group = threadIdx.y; group < groups; group += blockDim.y) {
      Pack<T, N> first[ROTARY_HEADS], second[ROTARY_HEADS];
#pragma unroll
      for (int k = 0; k < ROTARY_HEADS; ++k) {
        const int head = group + k * groups;
        if (head >= heads) continue;
        const RotaryTensor& tensor = a.tensors[head >= heads0];
        const T* x = static_cast<const T*>(tensor.x) + batch * tensor.x_batch + token * tensor.x_token +
                     (head >= heads0 ? head - heads0 : head) * tensor.x_head;
        first[k] = load_pack<N>(x + i);
        second[k] = load_pack<N>(x + a.half + i);
      }
#pragma unroll
      for (int k = 0; k < ROTARY_HEADS; ++k) {
        const int head = group + k * groups;
        if (head >= heads) continue;
        const RotaryTensor& tensor = a.tensors[head >= heads0];
        T* y = static_cast<T*>(tensor.y) + batch * tensor.y_batch + token * tensor.y_token +
               (head >= heads0 ? head - heads0 : head) * tensor.y_head;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float p = to_float(first[k].v[j]), q = to_float(second[k].v[j]);
          first[k].v[j] = from_float<T>(p * cos0[j] + q * sin0[j]);
          second[k].v[j] = from_float<T>(q * cos1[j] + p * sin1[j]);
        }
        store_pack<N>(y + i, first[k]);
        store_pack<N>(y + a.half + i, second[k]);
      }
    }
  }
}

}  // namespace dt
