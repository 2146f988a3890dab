// AdamW over moments of 8 bits, scaled by blocks of 256 elements (arXiv:2110.02861): decode, update, encode in one pass.
//
// A code is the top of the bits of |x| / (largest |x| of its block) as a float, counted from the smallest it can hold;
// dist_train/optim/blocks.py describes it and holds the reference. Codes are rounded up or down by a hash of the value's own
// bits and the count of updates.
#pragma once
#include "../common/exact.h"
#include "optim.h"

namespace dt {

constexpr int CODE_BLOCK = 256;
constexpr int32_t CODE_HASH = int32_t(0x9E3779B1u);  // Knuth's multiplicative hash
struct SignedCode {  // of exp_avg
  static constexpr int SHIFT = 20, TOP = 127, LEAST = 0;
};
struct SquareCode {  // of exp_avg_sq, which is not negative; what is not zero never becomes zero
  static constexpr int SHIFT = 19, TOP = 255, LEAST = 1;
};
template <class K> constexpr int32_t CODE_BASE = (127 << (23 - K::SHIFT)) - K::TOP;

struct Adam8bit {
  float* master;
  const void* grad;
  int8_t* first;
  uint8_t* second;
  float *first_scales, *second_scales;  // one for each block
  void* copy;
  int64_t numel;  // a multiple of 256
};

DT_HD OptimFactors adam8bit_factors(const float* step, double lr, double beta1, double beta2, double eps, double decay,
                                    float grad_scale) {
  OptimRun run{};
  run.step = step;
  run.weight_decay = decay;
  return optim_factors(run, {lr, beta1, beta2, eps, ADAMW, F32, F32}, grad_scale);
}

// CPU kernel over blocks [begin, end); `step` is the count of updates.
DT_CPU_KERNEL(adam8bit_update, const Adam8bit&, const OptimFactors&, int32_t, int64_t, int64_t, int64_t, int64_t)

}  // namespace dt

// CUDA launcher.
extern "C" {
int dt_adam8bit_step(float* master, const void* grad, int8_t* first, uint8_t* second, float* first_scales, float* second_scales,
                     void* copy, const float* step, const float* grad_scale, const float* found_inf, int64_t numel, double lr,
                     double beta1, double beta2, double eps, double decay, int64_t grad_dtype, int64_t copy_dtype, void* stream);
}
