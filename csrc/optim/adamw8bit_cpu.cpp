#include "adamw8bit.h"

#include "../common/simd.h"

namespace dt::DT_ISA {
namespace {

typedef int8_t vb __attribute__((vector_size(LANES)));
typedef uint8_t vub __attribute__((vector_size(LANES)));
constexpr float LEAST_SCALE = 0x1p-126f;

DT_INLINE vf decode(const int8_t* p, float scale) {
  vb codes;
  __builtin_memcpy(&codes, p, sizeof codes);
  const vi code = __builtin_convertvector(codes, vi), size = code < 0 ? -code : code;
  const vf unit = (vf)((size + CODE_BASE<SignedCode>) << SignedCode::SHIFT);
  return (vf)((vi)(code == 0 ? vf{} : unit) | (code & (vi{} + int32_t(0x80000000)))) * scale;
}
DT_INLINE vf decode(const uint8_t* p, float scale) {
  vub codes;
  __builtin_memcpy(&codes, p, sizeof codes);
  const vi code = __builtin_convertvector(codes, vi);
  return (code == 0 ? vf{} : (vf)((code + CODE_BASE<SquareCode>) << SquareCode::SHIFT)) * scale;
}

template <class K> DT_INLINE vi codes_of(vf unit, int32_t step) {
  const vu bits = (vu)unit;
  const vi dice = (vi)(((bits + uint32_t(step)) * uint32_t(CODE_HASH)) & ((1u << K::SHIFT) - 1));
  vi code = (((vi)(bits & 0x7fffffffu) + dice) >> K::SHIFT) - CODE_BASE<K>;
  code = code < K::LEAST ? vi{} + K::LEAST : code;
  return unit == 0.f ? vi{} : unit < 0.f ? -code : code;
}
template <class K, class B, class T> DT_INLINE void encode(const float* values, vf largest, T* codes, float* scale, int32_t step) {
  float most = LEAST_SCALE;
  for (int k = 0; k < LANES; ++k) most = largest[k] > most ? largest[k] : most;
  *scale = most;
  for (int i = 0; i < CODE_BLOCK; i += LANES) {
    const B code = __builtin_convertvector(codes_of<K>(load(values + i, Whole()) / most, step), B);
    __builtin_memcpy(codes + i, &code, sizeof code);
  }
}

template <class G, class C> void update(const Adam8bit& a, const OptimFactors& factors, int32_t step, int64_t block) {
  const OptimFactors f = factors;
  const int64_t start = block * CODE_BLOCK;
  float first[CODE_BLOCK], second[CODE_BLOCK];
  vf largest_m = {}, largest_v = {};
  const float first_scale = a.first_scales[block], second_scale = a.second_scales[block];
  for (int i = 0; i < CODE_BLOCK; i += LANES) {
    const int64_t at = start + i;
    vf m = decode(a.first + at, first_scale), v = decode(a.second + at, second_scale), p = load(a.master + at, Whole());
    optim_moments(m, v, load(static_cast<const G*>(a.grad) + at, Whole()) * f.unscale, f);
    p = p * f.keep;
    p = p - f.rate * m / (sqrt(v) + f.floor);
    store(a.master + at, p, Whole());
    if (a.copy) store(static_cast<C*>(a.copy) + at, p, Whole());
    store(first + i, m, Whole());
    store(second + i, v, Whole());
    largest_m = max((vf)((vi)m & 0x7fffffff), largest_m);
    largest_v = max(v, largest_v);
  }
  encode<SignedCode, vb>(first, largest_m, a.first + start, a.first_scales + block, step);
  encode<SquareCode, vub>(second, largest_v, a.second + start, a.second_scales + block, step);
}

}  // namespace

void adam8bit_update(const Adam8bit& a, const OptimFactors& f, int32_t step, int64_t grad_dtype, int64_t copy_dtype, int64_t begin,
                     int64_t end) {
  const auto with_copy = [&](auto g, auto c) {
    for (int64_t block = begin; block < end; ++block) update<decltype(g), decltype(c)>(a, f, step, block);
  };
  const auto with_grad = [&](auto g) { copy_dtype == BF16 ? with_copy(g, bf16()) : with_copy(g, f16()); };
  grad_dtype == F32 ? with_grad(float()) : grad_dtype == BF16 ? with_grad(bf16()) : with_grad(f16());
}

}  // namespace dt::DT_ISA
