#include "optim.h"

#include <type_traits>

#include "../common/simd.h"

namespace dt::DT_ISA {
namespace {

typedef int16_t vs __attribute__((vector_size(LANES * 2)));
typedef double vd __attribute__((vector_size(LANES * 8)));
#define DT_OUTLINE __attribute__((noinline))

struct Split {};  // as a master's type: bf16 and remainder
struct None {};   // as a copy's type

// The tensors of a run from one element on.
template <class P, class G, class C> struct Streams {
  using Upper = std::conditional_t<std::is_same_v<P, Split>, bf16, float>;
  Upper* master;
  int16_t* remainder;
  const G* grad;
  float *first, *second;
  C* copy;
};

DT_INLINE vf load_master(const float* p, const int16_t*) { return load(p, Whole()); }
DT_INLINE vf load_master(const bf16* p, const int16_t* remainder) {
  vs low;
  __builtin_memcpy(&low, remainder, sizeof low);
  return (vf)((vu)load(p, Whole()) + (vu)__builtin_convertvector(low, vi));
}
DT_INLINE void store_master(float* p, int16_t*, vf v) { store(p, v, Whole()); }
DT_INLINE void store_master(bf16* p, int16_t* remainder, vf v) {
  const vu bits = (vu)v, upper = (vu)((vi)(bits + 0x8000) >> 16);
  const vs high = __builtin_convertvector((vi)upper, vs), low = __builtin_convertvector((vi)(bits - (upper << 16)), vs);
  __builtin_memcpy(p, &high, sizeof high);
  __builtin_memcpy(remainder, &low, sizeof low);
}
DT_INLINE void store_copy(None*, vf) {}
template <class C> DT_INLINE void store_copy(C* p, vf v) { store(p, v, Whole()); }

// Vectors that a loop takes from one tensor before it turns to the next: reads of 256 bytes from each of four tensors in
// turn run half as fast again as reads of 32.
constexpr int BURST = 8, WIDTH = BURST * LANES;

// Calls `body` with [begin, end) in whole bursts: once for those in place, and once for the tail, padded in buffers. One and
// the same machine code does both, so an element's bits do not depend on where a run ends.
template <class P, class G, class C, class F> DT_INLINE void in_vectors(const OptimRun& run, int64_t begin, int64_t end, F body) {
  using S = Streams<P, G, C>;
  using Upper = typename S::Upper;
  const int64_t whole = (end - begin) / WIDTH * WIDTH;
  Upper* master = static_cast<Upper*>(run.master) + begin;
  const G* grad = static_cast<const G*>(run.grad) + begin;
  C* copy = static_cast<C*>(run.copy);
  const auto from = [&](auto* p) DT_LAMBDA { return p ? p + begin : p; };
  const S all{master, from(run.remainder), grad, from(run.first), from(run.second), from(copy)};
  if (whole) body(all, whole);
  const int rest = int(end - begin - whole);
  if (!rest) return;
  Upper upper[WIDTH] = {};
  int16_t remainder[WIDTH] = {};
  G gradient[WIDTH] = {};
  float first[WIDTH] = {}, second[WIDTH];
  C copied[WIDTH];
  for (int k = 0; k < WIDTH; ++k) second[k] = 1.f;  // keeps 0 / 0 out of LAMB's sums
  for (int k = 0; k < rest; ++k) {
    upper[k] = all.master[whole + k], gradient[k] = all.grad[whole + k];
    if (all.remainder) remainder[k] = all.remainder[whole + k];
    if (all.first) first[k] = all.first[whole + k];
    if (all.second) second[k] = all.second[whole + k];
  }
  body(S{upper, remainder, gradient, first, second, copied}, WIDTH);
  for (int k = 0; k < rest; ++k) {
    all.master[whole + k] = upper[k];
    if (all.remainder) all.remainder[whole + k] = remainder[k];
    if (all.first) all.first[whole + k] = first[k];
    if (all.second) all.second[whole + k] = second[k];
    if (all.copy) all.copy[whole + k] = copied[k];
  }
}

template <class F> DT_INLINE void burst(F f) {
#pragma GCC unroll 8
  for (int k = 0; k < BURST; ++k) f(k, k * LANES);
}

template <int64_t KIND, class S> DT_OUTLINE void update(const S s, int64_t n, const OptimFactors f) {
  for (int64_t i = 0; i < n; i += WIDTH) {
    vf p[BURST], g[BURST], m[BURST], v[BURST];
    burst([&](int k, int at) DT_LAMBDA { g[k] = load(s.grad + i + at, Whole()) * f.unscale; });
    if constexpr (KIND != ADAMW)
      burst([&](int k, int at) DT_LAMBDA {
        p[k] = load_master(s.master + i + at, s.remainder + i + at);
        g[k] = g[k] + f.decay * p[k];
      });
    if constexpr (KIND == ADAM || KIND == ADAMW) {
      burst([&](int k, int at) DT_LAMBDA {
        m[k] = load(s.first + i + at, Whole()), m[k] = m[k] + f.mix1 * (g[k] - m[k]);
      });
      burst([&](int k, int at) DT_LAMBDA { store(s.first + i + at, m[k], Whole()); });
      burst([&](int k, int at) DT_LAMBDA { v[k] = f.beta2 * load(s.second + i + at, Whole()) + f.mix2 * g[k] * g[k]; });
      burst([&](int k, int at) DT_LAMBDA { store(s.second + i + at, v[k], Whole()); });
      if constexpr (KIND == ADAMW)
        burst([&](int k, int at) DT_LAMBDA { p[k] = load_master(s.master + i + at, s.remainder + i + at) * f.keep; });
      burst([&](int k, int) DT_LAMBDA { p[k] = p[k] - f.rate * m[k] / (sqrt(v[k]) + f.floor); });
    } else if constexpr (KIND == MOMENTUM) {
      burst([&](int k, int at) DT_LAMBDA { m[k] = f.momentum * load(s.first + i + at, Whole()) + g[k]; });
      burst([&](int k, int at) DT_LAMBDA { store(s.first + i + at, m[k], Whole()), p[k] = p[k] - f.lr * m[k]; });
    } else {
      burst([&](int k, int) DT_LAMBDA { p[k] = p[k] - f.lr * g[k]; });
    }
    burst([&](int k, int at) DT_LAMBDA { store_master(s.master + i + at, s.remainder + i + at, p[k]); });
    burst([&](int k, int at) DT_LAMBDA { store_copy(s.copy + i + at, p[k]); });
  }
}

DT_INLINE vf lamb_direction(vf p, vf m, vf v, const OptimFactors& f) { return f.rate * m / (sqrt(v) + f.floor) + f.decay * p; }

DT_INLINE double sum_doubles(vd v) {
  double total = 0.0;
  for (int k = 0; k < LANES; ++k) total += v[k];
  return total;
}

template <class S> DT_OUTLINE void moments(const S s, int64_t n, const OptimFactors f, double* sums) {
  vd squares_p = {}, squares_u = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const vf p = load_master(s.master + i, s.remainder + i);
    vf m = load(s.first + i, Whole()), v = load(s.second + i, Whole());
    optim_moments(m, v, load(s.grad + i, Whole()) * f.unscale, f);
    store(s.first + i, m, Whole());
    store(s.second + i, v, Whole());
    const vd wide_p = __builtin_convertvector(p, vd), wide_u = __builtin_convertvector(lamb_direction(p, m, v, f), vd);
    squares_p += wide_p * wide_p;
    squares_u += wide_u * wide_u;
  }
  sums[0] += sum_doubles(squares_p);
  sums[1] += sum_doubles(squares_u);
}

template <class S> DT_OUTLINE void adapted_update(const S s, int64_t n, const OptimFactors f, float rate) {
  for (int64_t i = 0; i < n; i += LANES) {
    const vf p = load_master(s.master + i, s.remainder + i);
    const vf next = p - rate * lamb_direction(p, load(s.first + i, Whole()), load(s.second + i, Whole()), f);
    store_master(s.master + i, s.remainder + i, next);
    store_copy(s.copy + i, next);
  }
}

// Calls f(P*, G*, C*) with null pointers of the types that a run has.
template <class F> DT_INLINE void with_types(const OptimRun& run, const OptimOptions& o, F f) {
  const auto with_grad = [&](auto p, auto c) {
    o.grad_dtype == F32 ? f(p, (float*)0, c) : o.grad_dtype == BF16 ? f(p, (bf16*)0, c) : f(p, (f16*)0, c);
  };
  if (run.remainder) with_grad((Split*)0, (None*)0);
  else if (!run.copy) with_grad((float*)0, (None*)0);
  else o.copy_dtype == BF16 ? with_grad((float*)0, (bf16*)0) : with_grad((float*)0, (f16*)0);
}

template <class T> struct pointee;
template <class T> struct pointee<T*> { using type = T; };
#define DT_TYPES pointee<decltype(p)>::type, typename pointee<decltype(g)>::type, typename pointee<decltype(c)>::type

}  // namespace

void optim_update(const OptimRun& run, const OptimOptions& o, const OptimFactors& f, int64_t begin, int64_t end) {
  with_types(run, o, [&](auto p, auto g, auto c) {
    in_vectors<typename DT_TYPES>(run, begin, end, [&](const auto& s, int64_t n) {
      using S = std::remove_cv_t<std::remove_reference_t<decltype(s)>>;
      o.kind == ADAM       ? update<ADAM, S>(s, n, f)
      : o.kind == ADAMW    ? update<ADAMW, S>(s, n, f)
      : o.kind == MOMENTUM ? update<MOMENTUM, S>(s, n, f)
                           : update<SGD, S>(s, n, f);
    });
  });
}

void lamb_moments(const OptimRun& run, const OptimOptions& o, const OptimFactors& f, int64_t begin, int64_t end, double* sums) {
  with_types(run, o, [&](auto p, auto g, auto c) {
    in_vectors<typename DT_TYPES>(run, begin, end, [&](const auto& s, int64_t n) { moments(s, n, f, sums); });
  });
}

void lamb_update(const OptimRun& run, const OptimOptions& o, const OptimFactors& f, float rate, int64_t begin, int64_t end) {
  with_types(run, o, [&](auto p, auto g, auto c) {
    in_vectors<typename DT_TYPES>(run, begin, end, [&](const auto& s, int64_t n) { adapted_update(s, n, f, rate); });
  });
}

}  // namespace dt::DT_ISA
