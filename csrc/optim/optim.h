// Optimizers over flat runs of elements: Adam (arXiv:1412.6980), AdamW (arXiv:1711.05101), SGD with or without momentum, LAMB
// (arXiv:1904.00962). One call takes many runs, each with its own weight decay and count of updates.
//
//   g = gradient · (1 / grad_scale)                        nothing at all is written where found_inf > 0
//   Adam:  g += decay · p;  AdamW: p -= lr · decay · p
//   m += (1 - beta1) · (g - m),  v = beta2 · v + (1 - beta2) · g²
//   u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
//   Adam, AdamW: p -= lr · u
//   LAMB:        u += decay · p;  p -= lr · |p|/|u| · u, with norms over the run; the ratio is 1 where a norm is 0, and where
//                the run is not `adapted`
//   SGD:   g += decay · p;  b = momentum · b + g;  p -= lr · b     (b = g without momentum)
//
// A master is float; or split into its upper 16 bits, rounded to the nearest bf16 with ties away from zero, and the int16 that
// is left: bits = (upper << 16) + remainder. A copy of the new master in bf16 or f16 can be written in the same pass.
//
// Every element takes the same operations wherever it lies in a run: on the CPU a tail is padded to a whole burst of vectors.
#pragma once
#include <cmath>

#include "../common/dtype.h"
#include "../common/isa.h"

namespace dt {

enum OptimKind : int64_t { ADAM = 0, ADAMW = 1, SGD = 2, MOMENTUM = 3, LAMB = 4 };

// A row of the table that the launcher takes: nine fields of eight bytes and `adapted`, which LAMB reads.
struct OptimRun {
  void* master;        // numel floats; where `remainder` is not null, bf16
  int16_t* remainder;  // null: the master is whole
  const void* grad;    // of the dtype that the options name
  float *first, *second;  // exp_avg and exp_avg_sq; `first` is SGD's momentum; null where the kind has none
  void* copy;          // of the dtype that the options name; null: none; always null beside a remainder
  const float* step;   // the count of updates, this one included; null for SGD
  int64_t numel;
  double weight_decay;
  int64_t adapted;
};
struct OptimOptions {
  double lr, beta1, beta2, eps;  // beta1 is SGD's momentum
  int64_t kind, grad_dtype, copy_dtype;
};
// What the elements of one run share, made in double.
struct OptimFactors {
  float unscale, keep, decay, mix1, beta2, mix2;
  float rate, floor;  // rate · m / (sqrt(v) + floor) is lr · u, for LAMB u: both bias corrections and eps are in them
  float lr, momentum;
};

DT_HD OptimFactors optim_factors(const OptimRun& run, const OptimOptions& o, float grad_scale) {
  const double count = run.step ? double(*run.step) : 1.0;
  const double correction = 1.0 - pow(o.beta1, count), root = sqrt(1.0 - pow(o.beta2, count));
  const bool decoupled = o.kind == ADAMW;
  return {float(1.0 / grad_scale),
          decoupled ? float(1.0 - o.lr * run.weight_decay) : 1.f,
          decoupled ? 0.f : float(run.weight_decay),
          float(1.0 - o.beta1),
          float(o.beta2),
          float(1.0 - o.beta2),
          float((o.kind == LAMB ? 1.0 : o.lr) * root / correction),
          float(o.eps * root),
          float(o.lr),
          float(o.beta1)};
}

template <class V> DT_HD void optim_moments(V& m, V& v, V g, const OptimFactors& f) {
  m = m + f.mix1 * (g - m);
  v = f.beta2 * v + f.mix2 * g * g;
}

constexpr int64_t OPTIM_CHUNK = 8192;  // elements that one block or one turn of a thread updates; LAMB's sums are over chunks

// CPU kernels over the elements [begin, end) of a run. lamb_moments adds up p² and u² into sums[0] and sums[1].
DT_CPU_KERNEL(optim_update, const OptimRun&, const OptimOptions&, const OptimFactors&, int64_t, int64_t)
DT_CPU_KERNEL(lamb_moments, const OptimRun&, const OptimOptions&, const OptimFactors&, int64_t, int64_t, double*)
DT_CPU_KERNEL(lamb_update, const OptimRun&, const OptimOptions&, const OptimFactors&, float, int64_t, int64_t)

}  // namespace dt

// CUDA launcher. `table` is `count` rows of OptimRun on the host; `split`: all have remainders, or none has. `sums`, for LAMB,
// has two doubles for each chunk of the longest 32 runs or so: 2 · Σ ceil(numel / 8192) is always enough.
extern "C" {
int dt_optim_step(const void* table, int64_t count, const float* grad_scale, const float* found_inf, double* sums, double lr,
                  double beta1, double beta2, double eps, int64_t kind, int64_t split, int64_t grad_dtype, int64_t copy_dtype,
                  void* stream);
}
