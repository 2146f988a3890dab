// Passes over flat tensors: the sum of squares, and the sum of two tensors of different dtypes.
//
// Squares of float, bf16 and f16 are exact in double and cannot overflow there, so their sum is finite exactly when every
// element is: one number is both the norm and the flag. Sums are over chunks of REDUCE_CHUNK elements, then over the chunks
// in order, so the bits depend neither on threads nor, on the CPU, on the instruction set.
#pragma once
#include "../common/dtype.h"
#include "../common/isa.h"

namespace dt {

constexpr int64_t REDUCE_CHUNK = 1 << 15;

// CPU kernels: Σx² of n elements, at most a chunk; sum[i] += addend[i] for i < n, added in float.
DT_CPU_KERNEL(chunk_squares, const void*, int64_t, int64_t, double*)
DT_CPU_KERNEL(add_into, void*, int64_t, const void*, int64_t, int64_t)

}  // namespace dt

// CUDA launchers. dt_chunk_squares writes one double for each chunk of n elements, dt_sum_parts adds up `count` doubles.
extern "C" {
int dt_chunk_squares(const void* x, double* parts, int64_t n, int64_t dtype, void* stream);
int dt_sum_parts(const double* parts, double* out, int64_t count, void* stream);
int dt_add_into(void* sum, const void* addend, int64_t n, int64_t sum_dtype, int64_t addend_dtype, void* stream);
}
