// Every operator's schema, and what the library says about itself. The implementations register from <op>/<op>_ops.cpp.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>

#include "common/isa.h"

STABLE_TORCH_LIBRARY(dist_train, m) {
  // norm
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor y, Tensor sum, Tensor rstd)");
  m.def("rms_norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor weight, Tensor rstd, bool wants_dweight)"
        " -> (Tensor dx, Tensor dweight)");
  m.def("layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def("add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps)"
        " -> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)");
  m.def("layer_norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool wants_dweight,"
        " bool wants_dbias) -> (Tensor dx, Tensor dweight, Tensor dbias)");
  // activation
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor dgate, Tensor dup)");
  m.def("geglu(Tensor gate, Tensor up) -> Tensor");
  m.def("geglu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor dgate, Tensor dup)");
  m.def("gelu(Tensor x) -> Tensor");
  m.def("gelu_backward(Tensor dy, Tensor x) -> Tensor");
  // cross_entropy
  m.def("cross_entropy(Tensor logits, Tensor labels, float z_loss) -> (Tensor objective, Tensor entropy, Tensor lse)");
  m.def("cross_entropy_terms(Tensor logits, Tensor labels, int first) -> (Tensor maximum, Tensor sum, Tensor target)");
  m.def("cross_entropy_backward(Tensor upstream, Tensor logits, Tensor labels, Tensor lse, float z_loss, int first) -> Tensor");
  m.def("cross_entropy_backward_(Tensor upstream, Tensor(a!) logits, Tensor labels, Tensor lse, float z_loss, int first) -> ()");
  // rotary
  m.def("rotary(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor");
  m.def("rotary_pair(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse) -> (Tensor q_out, Tensor k_out)");
  m.def("rotary_(Tensor(a!) x, Tensor cos, Tensor sin, bool inverse) -> ()");
  // optim
  m.def("adam_(Tensor(a!)[] masters, Tensor(b!)[] remainders, Tensor[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs,"
        " Tensor(e!)[] copies, Tensor[] steps, Tensor grad_scale, Tensor found_inf, float lr, float beta1, float beta2, float eps,"
        " float[] weight_decays, bool decoupled) -> ()");
  m.def("lamb_(Tensor(a!)[] masters, Tensor(b!)[] remainders, Tensor[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs,"
        " Tensor(e!)[] copies, Tensor[] steps, Tensor grad_scale, Tensor found_inf, float lr, float beta1, float beta2, float eps,"
        " float[] weight_decays, int[] adapted) -> ()");
  m.def("sgd_(Tensor(a!)[] masters, Tensor(b!)[] remainders, Tensor[] grads, Tensor(c!)[] momenta, Tensor(d!)[] copies,"
        " Tensor grad_scale, Tensor found_inf, float lr, float momentum, float[] weight_decays) -> ()");
  m.def("adamw8bit_(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!) exp_avg_scale,"
        " Tensor(e!) exp_avg_sq_scale, Tensor(f!)? copy, Tensor step, Tensor grad_scale, Tensor found_inf, float lr, float beta1,"
        " float beta2, float eps, float weight_decay) -> ()");
  // reduce
  m.def("sum_of_squares(Tensor[] tensors) -> Tensor");
  m.def("accumulate_(Tensor(a!)[] sums, Tensor[] addends) -> ()");
  // quantise
  m.def("int8_encode(Tensor x, int block) -> Tensor");
  m.def("int8_decode_(Tensor coded, Tensor(a!) out, int block, bool add) -> ()");
  m.def("take_largest_(Tensor(a!) x, int count) -> Tensor");
  // dropout
  m.def("dropout_add(Tensor x, Tensor? residual, Tensor stream, float p) -> Tensor");
}

namespace dt {
namespace {
Isa best_isa() {
#if defined(__x86_64__)
  const auto has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const auto has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return has_avx512 && has_avx2 ? AVX512 : has_avx2 ? AVX2 : BASE;
#else
  return BASE;
#endif
}
std::atomic<Isa>& current() {
  static std::atomic<Isa> value = best_isa();
  return value;
}
}  // namespace
Isa isa() { return current().load(std::memory_order_relaxed); }
Isa limit_isa(int highest) { return current() = std::min(best_isa(), Isa(std::clamp<int>(highest, BASE, AVX512))); }
}  // namespace dt

// Called by dist_train/ops/library.py through ctypes.
extern "C" {
__attribute__((visibility("default"))) int dt_limit_isa(int highest) { return dt::limit_isa(highest); }
__attribute__((visibility("default"))) int dt_has_cuda() {
#ifdef DT_CUDA
  return 1;
#else
  return 0;
#endif
}
}
