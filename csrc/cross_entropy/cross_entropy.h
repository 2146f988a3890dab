// Cross entropy over rows of logits, of which a vocabulary-parallel rank holds some columns, with z-loss (PaLM,
// arXiv:2204.02311, section 5). The sum is kept beside a running maximum (Milakov and Gimelshein, arXiv:1805.02867).
//
//   maximum = max(x), sum = Σ exp(x - maximum), target = x[label - first], 0 where that is another rank's or the label is -100
//   lse = maximum + log(sum);   entropy = Σ over live rows of lse - target;   objective = entropy + z_loss · Σ lse²
//   dx = upstream · ((1 + 2 · z_loss · lse) · exp(x - lse) - [column is the label's]), 0 in rows whose label is -100
//
// The maximum is always finite: clamped to the floats, so that -inf gives the sum 0, +inf the sum inf and NaN the sum NaN,
// and no difference of two maxima is NaN.
#pragma once
#include "../common/dtype.h"
#include "../common/isa.h"

namespace dt {

constexpr int64_t IGNORED = -100;
constexpr float HIGHEST = 0x1.fffffep127f;

// logits are rows × columns of `dtype`, row r beginning at r · stride; their columns are [first, first + columns) of the
// vocabulary. The others have one element per row.
struct CrossEntropyTerms {
  const void* logits;
  const int64_t* labels;
  float *maximum, *sum, *target;
  int64_t rows, columns, stride, first, dtype;
};
struct CrossEntropyBackward {
  const float* upstream;  // one value, or one per row
  bool per_row;
  const void* logits;
  const int64_t* labels;
  const float* lse;
  void* dlogits;  // may be the logits themselves
  int64_t rows, columns, stride, out_stride, first, dtype;
  float z_loss;
};

// CPU kernels over rows [begin, end).
DT_CPU_KERNEL(cross_entropy_terms, const CrossEntropyTerms&, int64_t, int64_t)
DT_CPU_KERNEL(cross_entropy_backward, const CrossEntropyBackward&, int64_t, int64_t)

}  // namespace dt

// CUDA launchers. A label outside [0, columns), -100 apart, makes finish's results NaN.
extern "C" {
int dt_cross_entropy_terms(const void* logits, const int64_t* labels, float* maximum, float* sum, float* target, int64_t rows,
                           int64_t columns, int64_t stride, int64_t first, int64_t dtype, void* stream);
int dt_cross_entropy_finish(const int64_t* labels, const float* maximum, const float* sum, const float* target, float* lse,
                            float* objective, float* entropy, int64_t rows, int64_t columns, double z_loss, void* stream);
int dt_cross_entropy_backward(const float* upstream, int64_t per_row, const void* logits, const int64_t* labels, const float* lse,
                              void* dlogits, int64_t rows, int64_t columns, int64_t stride, int64_t out_stride, int64_t first,
                              int64_t dtype, double z_loss, void* stream);
}
