#include "../common/tensor.h"
#include "rotary.h"

namespace dt {
namespace {

// x, or a copy whose last dim is contiguous.
Tensor even_rows(const Tensor& x) {
  return x.dim() != 4 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
}

void turn(std::initializer_list<std::pair<Tensor, Tensor>> from_to, const Tensor& cos_, const Tensor& sin_, bool inverse,
          const char* op) {
  const Tensor& like = from_to.begin()->first;
  const DType dtype = dtype_of(like, op, "x");
  for (const auto& [x, y] : from_to)
    STD_TORCH_CHECK(x.dim() == 4 && x.size(3) % 2 == 0 && x.size(0) == like.size(0) && x.size(1) == like.size(1) &&
                    x.size(3) == like.size(3) && x.scalar_type() == like.scalar_type(), op,
                    ": each tensor must be batch × tokens × heads × an even width, all alike but for the heads");
  const int64_t batches = like.size(0), tokens = like.size(1), width = like.size(3);
  for (const Tensor& table : {cos_, sin_})
    STD_TORCH_CHECK(table.dim() == 4 && (table.size(0) == 1 || table.size(0) == batches) && table.size(0) == cos_.size(0) &&
                    table.size(1) == tokens && table.size(2) == 1 && table.size(3) == width &&
                    table.scalar_type() == ScalarType::Float, op,
                    ": cos and sin must be float32, 1 or batch × tokens × 1 × width");
  const Tensor cos = dense(cos_), sin = dense(sin_);
  Rotary a{{}, int64_t(from_to.size()), cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), batches, tokens, width / 2,
           cos.size(0) == 1 ? 0 : tokens * width, inverse, dtype};
  RotaryTensor* next = a.tensors;
  int64_t heads = 0;
  for (const auto& [x, y] : from_to) {
    *next++ = {x.const_data_ptr(), y.mutable_data_ptr(), x.size(2),   x.stride(0), x.stride(1),
               x.stride(2),        y.stride(0),          y.stride(1), y.stride(2)};
    heads += x.size(2);
  }
  if (batches * tokens * heads * width == 0) return;
#ifdef DT_CUDA
  if (like.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
    const RotaryTensor &p = a.tensors[0], &q = a.tensors[1];
    const int64_t strides[] = {p.x_batch, p.x_token, p.x_head, p.y_batch, p.y_token, p.y_head,
                               q.x_batch, q.x_token, q.x_head, q.y_batch, q.y_token, q.y_head};
    check_launch(dt_rotary(p.x, p.y, p.heads, q.x, q.y, q.heads, strides, a.cos, a.sin, batches, tokens, a.half, a.table_batch,
                           inverse, dtype, current_stream(like)), op);
    return;
  }
#endif
  const auto kernel = DT_PICK(rotary);
  const int64_t grain = std::max<int64_t>(1, 16384 / (heads * width));
  parallel_for(0, batches * tokens, grain, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool inverse) {
  Tensor y = torch::stable::new_empty(x, x.sizes());
  turn({{even_rows(x), y}}, cos, sin, inverse, "rotary");
  return y;
}
std::tuple<Tensor, Tensor> rotary_pair(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool inverse) {
  Tensor q_out = torch::stable::new_empty(q, q.sizes()), k_out = torch::stable::new_empty(k, k.sizes());
  turn({{even_rows(q), q_out}, {even_rows(k), k_out}}, cos, sin, inverse, "rotary_pair");
  return {q_out, k_out};
}
void rotary_(const Tensor& x, const Tensor& cos, const Tensor& sin, bool inverse) {
  STD_TORCH_CHECK(x.dim() == 4 && x.stride(3) == 1, "rotary_: the last dim of a tensor that is overwritten must be contiguous");
  turn({{x, x}}, cos, sin, inverse, "rotary_");
}

}  // namespace

#define DT_ROTARY_OPS(m)                          \
  m.impl("rotary", TORCH_BOX(&rotary));           \
  m.impl("rotary_pair", TORCH_BOX(&rotary_pair)); \
  m.impl("rotary_", TORCH_BOX(&rotary_));
STABLE_TORCH_LIBRARY_IMPL(dist_train, CPU, m) { DT_ROTARY_OPS(m) }
#ifdef DT_CUDA
STABLE_TORCH_LIBRARY_IMPL(dist_train, CUDA, m) { DT_ROTARY_OPS(m) }
#endif

}  // namespace dt
