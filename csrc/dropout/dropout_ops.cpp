#include "../common/tensor.h"
#include "dropout.h"

namespace dt {
namespace {

Tensor dropout_add(const Tensor& x_, const MaybeTensor& residual_, const Tensor& state, double p) {
  const DType dtype = dtype_of(x_, "dropout_add", "x");
  if (residual_) check_same(*residual_, x_, "dropout_add", "residual");
  STD_TORCH_CHECK(p >= 0.0 && p <= 1.0, "dropout_add: p=", p, " is a probability; set it from 0 to 1");
  STD_TORCH_CHECK(state.numel() == 2 && state.scalar_type() == ScalarType::Long && state.is_contiguous() &&
                      state.is_cuda() == x_.is_cuda(),
                  "dropout_add: the stream must be two int64 numbers, seed and offset, on the device of x");
  const Tensor x = dense(x_), y = torch::stable::empty_like(x);
  const MaybeTensor residual = dense(residual_);
  const int64_t n = x.numel();
  const int64_t* numbers = state.const_data_ptr<int64_t>();
#ifdef DT_CUDA
  if (x.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    check_launch(dt_dropout_add(x.const_data_ptr(), pointer(residual), y.mutable_data_ptr(), numbers, n, p, dtype, current_stream(x)),
                 "dropout_add");
    return y;
  }
#endif
  STD_TORCH_CHECK(numbers[1] >= 0, "dropout_add: offset=", numbers[1], " counts elements of the stream; set it to 0 or more");
  const Dropout a = dropout_of(x.const_data_ptr(), pointer(residual), y.mutable_data_ptr(), numbers, n, dtype, p);
  const auto kernel = DT_PICK(dropout_add);
  parallel_for(0, n, 16384, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dist_train, CPU, m) { m.impl("dropout_add", TORCH_BOX(&dropout_add)); }
#ifdef DT_CUDA
STABLE_TORCH_LIBRARY_IMPL(dist_train, CUDA, m) { m.impl("dropout_add", TORCH_BOX(&dropout_add)); }
#endif

}  // namespace dt
