#include "../common/tensor.h"
#include "quantise.h"

namespace dt {
namespace {

Int8Rows int8_rows(const Tensor& floats, int64_t block, const char* op) {
  STD_TORCH_CHECK(floats.dim() == 2 && block >= 1, op, ": the floats have ", floats.dim(), " dims and the block ", block,
                  " elements; give (rows, columns) and a block of at least 1");
  return {floats.size(0), floats.size(1), block, dtype_of(floats, op, "the tensor")};
}
int64_t grain(const Int8Rows& a) { return std::max<int64_t>(1, 16384 / a.block); }

Tensor int8_encode(const Tensor& x_, int64_t block) {
  const Int8Rows a = int8_rows(x_, block, "int8_encode");
  const Tensor x = dense(x_);
  const Tensor coded = torch::stable::new_empty(x, {a.rows, coded_columns(a)}, ScalarType::Char);
  int8_t* to = static_cast<int8_t*>(coded.mutable_data_ptr());
  const void* from = x.const_data_ptr();
#ifdef DT_CUDA
  if (x.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    check_launch(dt_int8_encode(from, to, a.rows, a.columns, block, a.dtype, current_stream(x)), "int8_encode");
    return coded;
  }
#endif
  const auto kernel = DT_PICK(int8_encode);
  parallel_for(0, a.rows * blocks_of(a), grain(a), [&](int64_t begin, int64_t end) { kernel(a, from, to, begin, end); });
  return coded;
}

void int8_decode_(const Tensor& coded_, const Tensor& out, int64_t block, bool add) {
  const Int8Rows a = int8_rows(out, block, "int8_decode_");
  STD_TORCH_CHECK(coded_.dim() == 2 && coded_.size(0) == a.rows && coded_.size(1) == coded_columns(a) &&
                      coded_.scalar_type() == ScalarType::Char && out.is_contiguous() && coded_.is_cuda() == out.is_cuda(),
                  "int8_decode_: give `coded` as int8_encode makes it of rows like `out`, int8 and (", a.rows, ", ", coded_columns(a),
                  "), and a contiguous `out`");
  const Tensor coded = dense(coded_);
  const int8_t* from = static_cast<const int8_t*>(coded.const_data_ptr());
  void* to = out.mutable_data_ptr();
#ifdef DT_CUDA
  if (out.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
    check_launch(dt_int8_decode(from, to, a.rows, a.columns, block, a.dtype, add, current_stream(out)), "int8_decode_");
    return;
  }
#endif
  const auto kernel = DT_PICK(int8_decode);
  parallel_for(0, a.rows * blocks_of(a), grain(a), [&](int64_t begin, int64_t end) { kernel(a, from, to, add, begin, end); });
}

Tensor take_largest_(const Tensor& x, int64_t count) {
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::Float && x.is_contiguous() && count >= 0 && count <= x.size(1) &&
                      x.size(1) < (int64_t(1) << 31),
                  "take_largest_: count=", count, ": give contiguous float32 (rows, columns) with at least so many columns, and ",
                  "fewer than 2^31");
  const int64_t rows = x.size(0), columns = x.size(1);
  const Tensor out = torch::stable::new_empty(x, {rows, 2, count}, ScalarType::Int);
  if (rows == 0 || count == 0) return out;
  uint32_t* from = static_cast<uint32_t*>(x.mutable_data_ptr());
  int32_t* to = out.mutable_data_ptr<int32_t>();
#ifdef DT_CUDA
  if (x.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const Tensor scratch = torch::stable::new_empty(x, {dt_take_scratch(rows, columns)}, ScalarType::Byte);
    check_launch(dt_take_largest(from, to, scratch.mutable_data_ptr(), rows, columns, count, current_stream(x)), "take_largest_");
    return out;
  }
#endif
  const auto kernel = DT_PICK(take_largest);
  parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      kernel(from + row * columns, columns, count, to + 2 * row * count, to + (2 * row + 1) * count);
  });
  return out;
}

}  // namespace

#define DT_QUANTISE_OPS(m)                         \
  m.impl("int8_encode", TORCH_BOX(&int8_encode));   \
  m.impl("int8_decode_", TORCH_BOX(&int8_decode_)); \
  m.impl("take_largest_", TORCH_BOX(&take_largest_));
STABLE_TORCH_LIBRARY_IMPL(dist_train, CPU, m) { DT_QUANTISE_OPS(m) }
#ifdef DT_CUDA
STABLE_TORCH_LIBRARY_IMPL(dist_train, CUDA, m) { DT_QUANTISE_OPS(m) }
#endif

}  // namespace dt
