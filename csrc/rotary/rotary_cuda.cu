#include "rotary_kernels.cuh"

#include <algorithm>

using namespace dt;

int dt_rotary(const void* x0, void* y0, int64_t heads0, const void* x1, void* y1, int64_t heads1, const int64_t* strides,
              const float* cos, const float* sin, int64_t batches, int64_t tokens, int64_t half, int64_t table_batch,
              int64_t inverse, int64_t dtype, void* stream) {
  const int64_t* s = strides;
  Rotary a{{{x0, y0, heads0, s[0], s[1], s[2], s[3], s[4], s[5]}, {}}, 1, cos, sin, batches, tokens, half, table_batch, inverse,
           dtype};
  if (x1) a.tensors[1] = {x1, y1, heads1, s[6], s[7], s[8], s[9], s[10], s[11]}, a.count = 2;
  const int64_t heads = heads0 + (x1 ? heads1 : 0), size = dtype == F32 ? 4 : 2;
  if (batches * tokens == 0 || heads == 0 || half == 0) return 0;
  bool packed = packable(half, size, cos, sin, x0, y0, x1, y1);
  for (int i = 0; i < (x1 ? 12 : 6); ++i) packed = packed && s[i] * size % 16 == 0;
  return with_dtype(dtype, [&](auto t) {
    const auto launch = [&](auto kernel, int pack) {
      const int64_t x = std::min<int64_t>(half / pack, ROTARY_THREADS);
      const int64_t y = std::min<int64_t>((heads + ROTARY_HEADS - 1) / ROTARY_HEADS, ROTARY_THREADS / x);
      const int64_t z = std::clamp<int64_t>(ROTARY_THREADS / (x * y), 1, 64);
      return DT_LAUNCH((kernel), dim3(unsigned((batches * tokens + z - 1) / z)), dim3(unsigned(x), unsigned(y), unsigned(z)), 0,
                       stream, a);
    };
    constexpr int N = PACK<decltype(t)>;
    return packed ? launch(&rotary_kernel<decltype(t), N>, N) : launch(&rotary_kernel<decltype(t), 1>, 1);
  });
}
