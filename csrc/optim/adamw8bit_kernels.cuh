// A warp decodes, updates and encodes one block of 256 elements, 8 a lane.
#pragma once
#include "../common/reduce.cuh"
#include "adamw8bit.h"

namespace dt {

constexpr int ADAM8_THREADS = 256, ADAM8_EACH = CODE_BLOCK / WARP;

template <class K> __device__ __forceinline__ float decode_unit(int32_t code) {
  if (code == 0) return 0.f;
  const uint32_t bits = uint32_t((code < 0 ? -code : code) + CODE_BASE<K>) << K::SHIFT;
  return bits_float(bits | (code < 0 ? 0x80000000u : 0u));
}
template <class K> __device__ __forceinline__ int32_t code_of(float unit, int32_t step) {
  const uint32_t bits = float_bits(unit), dice = ((bits + uint32_t(step)) * uint32_t(CODE_HASH)) & ((1u << K::SHIFT) - 1);
  int32_t code = int32_t(((bits & 0x7fffffffu) + dice) >> K::SHIFT) - CODE_BASE<K>;
  code = code < K::LEAST ? K::LEAST : code;
  return unit == 0.f ? 0 : unit < 0.f ? -code : code;
}
template <class K, class T> __device__ __forceinline__ void encode(const float (&values)[ADAM8_EACH], T* codes, float* scale, int32_t step) {
  float most = 0x1p-126f;
#pragma unroll
  for (int k = 0; k < ADAM8_EACH; ++k) most = fmaxf(most, fabsf(values[k]));
  most = warp_reduce<Max>(most);
  Pack<T, ADAM8_EACH> pack;
#pragma unroll
  for (int k = 0; k < ADAM8_EACH; ++k) pack.v[k] = T(code_of<K>(values[k] / most, step));
  store_pack<ADAM8_EACH>(codes, pack);
  if (threadIdx.x % WARP == 0) *scale = most;
}

struct Adam8bitLaunch {
  Adam8bit a;
  const float *step, *grad_scale, *found_inf;
  double lr, beta1, beta2, eps, decay;
};

template <class G, class C> __global__ void __launch_bounds__(ADAM8_THREADS) adam8bit_kernel(Adam8bitLaunch l) {
  if (*l.found_inf > 0.f) return;
  __shared__ OptimFactors factors;
  if (threadIdx.x == 0) factors = adam8bit_factors(l.step, l.lr, l.beta1, l.beta2, l.eps, l.decay, *l.grad_scale);
  __syncthreads();
  const OptimFactors f = factors;
  const int32_t step = int32_t(*l.step);
  const int64_t blocks = l.a.numel / CODE_BLOCK, warps = int64_t(gridDim.x) * (ADAM8_THREADS / WARP);
  const G* grad = static_cast<const G*>(l.a.grad);
  C* copy = static_cast<C*>(l.a.copy);
  for (int64_t block = (int64_t(blockIdx.x) * ADAM8_THREADS + threadIdx.x) / WARP; block < blocks; block += warps) {
    const int64_t at = block * CODE_BLOCK + threadIdx.x % WARP * ADAM8_EACH;
    const auto first = load_pack<ADAM8_EACH>(l.a.first + at);
    const auto second = load_pack<ADAM8_EACH>(l.a.second + at);
    const float first_scale = l.a.first_scales[block], second_scale = l.a.second_scales[block];
    float p[ADAM8_EACH], m[ADAM8_EACH], v[ADAM8_EACH];
#pragma unroll
    for (int k = 0; k < ADAM8_EACH; k += 4) {  // 16 bytes of the master at a time
      const auto master = load_pack<4>(l.a.master + at + k);
      const auto g = load_pack<4>(grad + at + k);
      Pack<float, 4> next;
      Pack<C, 4> copied;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        m[k + j] = exact_product(decode_unit<SignedCode>(first.v[k + j]), first_scale);
        v[k + j] = exact_product(decode_unit<SquareCode>(second.v[k + j]), second_scale);
        optim_moments(m[k + j], v[k + j], to_float(g.v[j]) * f.unscale, f);
        p[k + j] = master.v[j] * f.keep;
        p[k + j] = p[k + j] - f.rate * m[k + j] / (sqrtf(v[k + j]) + f.floor);
        next.v[j] = p[k + j];
        copied.v[j] = from_float<C>(p[k + j]);
      }
      store_pack<4>(l.a.master + at + k, next);
      if (copy) store_pack<4>(copy + at + k, copied);
    }
    __syncwarp();  // the scales have been read by every lane
    encode<SignedCode>(m, l.a.first + at, l.a.first_scales + block, step);
    encode<SquareCode>(v, l.a.second + at, l.a.second_scales + block, step);
  }
}

}  // namespace dt
