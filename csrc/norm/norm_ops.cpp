#include "../common/tensor.h"
#include "norm.h"

namespace dt {
namespace {

int64_t columns_of(const Tensor& x, const Tensor& weight, const char* op) {
  STD_TORCH_CHECK(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1), op, ": weight has ", weight.numel(),
                  " elements; it must have one dim, as long as the last of x");
  return weight.size(0);
}
DType weight_dtype(const Tensor& x, const Tensor& weight, const char* op) {
  const DType dtype = dtype_of(weight, op, "weight");
  STD_TORCH_CHECK(dtype == F32 || dtype == dtype_of(x, op, "x"), op, ": weight must be float32 or have the dtype of x");
  return dtype;
}
int64_t rows_of(const Tensor& x, int64_t columns) { return columns ? x.numel() / columns : 0; }
// Enough rows for a thread to be worth waking.
int64_t grain(int64_t columns) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, columns)); }
// Parts of the sums over rows: their number depends on the shape alone, so the bits do not depend on the threads.
int64_t cpu_parts(int64_t rows) { return std::clamp<int64_t>(rows / 32, 1, 64); }

struct Forward {
  Tensor y, sum, mean, rstd;
};
Forward forward(const Tensor& x_, const MaybeTensor& residual_, const Tensor& weight_, const MaybeTensor& bias_, double eps,
                bool has_mean, const char* op) {
  const int64_t columns = columns_of(x_, weight_, op), rows = rows_of(x_, columns);
  const DType dtype = dtype_of(x_, op, "x"), wdtype = weight_dtype(x_, weight_, op);
  if (residual_) check_same(*residual_, x_, op, "residual");
  if (bias_) check_same(*bias_, weight_, op, "bias");
  const Tensor x = dense(x_), weight = dense(weight_);
  const MaybeTensor residual = dense(residual_), bias = dense(bias_);
  const auto floats = [&](bool wanted) { return torch::stable::new_empty(x, {wanted ? rows : 0}, ScalarType::Float); };
  Forward out{torch::stable::empty_like(x), residual ? torch::stable::empty_like(x) : x, floats(has_mean), floats(true)};
  void* sum = residual ? out.sum.mutable_data_ptr() : nullptr;
  float* mean = has_mean ? out.mean.mutable_data_ptr<float>() : nullptr;
  float* rstd = out.rstd.mutable_data_ptr<float>();
  if (rows == 0) return out;
#ifdef DT_CUDA
  if (x.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    check_launch(dt_norm_forward(x.const_data_ptr(), pointer(residual), weight.const_data_ptr(), pointer(bias),
                                 out.y.mutable_data_ptr(), sum, mean, rstd, rows, columns, eps, dtype, wdtype, current_stream(x)),
                 op);
    return out;
  }
#endif
  const NormForward a{x.const_data_ptr(), pointer(residual), weight.const_data_ptr(), pointer(bias), out.y.mutable_data_ptr(),
                      sum, mean, rstd, rows, int(columns), float(eps), dtype, wdtype};
  const auto kernel = DT_PICK(norm_forward);
  parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
  return out;
}

// Has no elements where a gradient is not wanted.
struct Backward {
  Tensor dx, dweight, dbias;
};
Backward backward(const Tensor& dy_, const MaybeTensor& dsum_, const Tensor& x_, const Tensor& weight_, const MaybeTensor& mean,
                  const Tensor& rstd, bool wants_dweight, bool wants_dbias, const char* op) {
  const int64_t columns = columns_of(x_, weight_, op), rows = rows_of(x_, columns);
  const DType dtype = dtype_of(x_, op, "x"), wdtype = weight_dtype(x_, weight_, op);
  check_same(dy_, x_, op, "dy");
  if (dsum_) check_same(*dsum_, x_, op, "dsum");
  STD_TORCH_CHECK(rstd.numel() == rows && rstd.is_contiguous() && rstd.scalar_type() == ScalarType::Float &&
                  (!mean || (mean->numel() == rows && mean->is_contiguous() && mean->scalar_type() == ScalarType::Float)),
                  op, ": mean and rstd must be what the forward op returned for this x");
  const Tensor dy = dense(dy_), x = dense(x_), weight = dense(weight_);
  const MaybeTensor dsum = dense(dsum_);
  const bool cuda = x.is_cuda();
  const auto like_weight = [&](bool wanted) { return torch::stable::new_empty(weight, {wanted ? columns : 0}); };
  Backward out{torch::stable::empty_like(x), like_weight(wants_dweight), like_weight(wants_dbias)};
  if (columns == 0) return out;
#ifdef DT_CUDA
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (cuda) guard.emplace(x.get_device_index());
  const int64_t parts = cuda ? dt_norm_blocks(rows, columns, dtype) : cpu_parts(rows);
#else
  const int64_t parts = cpu_parts(rows);
#endif
  const auto scratch = [&](bool wanted) { return torch::stable::new_empty(x, {wanted ? parts * columns : 0}, ScalarType::Float); };
  const Tensor dweight_parts = scratch(wants_dweight), dbias_parts = scratch(wants_dbias);
  float* dw = wants_dweight ? dweight_parts.mutable_data_ptr<float>() : nullptr;
  float* db = wants_dbias ? dbias_parts.mutable_data_ptr<float>() : nullptr;
  const float* means = mean ? mean->const_data_ptr<float>() : nullptr;
#ifdef DT_CUDA
  if (cuda) {
    check_launch(dt_norm_backward(dy.const_data_ptr(), pointer(dsum), x.const_data_ptr(), weight.const_data_ptr(), means,
                                  rstd.const_data_ptr<float>(), out.dx.mutable_data_ptr(), dw, db, out.dweight.mutable_data_ptr(),
                                  out.dbias.mutable_data_ptr(), parts, rows, columns, dtype, wdtype, current_stream(x)),
                 op);
    return out;
  }
#endif
  (void)cuda;
  const NormBackward a{dy.const_data_ptr(), pointer(dsum), x.const_data_ptr(), weight.const_data_ptr(), means,
                       rstd.const_data_ptr<float>(), out.dx.mutable_data_ptr(), dw, db, rows, int(columns), dtype, wdtype};
  const auto kernel = DT_PICK(norm_backward);
  parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) { kernel(a, parts, begin, end); });
  const auto sum_parts = DT_PICK(norm_sum_parts);
  const auto add = [&](const float* all, const Tensor& to) {
    void* out_data = to.mutable_data_ptr();
    parallel_for(0, columns, 4096, [&](int64_t begin, int64_t end) {
      sum_parts(all, out_data, wdtype, parts, columns, begin, end);
    });
  };
  if (dw) add(dw, out.dweight);
  if (db) add(db, out.dbias);
  return out;
}

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Two rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  Forward out = forward(x, std::nullopt, weight, std::nullopt, eps, false, "rms_norm");
  return {out.y, out.rstd};
}
Three add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  Forward out = forward(x, residual, weight, std::nullopt, eps, false, "add_rms_norm");
  return {out.y, out.sum, out.rstd};
}
Two rms_norm_backward(const Tensor& dy, const MaybeTensor& dsum, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                      bool wants_dweight) {
  Backward out = backward(dy, dsum, x, weight, std::nullopt, rstd, wants_dweight, false, "rms_norm_backward");
  return {out.dx, out.dweight};
}
Three layer_norm(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, double eps) {
  Forward out = forward(x, std::nullopt, weight, bias, eps, true, "layer_norm");
  return {out.y, out.mean, out.rstd};
}
Four add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const MaybeTensor& bias, double eps) {
  Forward out = forward(x, residual, weight, bias, eps, true, "add_layer_norm");
  return {out.y, out.sum, out.mean, out.rstd};
}
Three layer_norm_backward(const Tensor& dy, const MaybeTensor& dsum, const Tensor& x, const Tensor& weight, const Tensor& mean,
                          const Tensor& rstd, bool wants_dweight, bool wants_dbias) {
  Backward out = backward(dy, dsum, x, weight, mean, rstd, wants_dweight, wants_dbias, "layer_norm_backward");
  return {out.dx, out.dweight, out.dbias};
}

}  // namespace

#define DT_NORM_OPS(m)                                       \
  m.impl("rms_norm", TORCH_BOX(&rms_norm));                  \
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));          \
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward)); \
  m.impl("layer_norm", TORCH_BOX(&layer_norm));              \
  m.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));      \
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
STABLE_TORCH_LIBRARY_IMPL(dist_train, CPU, m) { DT_NORM_OPS(m) }
#ifdef DT_CUDA
STABLE_TORCH_LIBRARY_IMPL(dist_train, CUDA, m) { DT_NORM_OPS(m) }
#endif

}  // namespace dt
