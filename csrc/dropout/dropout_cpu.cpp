#include "dropout.h"

#include "../common/simd.h"

namespace dt::DT_ISA {
namespace {

typedef uint64_t vl __attribute__((vector_size(LANES * 4)));  // half as many lanes, of twice the bits

// The upper and lower halves of the products with m.
DT_INLINE void multiply(vu a, uint32_t m, vu& high, vu& low) {
#if defined(__AVX512F__)
  const __m512i factor = _mm512_set1_epi64(m);
  const vl even = (vl)_mm512_mul_epu32((__m512i)a, factor), odd = (vl)_mm512_mul_epu32((__m512i)((vl)a >> 32), factor);
#elif defined(__AVX2__)
  const __m256i factor = _mm256_set1_epi64x(m);
  const vl even = (vl)_mm256_mul_epu32((__m256i)a, factor), odd = (vl)_mm256_mul_epu32((__m256i)((vl)a >> 32), factor);
#else
  const vl even = ((vl)a & 0xffffffffu) * m, odd = ((vl)a >> 32) * m;
#endif
  const vl upper = vl{} + 0xffffffff00000000u;
  high = (vu)((even >> 32) | (odd & upper));
  low = (vu)((even & ~upper) | (odd << 32));
}

// The 4 · LANES words of the counters from `counter` on, in their order.
DT_INLINE void philox_words(uint64_t counter, uint64_t seed, uint32_t* words) {
  vu lane;
  for (int k = 0; k < LANES; ++k) lane[k] = uint32_t(k);
  vu word[4] = {lane + uint32_t(counter), vu{} + uint32_t(counter >> 32), vu{}, vu{}};
  word[1] -= (vu)(word[0] < lane);  // (a comparison that holds is -1)
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  for (int round = 0; round < PHILOX_ROUNDS; ++round, key0 += PHILOX_W0, key1 += PHILOX_W1) {
    vu high0, low0, high1, low1;
    multiply(word[0], PHILOX_M0, high0, low0);
    multiply(word[2], PHILOX_M1, high1, low1);
    word[0] = high1 ^ word[1] ^ key0, word[1] = low1, word[2] = high0 ^ word[3] ^ key1, word[3] = low0;
  }
  for (int k = 0; k < LANES; ++k)
    for (int w = 0; w < 4; ++w) words[4 * k + w] = word[w][k];
}

template <class T> void add(const Dropout& a, int64_t begin, int64_t end) {
  const uint64_t seed = uint64_t(a.stream[0]), offset = uint64_t(a.stream[1]);
  const bool any = a.threshold > 0;
  const uint32_t last = uint32_t(a.threshold - 1);  // the largest word that drops
  constexpr int STEP = 4 * LANES;
  uint32_t words[STEP + LANES] = {};  // a whole vector can be read where a part is used
  const uint64_t first = offset + uint64_t(begin), stop = offset + uint64_t(end);
  for (uint64_t base = first / 4 * 4; base < stop; base += STEP) {
    philox_words(base / 4, seed, words);
    const uint64_t from = base < first ? first : base, to = base + STEP < stop ? base + STEP : stop;
    const uint32_t* word = words + (from - base);
    const int64_t at = int64_t(from - offset);
    const T *x = static_cast<const T*>(a.x) + at, *residual = a.residual ? static_cast<const T*>(a.residual) + at : nullptr;
    T* y = static_cast<T*>(a.y) + at;
    each_vector(int64_t(to - from), [&](int64_t i, auto part, int) DT_LAMBDA {
      vu w;
      __builtin_memcpy(&w, word + i, sizeof w);
      const vf kept = exact(load(x + i, part) * a.scale);
      const vf value = any ? (w <= last ? vf{} : kept) : kept;
      store(y + i, residual ? value + load(residual + i, part) : value, part);
    });
  }
}

}  // namespace

void dropout_add(const Dropout& a, int64_t begin, int64_t end) {
  a.dtype == F32 ? add<float>(a, begin, end) : a.dtype == BF16 ? add<bf16>(a, begin, end) : add<f16>(a, begin, end);
}

}  // namespace dt::DT_ISA
