// Vectors of floats as wide as the instruction set this unit is compiled for; loads and stores convert from and to bf16
// and f16. Included by <op>_cpu.cpp only, which must not call templates or inline functions from outside dt::DT_ISA: the
// linker would keep one copy of them for the whole library, perhaps the one with instructions this processor lacks.
#pragma once
#include <cmath>
#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include "dtype.h"
#ifndef DT_ISA
#error "DT_ISA names the instruction set: base, avx2 or avx512"
#endif
#define DT_INLINE inline __attribute__((always_inline))
#define DT_LAMBDA __attribute__((always_inline))  // after the parameters of a lambda that each_vector calls

namespace dt::DT_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

// How many elements a load or store touches: all lanes, or the first `count` at the end of a row.
struct Whole { static constexpr int count = LANES; };
struct Part { int count; };

DT_INLINE vf splat(float v) { return vf{} + v; }

DT_INLINE vf load(const float* p, Whole) { vf v; __builtin_memcpy(&v, p, sizeof v); return v; }
DT_INLINE vf load(const bf16* p, Whole) {
  vh h; __builtin_memcpy(&h, p, sizeof h);
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
  return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
DT_INLINE vf load(const f16* p, Whole) {
#if defined(__AVX512F__)
  vh h; __builtin_memcpy(&h, p, sizeof h);
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
  vh h; __builtin_memcpy(&h, p, sizeof h);
  return (vf)_mm256_cvtph_ps((__m128i)h);
#else
  vf v;
  for (int k = 0; k < LANES; ++k) v[k] = to_float(p[k]);
  return v;
#endif
}
DT_INLINE void store(float* p, vf v, Whole) { __builtin_memcpy(p, &v, sizeof v); }
DT_INLINE void store(bf16* p, vf v, Whole) {
  const vu u = (vu)v, high = u >> 16;
  const vu rounded = v != v ? (high | 0x40) : ((u + 0x7fff + (high & 1)) >> 16);
#if defined(__AVX512F__)
  const vh h = (vh)_mm512_cvtepi32_epi16((__m512i)rounded);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)rounded, (__m256i)rounded), 0x08);
  const vh h = (vh)_mm256_castsi256_si128(packed);
#else
  const vh h = __builtin_convertvector(rounded, vh);
#endif
  __builtin_memcpy(p, &h, sizeof h);
}
DT_INLINE void store(f16* p, vf v, Whole) {
#if defined(__AVX512F__)
  const vh h = (vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __builtin_memcpy(p, &h, sizeof h);
#elif defined(__AVX2__)
  const vh h = (vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __builtin_memcpy(p, &h, sizeof h);
#else
  for (int k = 0; k < LANES; ++k) p[k] = from_float<f16>(v[k]);
#endif
}
template <class T> DT_INLINE vf load(const T* p, Part part) {  // lanes past the end are zero
  T values[LANES] = {};
  for (int k = 0; k < part.count; ++k) values[k] = p[k];
  return load(values, Whole());
}
template <class T> DT_INLINE void store(T* p, vf v, Part part) {
  T values[LANES];
  store(values, v, Whole());
  for (int k = 0; k < part.count; ++k) p[k] = values[k];
}

DT_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }  // p may lie past the end

// v as it reads back after being stored as T.
DT_INLINE vf rounded(vf v, float*) { return v; }
template <class T> DT_INLINE vf rounded(vf v, T*) { T values[LANES]; store(values, v, Whole()); return load(values, Whole()); }

// Zero in the lanes past the end.
DT_INLINE vf keep(vf v, Whole) { return v; }
DT_INLINE vf keep(vf v, Part part) { for (int k = part.count; k < LANES; ++k) v[k] = 0.f; return v; }

typedef float vf4 __attribute__((vector_size(16)));
DT_INLINE float sum(vf v) {  // always in the same order
#if defined(__AVX512F__)
  const __m256 v8 = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
  const vf4 v4 = (vf4)_mm256_castps256_ps128(v8) + (vf4)_mm256_extractf128_ps(v8, 1);
#elif defined(__AVX2__)
  const vf4 v4 = (vf4)_mm256_castps256_ps128((__m256)v) + (vf4)_mm256_extractf128_ps((__m256)v, 1);
#else
  const vf4 v4 = v;
#endif
  return (v4[0] + v4[2]) + (v4[1] + v4[3]);
}
DT_INLINE float largest(vf v) {  // NaN lanes are passed over
  float most = v[0];
  for (int k = 1; k < LANES; ++k) most = v[k] > most || most != most ? v[k] : most;
  return most;
}
DT_INLINE vf max(vf a, vf b) { return a > b ? a : b; }  // b where one of them is NaN
DT_INLINE vf min(vf a, vf b) { return a < b ? a : b; }
DT_INLINE vf sqrt(vf v) {
#if defined(__AVX512F__)
  return (vf)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
  return (vf)_mm256_sqrt_ps((__m256)v);
#else
  for (int k = 0; k < LANES; ++k) v[k] = __builtin_sqrtf(v[k]);
  return v;
#endif
}

// f(i, whole or part, slot) over [0, n) in vectors. Consecutive calls get slots 0 to 3: a sum kept in four vectors does
// not wait for its own last addition.
constexpr int SLOTS = 4;
template <class F> DT_INLINE void each_vector(int64_t n, F f) {
  int64_t i = 0;
  for (; i + SLOTS * LANES <= n; i += SLOTS * LANES) {
    f(i, Whole(), 0);
    f(i + LANES, Whole(), 1);
    f(i + 2 * LANES, Whole(), 2);
    f(i + 3 * LANES, Whole(), 3);
  }
  for (; i + LANES <= n; i += LANES) f(i, Whole(), 0);
  if (i < n) f(i, Part{int(n - i)}, 1);
}
DT_INLINE float sum(const vf (&v)[SLOTS]) { return sum((v[0] + v[1]) + (v[2] + v[3])); }

}  // namespace dt::DT_ISA
