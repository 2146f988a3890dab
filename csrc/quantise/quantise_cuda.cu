#include "quantise_kernels.cuh"

namespace dt {
namespace {

__global__ void take_begin_kernel(Take a) {
  for (int bin = threadIdx.x; bin < RADIX_BINS; bin += QUANTISE_THREADS) a.bins[int64_t(blockIdx.x) * RADIX_BINS + bin] = 0;
  if (threadIdx.x == 0) a.choices[blockIdx.x] = {0u, 0u, static_cast<long long>(a.count)};
}

dim3 int8_grid(const Int8Rows& a) { return dim3(unsigned((a.rows * blocks_of(a) + QUANTISE_WARPS - 1) / QUANTISE_WARPS)); }
int64_t take_chunks(int64_t columns) { return (columns + TAKE_CHUNK - 1) / TAKE_CHUNK; }

}  // namespace
}  // namespace dt

using namespace dt;

int dt_int8_encode(const void* x, int8_t* coded, int64_t rows, int64_t columns, int64_t block, int64_t dtype, void* stream) {
  if (rows == 0 || columns == 0) return 0;
  const Int8Rows a{rows, columns, block, dtype};
  return with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    return DT_LAUNCH((int8_encode_kernel<T>), int8_grid(a), dim3(QUANTISE_THREADS), 0, stream, a, static_cast<const T*>(x), coded);
  });
}

int dt_int8_decode(const int8_t* coded, void* out, int64_t rows, int64_t columns, int64_t block, int64_t dtype, int64_t add,
                   void* stream) {
  if (rows == 0 || columns == 0) return 0;
  const Int8Rows a{rows, columns, block, dtype};
  return with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    return DT_LAUNCH((int8_decode_kernel<T>), int8_grid(a), dim3(QUANTISE_THREADS), 0, stream, a, coded, static_cast<T*>(out), add != 0);
  });
}

int64_t dt_take_scratch(int64_t rows, int64_t columns) {
  return rows * int64_t(take_chunks(columns) * 2 * sizeof(long long) + sizeof(Choice) + RADIX_BINS * sizeof(unsigned));
}

int dt_take_largest(void* x, void* out, void* scratch, int64_t rows, int64_t columns, int64_t count, void* stream) {
  if (rows == 0 || count == 0) return 0;
  const int64_t chunks = take_chunks(columns);
  long long* tally = static_cast<long long*>(scratch);
  Choice* choices = reinterpret_cast<Choice*>(tally + rows * chunks * 2);
  const Take a{static_cast<unsigned*>(x), static_cast<int*>(out), reinterpret_cast<unsigned*>(choices + rows), choices, tally,
               columns, count, chunks};
  const dim3 by_row{unsigned(rows)}, by_chunk{unsigned(chunks), unsigned(rows)}, block{unsigned(QUANTISE_THREADS)};
  if (const int error = DT_LAUNCH((take_begin_kernel), by_row, block, 0, stream, a)) return error;
  for (int round = 0; round < 3; ++round) {
    const int shift = RADIX_SHIFT[round];
    const unsigned low = (1u << RADIX_BITS[round]) - 1;
    if (const int error = DT_LAUNCH((take_count_kernel), by_chunk, block, 0, stream, a, shift, low)) return error;
    if (const int error = DT_LAUNCH((take_choose_kernel), by_row, block, 0, stream, a, shift, low)) return error;
  }
  if (const int error = DT_LAUNCH((take_tally_kernel), by_chunk, block, 0, stream, a)) return error;
  if (const int error = DT_LAUNCH((take_offset_kernel), by_row, dim3(2), 0, stream, a)) return error;
  return DT_LAUNCH((take_write_kernel), by_chunk, block, 0, stream, a);
}
