#include "../common/tensor.h"
#include "optim.h"

namespace dt {
namespace {

using Tensors = std::vector<Tensor>;

void check_flat(const Tensor& tensor, const Tensor& master, ScalarType dtype, const char* op, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype && tensor.numel() == master.numel() && tensor.is_contiguous() &&
                      tensor.is_cuda() == master.is_cuda(),
                  op, ": ", name, " has ", tensor.numel(), " elements of dtype number ", int(tensor.scalar_type()),
                  "; each must be contiguous, as long as its master (", master.numel(), "), beside it, and of dtype number ", int(dtype));
}
void check_count(size_t found, size_t runs, bool optional, const char* op, const char* name) {
  STD_TORCH_CHECK(found == runs || (optional && found == 0), op, ": ", found, " ", name, " for ", runs, " masters; give one for each",
                  optional ? ", or none" : "");
}
const float* scalar(const Tensor& tensor, const Tensor& master, const char* op, const char* name) {
  STD_TORCH_CHECK(tensor.numel() == 1 && tensor.scalar_type() == ScalarType::Float && tensor.is_cuda() == master.is_cuda(), op, ": ",
                  name, " must be one float32 number beside the masters");
  return tensor.const_data_ptr<float>();
}

// Lists of tensors by run; those that a kind of optimizer has not are empty.
struct Lists {
  const Tensors &masters, &remainders, &grads, &first, &second, &copies, &steps;
  const std::vector<double>& decays;
  const std::vector<int64_t>& adapted;
};

std::vector<OptimRun> table(const Lists& lists, bool has_first, bool has_second, const char* op) {
  const size_t n = lists.masters.size();
  check_count(lists.remainders.size(), n, true, op, "remainders");
  check_count(lists.grads.size(), n, false, op, "grads");
  check_count(lists.first.size(), has_first ? n : 0, false, op, "first moments");
  check_count(lists.second.size(), has_second ? n : 0, false, op, "second moments");
  check_count(lists.copies.size(), n, true, op, "copies");
  check_count(lists.steps.size(), has_second ? n : 0, false, op, "steps");
  check_count(lists.decays.size(), n, false, op, "weight decays");
  const bool split = !lists.remainders.empty();
  STD_TORCH_CHECK(!split || lists.copies.empty(), op, ": split masters are their own copy; give no copies beside remainders");
  std::vector<OptimRun> runs;
  for (size_t at = 0; at < n; ++at) {
    const Tensor& master = lists.masters[at];
    check_flat(master, master, split ? ScalarType::BFloat16 : ScalarType::Float, op, "a master");
    dtype_of(lists.grads[at], op, "a gradient");
    check_flat(lists.grads[at], master, lists.grads[0].scalar_type(), op, "a gradient");
    OptimRun run{};
    run.master = master.mutable_data_ptr();
    run.grad = lists.grads[at].const_data_ptr();
    run.numel = master.numel();
    run.weight_decay = lists.decays[at];
    run.adapted = lists.adapted.empty() ? 0 : lists.adapted[at];
    if (split) {
      check_flat(lists.remainders[at], master, ScalarType::Short, op, "a remainder");
      run.remainder = static_cast<int16_t*>(lists.remainders[at].mutable_data_ptr());
    }
    if (has_first) {
      check_flat(lists.first[at], master, ScalarType::Float, op, "a first moment");
      run.first = lists.first[at].mutable_data_ptr<float>();
    }
    if (has_second) {
      check_flat(lists.second[at], master, ScalarType::Float, op, "a second moment");
      run.second = lists.second[at].mutable_data_ptr<float>();
      run.step = scalar(lists.steps[at], master, op, "a step");
    }
    if (!lists.copies.empty()) {
      const ScalarType type = lists.copies[0].scalar_type();
      STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half, op, ": copies are bfloat16 or float16");
      check_flat(lists.copies[at], master, type, op, "a copy");
      run.copy = lists.copies[at].mutable_data_ptr();
    }
    if (run.numel) runs.push_back(run);
  }
  return runs;
}

// Calls f(run, its number, begin, end) for the chunks of all runs, shared out over threads.
template <class F> void each_chunk(const std::vector<OptimRun>& runs, F f) {
  std::vector<int64_t> first{0};
  for (const OptimRun& run : runs) first.push_back(first.back() + (run.numel + OPTIM_CHUNK - 1) / OPTIM_CHUNK);
  parallel_for(0, first.back(), 1, [&](int64_t begin, int64_t end) {
    size_t at = std::upper_bound(first.begin(), first.end(), begin) - first.begin() - 1;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      while (chunk >= first[at + 1]) ++at;
      const int64_t start = (chunk - first[at]) * OPTIM_CHUNK;
      f(at, chunk, start, std::min(start + OPTIM_CHUNK, runs[at].numel));
    }
  });
}

void step_cpu(const std::vector<OptimRun>& runs, const OptimOptions& o, float grad_scale) {
  std::vector<OptimFactors> factors;
  for (const OptimRun& run : runs) factors.push_back(optim_factors(run, o, grad_scale));
  if (o.kind != LAMB) {
    const auto kernel = DT_PICK(optim_update);
    each_chunk(runs, [&](size_t at, int64_t, int64_t begin, int64_t end) { kernel(runs[at], o, factors[at], begin, end); });
    return;
  }
  int64_t chunks = 0;
  for (const OptimRun& run : runs) chunks += (run.numel + OPTIM_CHUNK - 1) / OPTIM_CHUNK;
  std::vector<double> sums(2 * chunks, 0.0);  // by chunk, so that their sum does not depend on threads
  const auto moments = DT_PICK(lamb_moments);
  each_chunk(runs, [&](size_t at, int64_t chunk, int64_t begin, int64_t end) {
    moments(runs[at], o, factors[at], begin, end, &sums[2 * chunk]);
  });
  std::vector<float> rates;
  int64_t chunk = 0;
  for (const OptimRun& run : runs) {
    double p = 0.0, u = 0.0;
    for (int64_t start = 0; start < run.numel; start += OPTIM_CHUNK, ++chunk) p += sums[2 * chunk], u += sums[2 * chunk + 1];
    const float ratio = run.adapted && p > 0 && u > 0 ? float(std::sqrt(p / u)) : 1.f;
    rates.push_back(float(o.lr) * ratio);
  }
  const auto update = DT_PICK(lamb_update);
  each_chunk(runs, [&](size_t at, int64_t, int64_t begin, int64_t end) {
    update(runs[at], o, factors[at], rates[at], begin, end);
  });
}

void step(const Lists& lists, const Tensor& grad_scale, const Tensor& found_inf, OptimOptions o, const char* op) {
  const auto runs = table(lists, o.kind != SGD, o.kind != SGD && o.kind != MOMENTUM, op);
  if (runs.empty()) return;
  const Tensor& master = lists.masters[0];
  const float *scale = scalar(grad_scale, master, op, "grad_scale"), *found = scalar(found_inf, master, op, "found_inf");
  o.grad_dtype = dtype_of(lists.grads[0], op, "a gradient");
  o.copy_dtype = lists.copies.empty() ? F32 : dtype_of(lists.copies[0], op, "a copy");
#ifdef DT_CUDA
  if (master.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(master.get_device_index());
    int64_t chunks = 0;
    for (const OptimRun& run : runs) chunks += (run.numel + OPTIM_CHUNK - 1) / OPTIM_CHUNK;
    const Tensor sums = torch::stable::new_empty(master, {o.kind == LAMB ? 2 * chunks : 0}, ScalarType::Double);
    check_launch(dt_optim_step(runs.data(), int64_t(runs.size()), scale, found, sums.mutable_data_ptr<double>(), o.lr, o.beta1,
                               o.beta2, o.eps, o.kind, !lists.remainders.empty(), o.grad_dtype, o.copy_dtype,
                               current_stream(master)),
                 op);
    return;
  }
#endif
  if (*found > 0.f) return;
  step_cpu(runs, o, *scale);
}

void adam_(Tensors masters, Tensors remainders, Tensors grads, Tensors first, Tensors second, Tensors copies, Tensors steps,
           const Tensor& grad_scale, const Tensor& found_inf, double lr, double beta1, double beta2, double eps,
           std::vector<double> decays, bool decoupled) {
  step({masters, remainders, grads, first, second, copies, steps, decays, {}}, grad_scale, found_inf,
       {lr, beta1, beta2, eps, decoupled ? ADAMW : ADAM, F32, F32}, "adam_");
}
void lamb_(Tensors masters, Tensors remainders, Tensors grads, Tensors first, Tensors second, Tensors copies, Tensors steps,
           const Tensor& grad_scale, const Tensor& found_inf, double lr, double beta1, double beta2, double eps,
           std::vector<double> decays, std::vector<int64_t> adapted) {
  check_count(adapted.size(), masters.size(), false, "lamb_", "adapted");
  step({masters, remainders, grads, first, second, copies, steps, decays, adapted}, grad_scale, found_inf,
       {lr, beta1, beta2, eps, LAMB, F32, F32}, "lamb_");
}
void sgd_(Tensors masters, Tensors remainders, Tensors grads, Tensors momenta, Tensors copies, const Tensor& grad_scale,
          const Tensor& found_inf, double lr, double momentum, std::vector<double> decays) {
  step({masters, remainders, grads, momenta, {}, copies, {}, decays, {}}, grad_scale, found_inf,
       {lr, momentum, 0.0, 0.0, momenta.empty() ? SGD : MOMENTUM, F32, F32}, "sgd_");
}

}  // namespace

#define DT_OPTIM_OPS(m)              \
  m.impl("adam_", TORCH_BOX(&adam_)); \
  m.impl("lamb_", TORCH_BOX(&lamb_)); \
  m.impl("sgd_", TORCH_BOX(&sgd_));
STABLE_TORCH_LIBRARY_IMPL(dist_train, CPU, m) { DT_OPTIM_OPS(m) }
#ifdef DT_CUDA
STABLE_TORCH_LIBRARY_IMPL(dist_train, CUDA, m) { DT_OPTIM_OPS(m) }
#endif

}  // namespace dt
