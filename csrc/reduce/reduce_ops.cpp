#include "../common/tensor.h"
#include "reduce.h"

namespace dt {
namespace {

using Tensors = std::vector<Tensor>;

int64_t chunks_of(int64_t n) { return (n + REDUCE_CHUNK - 1) / REDUCE_CHUNK; }
size_t size_of(int64_t dtype) { return dtype == F32 ? 4 : 2; }

Tensor sum_of_squares(Tensors tensors) {
  STD_TORCH_CHECK(!tensors.empty(), "sum_of_squares: no tensors; give at least one, it may be empty");
  int64_t count = 0;
  for (Tensor& tensor : tensors) {
    dtype_of(tensor, "sum_of_squares", "a tensor");
    STD_TORCH_CHECK(tensor.is_cuda() == tensors[0].is_cuda(), "sum_of_squares: all tensors must be on one device");
    tensor = dense(tensor);
    count += chunks_of(tensor.numel());
  }
  const Tensor parts = torch::stable::new_empty(tensors[0], {count}, ScalarType::Double);
  const Tensor out = torch::stable::new_empty(tensors[0], {}, ScalarType::Double);
  double *part = parts.mutable_data_ptr<double>(), *total = out.mutable_data_ptr<double>();
#ifdef DT_CUDA
  if (out.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
    void* stream = current_stream(out);
    for (const Tensor& tensor : tensors) {
      check_launch(dt_chunk_squares(tensor.const_data_ptr(), part, tensor.numel(), dtype_of(tensor, "", ""), stream), "sum_of_squares");
      part += chunks_of(tensor.numel());
    }
    check_launch(dt_sum_parts(parts.const_data_ptr<double>(), total, count, stream), "sum_of_squares");
    return out;
  }
#endif
  const auto kernel = DT_PICK(chunk_squares);
  for (const Tensor& tensor : tensors) {
    const char* x = static_cast<const char*>(tensor.const_data_ptr());
    const DType dtype = dtype_of(tensor, "", "");
    const int64_t n = tensor.numel();
    parallel_for(0, chunks_of(n), 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t start = chunk * REDUCE_CHUNK;
        kernel(x + start * size_of(dtype), dtype, std::min(REDUCE_CHUNK, n - start), part + chunk);
      }
    });
    part += chunks_of(n);
  }
  *total = 0.0;
  for (int64_t i = 0; i < count; ++i) *total += parts.const_data_ptr<double>()[i];
  return out;
}

void accumulate_(Tensors sums, Tensors addends) {
  STD_TORCH_CHECK(sums.size() == addends.size(), "accumulate_: ", sums.size(), " sums and ", addends.size(), " addends; give as many");
  for (size_t at = 0; at < sums.size(); ++at) {
    const Tensor &sum = sums[at], addend = dense(addends[at]);
    const int64_t n = sum.numel(), to = dtype_of(sum, "accumulate_", "a sum"), from = dtype_of(addend, "accumulate_", "an addend");
    STD_TORCH_CHECK(addend.numel() == n && sum.is_contiguous() && addend.is_cuda() == sum.is_cuda(),
                    "accumulate_: an addend must lie beside its sum and have as many elements; sums must be contiguous");
#ifdef DT_CUDA
    if (sum.is_cuda()) {
      const torch::stable::accelerator::DeviceGuard guard(sum.get_device_index());
      check_launch(dt_add_into(sum.mutable_data_ptr(), addend.const_data_ptr(), n, to, from, current_stream(sum)), "accumulate_");
      continue;
    }
#endif
    char* s = static_cast<char*>(sum.mutable_data_ptr());
    const char* a = static_cast<const char*>(addend.const_data_ptr());
    const auto kernel = DT_PICK(add_into);
    parallel_for(0, chunks_of(n), 1, [&](int64_t begin, int64_t end) {
      const int64_t start = begin * REDUCE_CHUNK, stop = std::min(n, end * REDUCE_CHUNK);
      kernel(s + start * size_of(to), to, a + start * size_of(from), from, stop - start);
    });
  }
}

}  // namespace

#define DT_REDUCE_OPS(m)                               \
  m.impl("sum_of_squares", TORCH_BOX(&sum_of_squares)); \
  m.impl("accumulate_", TORCH_BOX(&accumulate_));
STABLE_TORCH_LIBRARY_IMPL(dist_train, CPU, m) { DT_REDUCE_OPS(m) }
#ifdef DT_CUDA
STABLE_TORCH_LIBRARY_IMPL(dist_train, CUDA, m) { DT_REDUCE_OPS(m) }
#endif

}  // namespace dt
