// The three element types of the kernels, the same on the host, on the device and in the CPU emulation of the device.
// All arithmetic is in float; these types only hold values.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define DT_HD __host__ __device__ __forceinline__
#else
#define DT_HD inline __attribute__((always_inline))
#endif

namespace dt {

enum DType : int64_t { F32 = 0, BF16 = 1, F16 = 2 };  // tests/csrc/harness.py holds the same table

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

DT_HD uint32_t float_bits(float v) { uint32_t u; memcpy(&u, &v, 4); return u; }
DT_HD float bits_float(uint32_t u) { float v; memcpy(&v, &u, 4); return v; }

DT_HD float to_float(float v) { return v; }
DT_HD float to_float(bf16 v) { return bits_float(uint32_t(v.bits) << 16); }
DT_HD float to_float(f16 v) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(v.bits));
#else
  const uint32_t magnitude = uint32_t(v.bits & 0x7fff) << 13;
  const float scaled = bits_float(magnitude) * 0x1p112f;  // moves the exponent from bias 15 to 127, denormals included
  const uint32_t u = magnitude >= 0x7c00u << 13 ? magnitude | 0x7f800000u : float_bits(scaled);
  return bits_float(u | uint32_t(v.bits & 0x8000) << 16);
#endif
}

// Rounds to nearest, ties to even; NaN stays NaN, what is too large becomes infinity.
template <class T> DT_HD T from_float(float v);
template <> DT_HD float from_float<float>(float v) { return v; }
template <> DT_HD bf16 from_float<bf16>(float v) {
#if defined(__CUDA_ARCH__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(v))};
#else
  const uint32_t u = float_bits(v);
  if (v != v) return {uint16_t(u >> 16 | 0x40)};
  return {uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
#endif
}
template <> DT_HD f16 from_float<f16>(float v) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(v))};
#else
  const uint32_t sign = float_bits(v) & 0x80000000u;
  uint32_t u = float_bits(v) ^ sign;
  if (u >= 143u << 23) {  // 2^16 and above, infinity, NaN
    u = u > 0x7f800000u ? 0x7e00 : 0x7c00;
  } else if (u < 113u << 23) {  // denormal as f16: adding 0.5 leaves the ten bits at the end of the fraction, rounded
    u = float_bits(bits_float(u) + 0.5f) - (126u << 23);
  } else {
    u = (u - (112u << 23) + 0xfff + (u >> 13 & 1)) >> 13;
  }
  return {uint16_t(u | sign >> 16)};
#endif
}

// p[i] = v, where p holds elements of `dtype`.
DT_HD void store_float(void* p, int64_t dtype, int64_t i, float v) {
  if (dtype == F32) static_cast<float*>(p)[i] = v;
  else if (dtype == BF16) static_cast<bf16*>(p)[i] = from_float<bf16>(v);
  else static_cast<f16*>(p)[i] = from_float<f16>(v);
}

// Host only. Calls f with a value of the type that `dtype` names.
template <class F> auto with_dtype(int64_t dtype, F&& f) {
  return dtype == F32 ? f(float()) : dtype == BF16 ? f(bf16()) : f(f16());
}

}  // namespace dt
