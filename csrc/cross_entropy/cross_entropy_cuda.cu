#include "cross_entropy_kernels.cuh"

#include <algorithm>

namespace dt {
namespace {

unsigned threads_of(int64_t columns, int pack) {
  const int64_t wanted = (columns + pack - 1) / pack;
  return unsigned(std::min<int64_t>(CROSS_ENTROPY_THREADS, std::max<int64_t>(1, (wanted + WARP - 1) / WARP) * WARP));
}

}  // namespace
}  // namespace dt

using namespace dt;

int dt_cross_entropy_terms(const void* logits, const int64_t* labels, float* maximum, float* sum, float* target, int64_t rows,
                           int64_t columns, int64_t stride, int64_t first, int64_t dtype, void* stream) {
  if (rows == 0) return 0;
  const CrossEntropyTerms a{logits, labels, maximum, sum, target, rows, columns, stride, first, dtype};
  return with_dtype(dtype, [&](auto t) {
    const dim3 threads(threads_of(columns, PACK<decltype(t)>));
    return DT_LAUNCH((cross_entropy_terms_kernel<decltype(t)>), dim3(unsigned(rows)), threads, 0, stream, a);
  });
}

int dt_cross_entropy_finish(const int64_t* labels, const float* maximum, const float* sum, const float* target, float* lse,
                            float* objective, float* entropy, int64_t rows, int64_t columns, double z_loss, void* stream) {
  const CrossEntropyFinish a{labels, maximum, sum, target, lse, objective, entropy, rows, columns, float(z_loss)};
  return DT_LAUNCH((cross_entropy_finish_kernel), dim3(1), dim3(threads_of(rows, 1)), 0, stream, a);
}

int dt_cross_entropy_backward(const float* upstream, int64_t per_row, const void* logits, const int64_t* labels, const float* lse,
                              void* dlogits, int64_t rows, int64_t columns, int64_t stride, int64_t out_stride, int64_t first,
                              int64_t dtype, double z_loss, void* stream) {
  if (rows == 0 || columns == 0) return 0;
  const CrossEntropyBackward a{upstream, per_row != 0, logits, labels, lse, dlogits, rows, columns, stride, out_stride, first,
                               dtype, float(z_loss)};
  return with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    const auto launch = [&](auto kernel, int pack) {
      return DT_LAUNCH((kernel), dim3(unsigned(rows)), dim3(threads_of(columns, pack)), 0, stream, a);
    };
    const int64_t size = sizeof(t), gap = reinterpret_cast<intptr_t>(dlogits) - reinterpret_cast<intptr_t>(logits);
    const bool alike = gap % 16 == 0 && (rows == 1 || (out_stride - stride) * size % 16 == 0);  // rows begin alike, in and out
    return alike ? launch(&cross_entropy_backward_kernel<T, PACK<T>>, PACK<T>) : launch(&cross_entropy_backward_kernel<T, 1>, 1);
  });
}
