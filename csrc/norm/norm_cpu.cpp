#include "norm.h"

#include "../common/simd.h"

namespace dt::DT_ISA {
namespace {

// A row stays in the first-level cache between the passes over it, so several passes cost little and the variance can be
// that of the centred values, which loses no digits when the mean is large.
template <class T, class W, bool MEAN> void forward_row(const NormForward& a, int64_t row) {
  const int64_t D = a.columns;
  const T* x = static_cast<const T*>(a.x) + row * D;
  const W *weight = static_cast<const W*>(a.weight), *bias = static_cast<const W*>(a.bias);
  T* y = static_cast<T*>(a.y) + row * D;
  const T* next = x + D;  // the next row is on its way while this one is written
  vf total[SLOTS] = {};
  const auto add = [&](int slot, vf h) DT_LAMBDA { total[slot] += MEAN ? h : h * h; };
  if (a.residual) {
    const T* residual = static_cast<const T*>(a.residual) + row * D;
    T* sum = static_cast<T*>(a.sum) + row * D;
    each_vector(D, [&](int64_t i, auto part, int slot) DT_LAMBDA {
      const vf h = rounded(load(x + i, part) + load(residual + i, part), sum);
      store(sum + i, h, part);
      add(slot, h);
    });
    x = sum;
  } else {
    each_vector(D, [&](int64_t i, auto part, int slot) DT_LAMBDA { add(slot, load(x + i, part)); });
  }
  float mean = 0.f, square = sum(total);
  if constexpr (MEAN) {
    mean = square / D;
    vf squares[SLOTS] = {};
    each_vector(D, [&](int64_t i, auto part, int slot) DT_LAMBDA {
      const vf h = keep(load(x + i, part) - mean, part);
      squares[slot] += h * h;
    });
    square = sum(squares);
    a.mean[row] = mean;
  }
  const float rstd = 1.f / __builtin_sqrtf(square / D + a.eps);
  a.rstd[row] = rstd;
  if (bias)
    each_vector(D, [&](int64_t i, auto part, int) DT_LAMBDA {
      prefetch(next + i);
      store(y + i, normal(load(x + i, part), mean, rstd) * load(weight + i, part) + load(bias + i, part), part);
    });
  else
    each_vector(D, [&](int64_t i, auto part, int) DT_LAMBDA {
      prefetch(next + i);
      store(y + i, normal(load(x + i, part), mean, rstd) * load(weight + i, part), part);
    });
}

template <class T, class W, bool MEAN> void backward_row(const NormBackward& a, int64_t row, float* dweight, float* dbias) {
  const int64_t D = a.columns;
  const T *x = static_cast<const T*>(a.x) + row * D, *dy = static_cast<const T*>(a.dy) + row * D;
  const T* dsum = a.dsum ? static_cast<const T*>(a.dsum) + row * D : nullptr;
  const W* weight = static_cast<const W*>(a.weight);
  T* dx = static_cast<T*>(a.dx) + row * D;
  const float mean = MEAN ? a.mean[row] : 0.f, rstd = a.rstd[row];
  vf gn[SLOTS] = {}, g[SLOTS] = {};
  each_vector(D, [&](int64_t i, auto part, int slot) DT_LAMBDA {
    const vf gi = load(dy + i, part) * load(weight + i, part);
    gn[slot] += gi * normal(load(x + i, part), mean, rstd);
    if (MEAN) g[slot] += gi;
  });
  const float mean_gn = sum(gn) / D, mean_g = MEAN ? sum(g) / D : 0.f;
  each_vector(D, [&](int64_t i, auto part, int) DT_LAMBDA {
    prefetch(x + D + i), prefetch(dy + D + i);
    const vf dyi = load(dy + i, part), n = normal(load(x + i, part), mean, rstd);
    vf d = norm_dx(dyi * load(weight + i, part), n, rstd, mean_gn, mean_g);
    if (dsum) d += load(dsum + i, part);
    store(dx + i, d, part);
    if (dweight) store(dweight + i, load(dweight + i, part) + dyi * n, part);
    if (dbias) store(dbias + i, load(dbias + i, part) + dyi, part);
  });
}

// Calls f(T(), W()) with the types that the arguments name.
template <class A, class F> void with_types(const A& a, F f) {
  with_dtype(a.dtype, [&](auto t) { a.weight_dtype == F32 ? f(t, float()) : f(t, t); });
}

}  // namespace

void norm_forward(const NormForward& a, int64_t begin, int64_t end) {
  with_types(a, [&](auto t, auto w) {
    for (int64_t row = begin; row < end; ++row)
      a.mean ? forward_row<decltype(t), decltype(w), true>(a, row) : forward_row<decltype(t), decltype(w), false>(a, row);
  });
}

void norm_backward(const NormBackward& a, int64_t parts, int64_t begin, int64_t end) {
  const auto zeroed = [&](float* all, int64_t part) {
    return all ? static_cast<float*>(__builtin_memset(all + part * a.columns, 0, sizeof(float) * a.columns)) : nullptr;
  };
  with_types(a, [&](auto t, auto w) {
    for (int64_t part = begin; part < end; ++part) {
      float *dweight = zeroed(a.dweight_parts, part), *dbias = zeroed(a.dbias_parts, part);
      for (int64_t row = a.rows * part / parts; row < a.rows * (part + 1) / parts; ++row)
        a.mean ? backward_row<decltype(t), decltype(w), true>(a, row, dweight, dbias)
               : backward_row<decltype(t), decltype(w), false>(a, row, dweight, dbias);
    }
  });
}

void norm_sum_parts(const float* all, void* out, int64_t dtype, int64_t parts, int64_t columns, int64_t begin, int64_t end) {
  with_dtype(dtype, [&](auto w) {
    auto* to = static_cast<decltype(w)*>(out);
    each_vector(end - begin, [&](int64_t i, auto part, int) DT_LAMBDA {
      vf total = {};
      for (int64_t p = 0; p < parts; ++p) total += load(all + p * columns + begin + i, part);
      store(to + begin + i, total, part);
    });
  });
}

}  // namespace dt::DT_ISA
