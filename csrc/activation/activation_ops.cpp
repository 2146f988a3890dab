#include "../common/rows.h"
#include "activation.h"

namespace dt {
namespace {

constexpr int64_t GRAIN = 16384;  // elements worth waking a thread for

// x and up as the kernels take them: one long row where both are contiguous, else the rows of their last dim.
struct Inputs {
  Rows x, up;
  int64_t rows, columns;
  const void* up_data;
};
Inputs inputs(const Tensor& x_, const MaybeTensor& up_) {
  const int64_t n = x_.numel();
  if (n == 0) return {{x_, 0, 0, 0}, {x_, 0, 0, 0}, 0, 0, nullptr};
  if (x_.is_contiguous() && (!up_ || up_->is_contiguous()))
    return {{x_, 1, n, n}, {up_ ? *up_ : x_, 1, n, n}, 1, n, pointer(up_)};
  const Rows x = as_rows(x_), up = up_ ? as_rows(*up_) : x;
  return {x, up, x.rows, x.columns, up_ ? up.tensor.const_data_ptr() : nullptr};
}

Tensor forward(const Tensor& x_, const MaybeTensor& up_, Activation activation, const char* op) {
  const DType dtype = dtype_of(x_, op, "the input");
  if (up_) check_same(*up_, x_, op, "up");
  const Inputs in = inputs(x_, up_);
  Tensor y = torch::stable::new_empty(x_, x_.sizes());
  if (in.rows == 0) return y;
  const ActivationForward a{in.x.tensor.const_data_ptr(), in.up_data, y.mutable_data_ptr(), in.rows, in.columns, in.x.stride,
                            in.up.stride, dtype, activation};
#ifdef DT_CUDA
  if (x_.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(x_.get_device_index());
    check_launch(dt_activation_forward(a.x, a.up, a.y, a.rows, a.columns, a.x_stride, a.up_stride, dtype, activation,
                                       current_stream(x_)), op);
    return y;
  }
#endif
  const auto kernel = DT_PICK(activation_forward);
  parallel_for(0, in.rows * in.columns, GRAIN, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
  return y;
}

// The second has no elements where there is no up.
std::tuple<Tensor, Tensor> backward(const Tensor& dy_, const Tensor& x_, const MaybeTensor& up_, Activation activation,
                                    const char* op) {
  const DType dtype = dtype_of(x_, op, "the input");
  check_same(dy_, x_, op, "dy");
  if (up_) check_same(*up_, x_, op, "up");
  const Inputs in = inputs(x_, up_);
  const Tensor dy = dense(dy_);
  Tensor dx = torch::stable::new_empty(x_, x_.sizes());
  Tensor dup = up_ ? torch::stable::new_empty(x_, x_.sizes()) : torch::stable::new_empty(x_, {0});
  if (in.rows == 0) return {dx, dup};
  const ActivationBackward a{dy.const_data_ptr(), in.x.tensor.const_data_ptr(), in.up_data, dx.mutable_data_ptr(),
                             up_ ? dup.mutable_data_ptr() : nullptr, in.rows, in.columns, in.x.stride, in.up.stride, dtype,
                             activation};
#ifdef DT_CUDA
  if (x_.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(x_.get_device_index());
    check_launch(dt_activation_backward(a.dy, a.x, a.up, a.dx, a.dup, a.rows, a.columns, a.x_stride, a.up_stride, dtype,
                                        activation, current_stream(x_)), op);
    return {dx, dup};
  }
#endif
  const auto kernel = DT_PICK(activation_backward);
  parallel_for(0, in.rows * in.columns, GRAIN, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
  return {dx, dup};
}

Tensor swiglu(const Tensor& gate, const Tensor& up) { return forward(gate, up, SILU, "swiglu"); }
Tensor geglu(const Tensor& gate, const Tensor& up) { return forward(gate, up, GELU, "geglu"); }
Tensor gelu(const Tensor& x) { return forward(x, std::nullopt, GELU, "gelu"); }
std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& dy, const Tensor& gate, const Tensor& up) {
  return backward(dy, gate, up, SILU, "swiglu_backward");
}
std::tuple<Tensor, Tensor> geglu_backward(const Tensor& dy, const Tensor& gate, const Tensor& up) {
  return backward(dy, gate, up, GELU, "geglu_backward");
}
Tensor gelu_backward(const Tensor& dy, const Tensor& x) {
  return std::get<0>(backward(dy, x, std::nullopt, GELU, "gelu_backward"));
}

}  // namespace

#define DT_ACTIVATION_OPS(m)                             \
  m.impl("swiglu", TORCH_BOX(&swiglu));                   \
  m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward)); \
  m.impl("geglu", TORCH_BOX(&geglu));                     \
  m.impl("geglu_backward", TORCH_BOX(&geglu_backward));   \
  m.impl("gelu", TORCH_BOX(&gelu));                       \
  m.impl("gelu_backward", TORCH_BOX(&gelu_backward));
STABLE_TORCH_LIBRARY_IMPL(dist_train, CPU, m) { DT_ACTIVATION_OPS(m) }
#ifdef DT_CUDA
STABLE_TORCH_LIBRARY_IMPL(dist_train, CUDA, m) { DT_ACTIVATION_OPS(m) }
#endif

}  // namespace dt
