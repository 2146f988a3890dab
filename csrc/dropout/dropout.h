// residual + dropout(x): an element is zero with probability p, else x / (1 - p). The residual may be missing.
//
// Whether element i is dropped is decided by element offset + i of a stream of 32-bit words, that of the counter-based generator
// Philox4x32-10 (Salmon et al., SC11, 2011): word e is the output e % 4 of counter e / 4 under the 64-bit key `seed`. So the
// mask need not be kept, and a part of a tensor gets its part of the mask wherever it is computed. Products are rounded before
// they are added: the same bits on every processor.
#pragma once
#include "../common/exact.h"
#include "../common/isa.h"

namespace dt {

struct Dropout {
  const void *x, *residual;  // residual may be null
  void* y;
  const int64_t* stream;  // seed and offset, offset >= 0
  int64_t numel, dtype;
  int64_t threshold;  // dropped is a word below it: p · 2^32
  float scale;        // 1 / (1 - p); 0 for p = 1
};

constexpr uint32_t PHILOX_M0 = 0xD2511F53u, PHILOX_M1 = 0xCD9E8D57u, PHILOX_W0 = 0x9E3779B9u, PHILOX_W1 = 0xBB67AE85u;
constexpr int PHILOX_ROUNDS = 10;

DT_HD void philox(uint64_t counter, uint64_t seed, uint32_t (&word)[4]) {
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  word[0] = uint32_t(counter), word[1] = uint32_t(counter >> 32), word[2] = 0, word[3] = 0;
#pragma GCC unroll 10
  for (int round = 0; round < PHILOX_ROUNDS; ++round, key0 += PHILOX_W0, key1 += PHILOX_W1) {
    const uint64_t a = uint64_t(PHILOX_M0) * word[0], b = uint64_t(PHILOX_M1) * word[2];
    const uint32_t next0 = uint32_t(b >> 32) ^ word[1] ^ key0, next2 = uint32_t(a >> 32) ^ word[3] ^ key1;
    word[0] = next0, word[1] = uint32_t(b), word[2] = next2, word[3] = uint32_t(a);
  }
}

// CPU kernel over the elements [begin, end).
DT_CPU_KERNEL(dropout_add, const Dropout&, int64_t, int64_t)

}  // namespace dt

// CUDA launcher.
extern "C" {
int dt_dropout_add(const void* x, const void* residual, void* y, const int64_t* stream_state, int64_t numel, double p, int64_t dtype,
                   void* stream);
}
namespace dt {
inline Dropout dropout_of(const void* x, const void* residual, void* y, const int64_t* state, int64_t numel, int64_t dtype, double p) {
  return {x, residual, y, state, numel, dtype, int64_t(p * 4294967296.0), p < 1.0 ? float(1.0 / (1.0 - p)) : 0.f};
}
}  // namespace dt
