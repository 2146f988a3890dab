#include <algorithm>

#include "adamw8bit_kernels.cuh"

using namespace dt;

int dt_adam8bit_step(float* master, const void* grad, int8_t* first, uint8_t* second, float* first_scales, float* second_scales,
                     void* copy, const float* step, const float* grad_scale, const float* found_inf, int64_t numel, double lr,
                     double beta1, double beta2, double eps, double decay, int64_t grad_dtype, int64_t copy_dtype, void* stream) {
  if (numel == 0) return 0;
  if (!packable(4, 4, master, grad, first, second, copy)) return 716;  // cudaErrorMisalignedAddress
  const Adam8bitLaunch l{{master, grad, first, second, first_scales, second_scales, copy, numel},
                         step, grad_scale, found_inf, lr, beta1, beta2, eps, decay};
  const int64_t warps = ADAM8_THREADS / WARP, blocks = (numel / CODE_BLOCK + warps - 1) / warps;
  const dim3 grid(unsigned(std::min<int64_t>(blocks, 16 * multiprocessors()))), block(ADAM8_THREADS);
  return with_dtype(grad_dtype, [&](auto g) {
    using G = decltype(g);
    return copy_dtype == BF16 ? DT_LAUNCH((adam8bit_kernel<G, bf16>), grid, block, 0, stream, l)
                              : DT_LAUNCH((adam8bit_kernel<G, f16>), grid, block, 0, stream, l);
  });
}
