#include "reduce.h"

#include "../common/simd.h"

namespace dt::DT_ISA {
namespace {

// 32 sums side by side, element i in sum i % 32, whatever the width of the processor's vectors. They are of its own width:
// of wider ones gcc makes memory.
constexpr int SUMS = 32, WIDTH = LANES / 2;
typedef float narrow __attribute__((vector_size(WIDTH * 4)));
typedef double vd __attribute__((vector_size(WIDTH * 8)));

DT_INLINE vd widen(narrow v) {
#if defined(__AVX512F__)
  return (vd)_mm512_cvtps_pd((__m256)v);
#elif defined(__AVX2__)
  return (vd)_mm256_cvtps_pd((__m128)v);
#else
  return __builtin_convertvector(v, vd);
#endif
}

template <class T> DT_INLINE void add_squares(const T* x, vd (&sums)[SUMS / WIDTH]) {
#pragma GCC unroll 16
  for (int k = 0; k < SUMS / WIDTH; k += 2) {
    const vf values = load(x + k * WIDTH, Whole());
    narrow halves[2];
    __builtin_memcpy(halves, &values, sizeof values);
    const vd low = widen(halves[0]), high = widen(halves[1]);
    sums[k] += low * low;
    sums[k + 1] += high * high;
  }
}

template <class T> double squares(const T* x, int64_t n) {
  vd sums[SUMS / WIDTH] = {};
  int64_t i = 0;
  for (; i + SUMS <= n; i += SUMS) add_squares(x + i, sums);
  if (i < n) {
    T rest[SUMS] = {};
    for (int64_t k = i; k < n; ++k) rest[k - i] = x[k];
    add_squares(rest, sums);
  }
  double each[SUMS], total[8];
  __builtin_memcpy(each, sums, sizeof each);
  for (int k = 0; k < 8; ++k) total[k] = (each[k] + each[k + 8]) + (each[k + 16] + each[k + 24]);
  return ((total[0] + total[1]) + (total[2] + total[3])) + ((total[4] + total[5]) + (total[6] + total[7]));
}

}  // namespace

void chunk_squares(const void* x, int64_t dtype, int64_t n, double* out) {
  *out = dtype == F32 ? squares((const float*)x, n) : dtype == BF16 ? squares((const bf16*)x, n) : squares((const f16*)x, n);
}

void add_into(void* sum, int64_t sum_dtype, const void* addend, int64_t addend_dtype, int64_t n) {
  const auto add = [&](auto* s, const auto* a) {
    each_vector(n, [&](int64_t i, auto part, int) DT_LAMBDA { store(s + i, load(s + i, part) + load(a + i, part), part); });
  };
  const auto with_addend = [&](auto* s) {
    addend_dtype == F32 ? add(s, (const float*)addend) : addend_dtype == BF16 ? add(s, (const bf16*)addend) : add(s, (const f16*)addend);
  };
  sum_dtype == F32 ? with_addend((float*)sum) : sum_dtype == BF16 ? with_addend((bf16*)sum) : with_addend((f16*)sum);
}

}  // namespace dt::DT_ISA
