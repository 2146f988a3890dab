#include "quantise.h"

#include "../common/simd.h"

namespace dt::DT_ISA {
namespace {

typedef int8_t vb __attribute__((vector_size(LANES)));

template <class T> void encode_block(const T* x, int64_t n, int8_t* scale_at, int8_t* codes) {
  vi most[SLOTS] = {};  // of magnitudes, as integers: in that order NaN is the largest
  each_vector(n, [&](int64_t i, auto part, int slot) DT_LAMBDA {
    const vi size = (vi)load(x + i, part) & 0x7fffffff;
    most[slot] = size > most[slot] ? size : most[slot];
  });
  int32_t largest = 0;
  for (int slot = 0; slot < SLOTS; ++slot)
    for (int k = 0; k < LANES; ++k) largest = most[slot][k] > largest ? most[slot][k] : largest;
  float size;
  __builtin_memcpy(&size, &largest, sizeof size);
  const float quotient = size / 127.f, step = quotient < LEAST_STEP ? LEAST_STEP : quotient;
  const float scale = largest == 0 ? 0.f : step;
  __builtin_memcpy(scale_at, &scale, sizeof scale);
  each_vector(n, [&](int64_t i, auto part, int) DT_LAMBDA {
    const vf q = load(x + i, part) / step;
    const vb code = __builtin_convertvector(q == q ? (vi)(q + TO_INTEGER) : vi{}, vb);  // (keeps the last eight bits)
    __builtin_memcpy(codes + i, &code, sizeof(int8_t) * part.count);
  });
}

template <class T> void decode_block(const int8_t* scale_at, const int8_t* codes, int64_t n, T* out, bool add) {
  float scale;
  __builtin_memcpy(&scale, scale_at, sizeof scale);
  each_vector(n, [&](int64_t i, auto part, int) DT_LAMBDA {
    vb code = {};
    __builtin_memcpy(&code, codes + i, sizeof(int8_t) * part.count);
    vf value = exact(__builtin_convertvector(code, vf) * scale);
    if (add) value = load(out + i, part) + value;
    store(out + i, value, part);
  });
}

// f(row, block of the row, where the block begins, its length) for the blocks [begin, end).
template <class F> void each_block(const Int8Rows& a, int64_t begin, int64_t end, F f) {
  const int64_t blocks = blocks_of(a);
  for (int64_t at = begin; at < end; ++at) {
    const int64_t start = at % blocks * a.block, left = a.columns - start;
    f(at / blocks, at % blocks, start, left < a.block ? left : a.block);
  }
}

}  // namespace

void int8_encode(const Int8Rows& a, const void* x, int8_t* coded, int64_t begin, int64_t end) {
  const auto encode = [&](const auto* from) {
    each_block(a, begin, end, [&](int64_t row, int64_t block, int64_t start, int64_t n) {
      int8_t* to = coded + row * coded_columns(a);
      encode_block(from + row * a.columns + start, n, to + 4 * block, to + 4 * blocks_of(a) + start);
    });
  };
  a.dtype == F32 ? encode((const float*)x) : a.dtype == BF16 ? encode((const bf16*)x) : encode((const f16*)x);
}

void int8_decode(const Int8Rows& a, const int8_t* coded, void* out, bool add, int64_t begin, int64_t end) {
  const auto decode = [&](auto* to) {
    each_block(a, begin, end, [&](int64_t row, int64_t block, int64_t start, int64_t n) {
      const int8_t* from = coded + row * coded_columns(a);
      decode_block(from + 4 * block, from + 4 * blocks_of(a) + start, n, to + row * a.columns + start, add);
    });
  };
  a.dtype == F32 ? decode((float*)out) : a.dtype == BF16 ? decode((bf16*)out) : decode((f16*)out);
}

void take_largest(uint32_t* x, int64_t n, int64_t count, int32_t* values, int32_t* places) {
  uint32_t prefix = 0, mask = 0;
  int64_t left = count;  // to be found among the elements with this prefix
  for (int round = 0; round < 3; ++round) {
    uint32_t bins[2][RADIX_BINS] = {};  // two, so that equal neighbours do not wait for each other
    const uint32_t low = (1u << RADIX_BITS[round]) - 1;
    const int shift = RADIX_SHIFT[round];
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t size = x[i] & 0x7fffffffu;
      if ((size & mask) == prefix) ++bins[i & 1][size >> shift & low];
    }
    int64_t bin = low;
    for (; bin > 0; --bin) {
      const int64_t held = int64_t(bins[0][bin]) + bins[1][bin];
      if (held >= left) break;
      left -= held;
    }
    prefix |= uint32_t(bin) << shift;
    mask |= low << shift;
  }
  int64_t found = 0;
  for (int64_t i = 0; i < n && found < count; ++i) {
    const uint32_t size = x[i] & 0x7fffffffu;
    if (size < prefix || (size == prefix && left-- <= 0)) continue;
    values[found] = int32_t(x[i]);
    places[found++] = int32_t(i);
    x[i] = 0;
  }
}

}  // namespace dt::DT_ISA
