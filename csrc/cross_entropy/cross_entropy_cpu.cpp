#include "cross_entropy.h"

#include "../common/simd_exp.h"

namespace dt::DT_ISA {
namespace {

constexpr int64_t BLOCK = 1024;  // elements whose maximum is found before they are summed; they stay in the first-level cache

// The lanes past the end hold `value`.
DT_INLINE vf filled(vf v, Whole, float) { return v; }
DT_INLINE vf filled(vf v, Part part, float value) { for (int k = part.count; k < LANES; ++k) v[k] = value; return v; }

template <class T> void terms_row(const CrossEntropyTerms& a, int64_t row) {
  const T* x = static_cast<const T*>(a.logits) + row * a.stride;
  float maximum = -HIGHEST, total = 0.f;
  for (int64_t start = 0; start < a.columns; start += BLOCK) {
    const int64_t n = a.columns - start < BLOCK ? a.columns - start : BLOCK;
    vf tops[SLOTS] = {splat(maximum), splat(maximum), splat(maximum), splat(maximum)}, sums[SLOTS] = {};
    each_vector(n, [&](int64_t i, auto part, int slot) DT_LAMBDA {
      tops[slot] = max(filled(load(x + start + i, part), part, -HIGHEST), tops[slot]);
    });
    const float top = largest(min(splat(HIGHEST), max(max(tops[0], tops[1]), max(tops[2], tops[3]))));
    if (top > maximum) total *= exp(splat(maximum - top))[0];
    maximum = top;
    each_vector(n, [&](int64_t i, auto part, int slot) DT_LAMBDA {
      sums[slot] += exp(filled(load(x + start + i, part), part, -__builtin_inff()) - maximum);
    });
    total += sum(sums);
  }
  a.maximum[row] = maximum;
  a.sum[row] = total;
  const int64_t at = a.labels[row] - a.first;
  a.target[row] = a.labels[row] != IGNORED && at >= 0 && at < a.columns ? to_float(x[at]) : 0.f;
}

template <class T> void backward_row(const CrossEntropyBackward& a, int64_t row) {
  const T* x = static_cast<const T*>(a.logits) + row * a.stride;
  T* dx = static_cast<T*>(a.dlogits) + row * a.out_stride;
  if (a.labels[row] == IGNORED) {
    __builtin_memset(dx, 0, sizeof(T) * a.columns);
    return;
  }
  const float lse = a.lse[row], hit = a.upstream[a.per_row ? row : 0], slope = hit * (1.f + 2.f * a.z_loss * lse);
  const int64_t at = a.labels[row] - a.first;
  const bool mine = at >= 0 && at < a.columns;
  const float target = mine ? to_float(x[at]) : 0.f;  // read first: dx may lie over x
  each_vector(a.columns, [&](int64_t i, auto part, int) DT_LAMBDA { store(dx + i, exp(load(x + i, part) - lse) * slope, part); });
  if (mine) dx[at] = from_float<T>(exp(splat(target - lse))[0] * slope - hit);
}

}  // namespace

void cross_entropy_terms(const CrossEntropyTerms& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto t) {
    for (int64_t row = begin; row < end; ++row) terms_row<decltype(t)>(a, row);
  });
}

void cross_entropy_backward(const CrossEntropyBackward& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto t) {
    for (int64_t row = begin; row < end; ++row) backward_row<decltype(t)>(a, row);
  });
}

}  // namespace dt::DT_ISA
