#include "rotary.h"

#include "../common/simd.h"

namespace dt::DT_ISA {
namespace {

template <class T> void turn(const Rotary& a, int64_t begin, int64_t end) {
  const int64_t half = a.half;
  for (int64_t at = begin; at < end; ++at) {
    const int64_t batch = at / a.tokens, token = at % a.tokens, row = batch * a.table_batch + token * 2 * half;
    const float *cos = a.cos + row, *sin = a.sin + row;
    const float *sin0 = a.inverse ? sin + half : sin, *sin1 = a.inverse ? sin : sin + half;
    for (int64_t which = 0; which < a.count; ++which) {
      const RotaryTensor& tensor = a.tensors[which];
      const T* x = static_cast<const T*>(tensor.x) + batch * tensor.x_batch + token * tensor.x_token;
      T* y = static_cast<T*>(tensor.y) + batch * tensor.y_batch + token * tensor.y_token;
      for (int64_t head = 0; head < tensor.heads; ++head, x += tensor.x_head, y += tensor.y_head)
        each_vector(half, [&](int64_t i, auto part, int) DT_LAMBDA {
          const vf first = load(x + i, part), second = load(x + half + i, part);
          store(y + i, first * load(cos + i, part) + second * load(sin0 + i, part), part);
          store(y + half + i, second * load(cos + half + i, part) + first * load(sin1 + i, part), part);
        });
    }
  }
}

}  // namespace

void rotary(const Rotary& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto t) { turn<decltype(t)>(a, begin, end); });
}

}  // namespace dt::DT_ISA
