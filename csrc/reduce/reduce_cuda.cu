#include <type_traits>

#include "reduce_kernels.cuh"

using namespace dt;

int dt_chunk_squares(const void* x, double* parts, int64_t n, int64_t dtype, void* stream) {
  if (n == 0) return 0;
  return with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    const dim3 grid(unsigned((n + REDUCE_CHUNK - 1) / REDUCE_CHUNK)), block(REDUCE_THREADS);
    const T* from = static_cast<const T*>(x);
    return packable(PACK<T>, sizeof(T), x) ? DT_LAUNCH((squares_kernel<T, PACK<T>>), grid, block, 0, stream, from, parts, n)
                                           : DT_LAUNCH((squares_kernel<T, 1>), grid, block, 0, stream, from, parts, n);
  });
}

int dt_sum_parts(const double* parts, double* out, int64_t count, void* stream) {
  return DT_LAUNCH((sum_parts_kernel), dim3(1), dim3(REDUCE_THREADS), 0, stream, parts, out, count);
}

int dt_add_into(void* sum, const void* addend, int64_t n, int64_t sum_dtype, int64_t addend_dtype, void* stream) {
  if (n == 0) return 0;
  return with_dtype(sum_dtype, [&](auto s) {
    return with_dtype(addend_dtype, [&](auto a) {
      using S = decltype(s);
      using A = decltype(a);
      const auto launch = [&](auto elements) {
        constexpr int N = elements();
        const dim3 grid(unsigned((n + REDUCE_THREADS * N - 1) / (REDUCE_THREADS * N))), block(REDUCE_THREADS);
        return DT_LAUNCH((add_into_kernel<S, A, N>), grid, block, 0, stream, static_cast<S*>(sum), static_cast<const A*>(addend), n);
      };
      return packable(4, 4, sum, addend) ? launch(std::integral_constant<int, 4>()) : launch(std::integral_constant<int, 1>());
    });
  });
}
