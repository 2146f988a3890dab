#include "dropout_kernels.cuh"

using namespace dt;

int dt_dropout_add(const void* x, const void* residual, void* y, const int64_t* stream_state, int64_t numel, double p, int64_t dtype,
                   void* stream) {
  if (numel == 0) return 0;
  const Dropout a = dropout_of(x, residual, y, stream_state, numel, dtype, p);
  const int64_t counters = numel / 4 + 2;  // the first and the last may lie in the tensor in part
  const dim3 grid(unsigned((counters + DROPOUT_THREADS - 1) / DROPOUT_THREADS)), block(DROPOUT_THREADS);
  const bool packed = packable(4, 4, x, residual, y);
  return with_dtype(dtype, [&](auto t) {
    return DT_LAUNCH((dropout_add_kernel<decltype(t)>), grid, block, 0, stream, a, packed);
  });
}
