#include "norm_kernels.cuh"

#include <algorithm>

namespace dt {
namespace {

struct Shape {
  int threads, rows, held;  // blockDim, packs per thread; 0: the row is read again
};
// `packs` per row; 0: the row does not lie in whole packs. A warp for rows of up to 128, else a block with few packs each.
Shape shape(int64_t packs, int preferred) {
  if (packs > 0 && packs <= 4 * WARP) return {WARP, 4, packs <= WARP ? 1 : packs <= 2 * WARP ? 2 : 4};
  for (int held = preferred; held <= 4 && packs > 0; held *= 2)
    if (packs <= int64_t(held) * NORM_THREADS) return {int((packs + held * WARP - 1) / (held * WARP) * WARP), 1, held};
  return {NORM_THREADS, 1, 0};
}
constexpr int FORWARD_HELD = 2, BACKWARD_HELD = 1;
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls f(T(), number of held packs, elements in a pack, has a mean) with all four as types.
template <int V> using Int = std::integral_constant<int, V>;
template <class F> int with_kernel(int64_t dtype, bool packed, int held, bool mean, F f) {
  return with_dtype(dtype, [&](auto t) {
    constexpr int N = PACK<decltype(t)>;
    const auto pick = [&](auto has_mean) {
      if (!packed) return f(t, Int<1>(), Int<0>(), has_mean);
      return held == 1   ? f(t, Int<N>(), Int<1>(), has_mean)
             : held == 2 ? f(t, Int<N>(), Int<2>(), has_mean)
             : held == 4 ? f(t, Int<N>(), Int<4>(), has_mean)
                         : f(t, Int<N>(), Int<0>(), has_mean);
    };
    return mean ? pick(std::true_type()) : pick(std::false_type());
  });
}
int64_t size_of(int64_t dtype) { return dtype == F32 ? 4 : 2; }

// The shape of backward's blocks decides how many parts there are, before any address is known: it may not ask for alignment.
Shape backward_shape(int64_t columns, int64_t dtype) {
  const int64_t bytes = columns * size_of(dtype);
  return shape(bytes % 16 == 0 ? bytes / 16 : 0, BACKWARD_HELD);
}

}  // namespace
}  // namespace dt

using namespace dt;

int dt_norm_forward(const void* x, const void* residual, const void* weight, const void* bias, void* y, void* sum, float* mean,
                    float* rstd, int64_t rows, int64_t columns, double eps, int64_t dtype, int64_t weight_dtype, void* stream) {
  if (rows == 0 || columns == 0) return 0;
  const NormForward a{x, residual, weight, bias, y, sum, mean, rstd, rows, int(columns), float(eps), dtype, weight_dtype};
  const bool packed = packable(columns, size_of(dtype), x, residual, weight, bias, y, sum);
  const Shape s = shape(packed ? columns * size_of(dtype) / 16 : 0, FORWARD_HELD);
  return with_kernel(dtype, packed, s.held, mean, [&](auto t, auto n, auto held, auto has_mean) {
    return DT_LAUNCH((norm_forward_kernel<decltype(t), n(), held(), has_mean()>), dim3(unsigned(ceil_div(rows, s.rows))),
                     dim3(s.threads, s.rows), 0, stream, a);
  });
}

int64_t dt_norm_blocks(int64_t rows, int64_t columns, int64_t dtype) {
  const Shape s = backward_shape(columns, dtype);
  const int64_t resident = int64_t(multiprocessors()) * std::max(1, 2 * NORM_THREADS / (s.threads * s.rows));
  return std::clamp<int64_t>(ceil_div(rows, s.rows), 1, resident);
}

int dt_norm_backward(const void* dy, const void* dsum, const void* x, const void* weight, const float* mean, const float* rstd,
                     void* dx, float* dweight_parts, float* dbias_parts, void* dweight, void* dbias, int64_t blocks, int64_t rows,
                     int64_t columns, int64_t dtype, int64_t weight_dtype, void* stream) {
  if (columns == 0) return 0;
  const NormBackward a{dy, dsum, x, weight, mean, rstd, dx, dweight_parts, dbias_parts, rows, int(columns), dtype, weight_dtype};
  const bool packed = packable(columns, size_of(dtype), dy, dsum, x, weight, dx);
  const Shape s = packed ? backward_shape(columns, dtype) : Shape{NORM_THREADS, 1, 0};
  const size_t shared = s.rows > 1 && (dweight_parts || dbias_parts) ? sizeof(float) * s.rows * columns : 0;
  const int error = with_kernel(dtype, packed, s.held, mean, [&](auto t, auto n, auto held, auto has_mean) {
    return DT_LAUNCH((norm_backward_kernel<decltype(t), n(), held(), has_mean()>), dim3(unsigned(blocks)), dim3(s.threads, s.rows),
                     shared, stream, a);
  });
  if (error) return error;
  if (!dweight_parts && !dbias_parts) return 0;
  const NormSumParts sums{{dweight_parts ? dweight_parts : dbias_parts, dbias_parts}, {dweight_parts ? dweight : dbias, dbias},
                          blocks, int(columns), weight_dtype};
  return DT_LAUNCH((norm_sum_parts_kernel), dim3(unsigned(ceil_div(columns, WARP)), dweight_parts && dbias_parts ? 2 : 1),
                   dim3(WARP, NORM_SUM_ROWS), 0, stream, sums);
}
