#include "reduce.h"

#include "../common/simd.h"

namespace dt::DT_ISA {
namespace {

// 32 sums side by side, element i in sum i % 32, whatever the width of the processor's vectors.
constexpr int SUMS = 32;
typedef float f8 __attribute__((vector_size(32)));
typedef double d8 __attribute__((vector_size(64)));

template <class T> DT_INLINE void add_squares(const T* x, d8 (&sums)[4]) {
  float values[SUMS];
  for (int k = 0; k < SUMS; k += LANES) store(values + k, load(x + k, Whole()), Whole());
  for (int k = 0; k < 4; ++k) {
    f8 part;
    __builtin_memcpy(&part, values + 8 * k, sizeof part);
    const d8 wide = __builtin_convertvector(part, d8);
    sums[k] += wide * wide;
  }
}

template <class T> double squares(const T* x, int64_t n) {
  d8 sums[4] = {};
  int64_t i = 0;
  for (; i + SUMS <= n; i += SUMS) add_squares(x + i, sums);
  if (i < n) {
    T rest[SUMS] = {};
    for (int64_t k = i; k < n; ++k) rest[k - i] = x[k];
    add_squares(rest, sums);
  }
  const d8 total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
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
