#include "../common/tensor.h"
#include "adamw8bit.h"

namespace dt {
namespace {

void check(bool holds, const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(holds && tensor.is_contiguous(), "adamw8bit_: ", name, " has ", tensor.numel(), " elements of dtype number ",
                  int(tensor.scalar_type()), "; master and moments must be contiguous: n float32, n int8, n uint8 and n / 256 ",
                  "float32 scales for a multiple n of 256, the gradient and the copy n elements of a float dtype");
}

void adamw8bit_(const Tensor& master, const Tensor& grad, const Tensor& first, const Tensor& second, const Tensor& first_scales,
                const Tensor& second_scales, const MaybeTensor& copy, const Tensor& step, const Tensor& grad_scale,
                const Tensor& found_inf, double lr, double beta1, double beta2, double eps, double decay) {
  const int64_t n = master.numel();
  check(n % CODE_BLOCK == 0 && master.scalar_type() == ScalarType::Float, master, "the master");
  check(grad.numel() == n, grad, "the gradient");
  check(first.numel() == n && first.scalar_type() == ScalarType::Char, first, "exp_avg");
  check(second.numel() == n && second.scalar_type() == ScalarType::Byte, second, "exp_avg_sq");
  for (const Tensor* scales : {&first_scales, &second_scales})
    check(scales->numel() == n / CODE_BLOCK && scales->scalar_type() == ScalarType::Float, *scales, "the scales");
  if (copy) check(copy->numel() == n && copy->scalar_type() != ScalarType::Float, *copy, "the copy");
  for (const Tensor* scalar : {&step, &grad_scale, &found_inf})
    check(scalar->numel() == 1 && scalar->scalar_type() == ScalarType::Float, *scalar, "a scalar, which is one float32 number,");
  for (const Tensor* tensor : {&grad, &first, &second, &first_scales, &second_scales, &step, &grad_scale, &found_inf})
    STD_TORCH_CHECK(tensor->is_cuda() == master.is_cuda(), "adamw8bit_: all tensors must be on the master's device");
  const int64_t grad_dtype = dtype_of(grad, "adamw8bit_", "the gradient");
  const int64_t copy_dtype = copy ? dtype_of(*copy, "adamw8bit_", "the copy") : BF16;
  const Adam8bit a{master.mutable_data_ptr<float>(), grad.const_data_ptr(), static_cast<int8_t*>(first.mutable_data_ptr()),
                   static_cast<uint8_t*>(second.mutable_data_ptr()), first_scales.mutable_data_ptr<float>(),
                   second_scales.mutable_data_ptr<float>(), copy ? copy->mutable_data_ptr() : nullptr, n};
  const float *count = step.const_data_ptr<float>(), *scale = grad_scale.const_data_ptr<float>();
  const float* found = found_inf.const_data_ptr<float>();
  if (n == 0) return;
#ifdef DT_CUDA
  if (master.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(master.get_device_index());
    check_launch(dt_adam8bit_step(a.master, a.grad, a.first, a.second, a.first_scales, a.second_scales, a.copy, count, scale, found,
                                  n, lr, beta1, beta2, eps, decay, grad_dtype, copy_dtype, current_stream(master)),
                 "adamw8bit_");
    return;
  }
#endif
  if (*found > 0.f) return;
  const OptimFactors factors = adam8bit_factors(count, lr, beta1, beta2, eps, decay, *scale);
  const auto kernel = DT_PICK(adam8bit_update);
  parallel_for(0, n / CODE_BLOCK, 32, [&](int64_t begin, int64_t end) {
    kernel(a, factors, int32_t(*count), grad_dtype, copy_dtype, begin, end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dist_train, CPU, m) { m.impl("adamw8bit_", TORCH_BOX(&adamw8bit_)); }
#ifdef DT_CUDA
STABLE_TORCH_LIBRARY_IMPL(dist_train, CUDA, m) { m.impl("adamw8bit_", TORCH_BOX(&adamw8bit_)); }
#endif

}  // namespace dt
