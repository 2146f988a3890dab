#include <algorithm>
#include <type_traits>

#include "optim_kernels.cuh"

namespace dt {
namespace {

static_assert(sizeof(OptimBatch) <= 4096, "the arguments of a kernel");

template <OptimPass PASS> int launch(const OptimBatch& batch, bool split, void* stream) {
  return with_dtype(batch.options.grad_dtype, [&](auto grad) {
    const dim3 grid(batch.first[batch.count]), block(OPTIM_THREADS);
    using G = decltype(grad);
    return split ? DT_LAUNCH((optim_kernel<G, true, PASS>), grid, block, 0, stream, batch)
                 : DT_LAUNCH((optim_kernel<G, false, PASS>), grid, block, 0, stream, batch);
  });
}

}  // namespace
}  // namespace dt

using namespace dt;

int dt_optim_step(const void* table, int64_t count, const float* grad_scale, const float* found_inf, double* sums, double lr,
                  double beta1, double beta2, double eps, int64_t kind, int64_t split, int64_t grad_dtype, int64_t copy_dtype,
                  void* stream) {
  const OptimRun *run = static_cast<const OptimRun*>(table), *stop = run + count;
  while (run != stop) {
    OptimBatch batch{};
    batch.options = {lr, beta1, beta2, eps, kind, grad_dtype, copy_dtype};
    batch.grad_scale = grad_scale, batch.found_inf = found_inf, batch.sums = sums;
    for (; run != stop && batch.count < OPTIM_RUNS; ++run) {
      if (run->numel == 0) continue;
      batch.runs[batch.count] = *run;
      const int blocks = int((run->numel + OPTIM_CHUNK - 1) / OPTIM_CHUNK);
      batch.first[batch.count + 1] = batch.first[batch.count] + blocks;
      ++batch.count;
    }
    if (batch.count == 0) return 0;
    int error = kind == LAMB ? launch<LAMB_MOMENTS>(batch, split, stream) : launch<WHOLE_STEP>(batch, split, stream);
    if (!error && kind == LAMB) error = launch<LAMB_UPDATE>(batch, split, stream);
    if (error) return error;
  }
  return 0;
}
