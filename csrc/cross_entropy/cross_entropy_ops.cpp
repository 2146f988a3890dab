#include <cmath>

#include "../common/rows.h"
#include "cross_entropy.h"

namespace dt {
namespace {

int64_t grain(int64_t columns) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, columns)); }

void check_labels(const Tensor& labels, const Rows& logits, const char* op) {
  STD_TORCH_CHECK(labels.scalar_type() == ScalarType::Long, op, ": labels must be int64");
  STD_TORCH_CHECK(labels.numel() == logits.rows, op, ": ", labels.numel(), " labels for ", logits.rows,
                  " rows of logits; there must be one for each");
}
Tensor floats(const Tensor& like, std::initializer_list<int64_t> shape) {
  return torch::stable::new_empty(like, shape, ScalarType::Float);
}

using Three = std::tuple<Tensor, Tensor, Tensor>;

Three terms(const Rows& logits, const Tensor& labels, int64_t first, const char* op) {
  const DType dtype = dtype_of(logits.tensor, op, "logits");
  const auto each = [&] { return floats(logits.tensor, {logits.rows}); };
  Tensor maximum = each(), sum = each(), target = each();
  if (logits.rows == 0) return {maximum, sum, target};
  const CrossEntropyTerms a{logits.tensor.const_data_ptr(), labels.const_data_ptr<int64_t>(), maximum.mutable_data_ptr<float>(),
                            sum.mutable_data_ptr<float>(), target.mutable_data_ptr<float>(), logits.rows, logits.columns,
                            logits.stride, first, dtype};
#ifdef DT_CUDA
  if (labels.is_cuda()) {
    check_launch(dt_cross_entropy_terms(a.logits, a.labels, a.maximum, a.sum, a.target, a.rows, a.columns, a.stride, first, dtype,
                                        current_stream(labels)), op);
    return {maximum, sum, target};
  }
#endif
  const auto kernel = DT_PICK(cross_entropy_terms);
  parallel_for(0, a.rows, grain(a.columns), [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
  return {maximum, sum, target};
}

Three cross_entropy_terms(const Tensor& logits_, const Tensor& labels_, int64_t first) {
  const Rows logits = as_rows(logits_);
  check_labels(labels_, logits, "cross_entropy_terms");
#ifdef DT_CUDA
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (logits_.is_cuda()) guard.emplace(logits_.get_device_index());
#endif
  return terms(logits, dense(labels_), first, "cross_entropy_terms");
}

Three cross_entropy(const Tensor& logits_, const Tensor& labels_, double z_loss) {
  constexpr const char* op = "cross_entropy";
  const Rows logits = as_rows(logits_);
  check_labels(labels_, logits, op);
  const Tensor labels = dense(labels_);
  const int64_t rows = logits.rows, columns = logits.columns, *label = labels.const_data_ptr<int64_t>();
  Tensor objective = floats(logits_, {}), entropy = floats(logits_, {}), lse = floats(logits_, {rows});
#ifdef DT_CUDA
  if (logits_.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(logits_.get_device_index());
    const auto [maximum, sum, target] = terms(logits, labels, 0, op);
    check_launch(dt_cross_entropy_finish(label, maximum.const_data_ptr<float>(), sum.const_data_ptr<float>(),
                                         target.const_data_ptr<float>(), lse.mutable_data_ptr<float>(),
                                         objective.mutable_data_ptr<float>(), entropy.mutable_data_ptr<float>(), rows, columns,
                                         z_loss, current_stream(labels)), op);
    return {objective, entropy, lse};
  }
#endif
  for (int64_t row = 0; row < rows; ++row)
    STD_TORCH_CHECK(label[row] == IGNORED || (label[row] >= 0 && label[row] < columns), op, ": label ", label[row],
                    " is out of bounds for a vocabulary of ", columns, "; tokens that do not count have the label ", IGNORED);
  const auto [maximum, sum, target] = terms(logits, labels, 0, op);
  const float *m = maximum.const_data_ptr<float>(), *s = sum.const_data_ptr<float>(), *t = target.const_data_ptr<float>();
  float* out = lse.mutable_data_ptr<float>();
  double total = 0., squares = 0.;
  for (int64_t row = 0; row < rows; ++row) {
    out[row] = m[row] + std::log(s[row]);
    if (label[row] == IGNORED) continue;
    total += out[row] - t[row];
    squares += double(out[row]) * out[row];
  }
  *entropy.mutable_data_ptr<float>() = float(total);
  *objective.mutable_data_ptr<float>() = z_loss != 0. ? float(total + z_loss * squares) : float(total);
  return {objective, entropy, lse};
}

void backward(const Tensor& upstream_, const Rows& logits, const Tensor& labels_, const Tensor& lse_, double z_loss,
              int64_t first, const Tensor& dlogits, int64_t out_stride, const char* op) {
  const DType dtype = dtype_of(logits.tensor, op, "logits");
  check_labels(labels_, logits, op);
  STD_TORCH_CHECK(lse_.numel() == logits.rows && lse_.scalar_type() == ScalarType::Float, op,
                  ": lse must have one float32 for each row of logits");
  STD_TORCH_CHECK((upstream_.numel() == 1 || upstream_.numel() == logits.rows) && upstream_.scalar_type() == ScalarType::Float,
                  op, ": upstream must have one float32, or one for each row of logits");
  if (logits.rows == 0) return;
  const Tensor upstream = dense(upstream_), labels = dense(labels_), lse = dense(lse_);
  const CrossEntropyBackward a{upstream.const_data_ptr<float>(), upstream.numel() > 1, logits.tensor.const_data_ptr(),
                               labels.const_data_ptr<int64_t>(), lse.const_data_ptr<float>(), dlogits.mutable_data_ptr(),
                               logits.rows, logits.columns, logits.stride, out_stride, first, dtype, float(z_loss)};
#ifdef DT_CUDA
  if (dlogits.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(dlogits.get_device_index());
    check_launch(dt_cross_entropy_backward(a.upstream, a.per_row, a.logits, a.labels, a.lse, a.dlogits, a.rows, a.columns,
                                           a.stride, out_stride, first, dtype, z_loss, current_stream(dlogits)), op);
    return;
  }
#endif
  const auto kernel = DT_PICK(cross_entropy_backward);
  parallel_for(0, a.rows, grain(a.columns), [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
}

Tensor cross_entropy_backward(const Tensor& upstream, const Tensor& logits_, const Tensor& labels, const Tensor& lse,
                              double z_loss, int64_t first) {
  const Rows logits = as_rows(logits_);
  Tensor dlogits = torch::stable::new_empty(logits_, logits_.sizes());
  backward(upstream, logits, labels, lse, z_loss, first, dlogits, logits.columns, "cross_entropy_backward");
  return dlogits;
}
void cross_entropy_backward_(const Tensor& upstream, const Tensor& logits, const Tensor& labels, const Tensor& lse, double z_loss,
                             int64_t first) {
  constexpr const char* op = "cross_entropy_backward_";
  STD_TORCH_CHECK(logits.is_contiguous(), op, ": logits that are overwritten must be contiguous");
  const Rows rows = as_rows(logits);
  backward(upstream, rows, labels, lse, z_loss, first, logits, rows.stride, op);
}

}  // namespace

#define DT_CROSS_ENTROPY_OPS(m)                                         \
  m.impl("cross_entropy", TORCH_BOX(&cross_entropy));                   \
  m.impl("cross_entropy_terms", TORCH_BOX(&cross_entropy_terms));       \
  m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward)); \
  m.impl("cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_));
STABLE_TORCH_LIBRARY_IMPL(dist_train, CPU, m) { DT_CROSS_ENTROPY_OPS(m) }
#ifdef DT_CUDA
STABLE_TORCH_LIBRARY_IMPL(dist_train, CUDA, m) { DT_CROSS_ENTROPY_OPS(m) }
#endif

}  // namespace dt
