// int8 in blocks of neighbours, each with a float scale (ZeRO++, arXiv:2306.10209), and the largest elements of a row.
//
// Encoding: scale = largest magnitude of the block / 127, code = x / scale to the nearest, ties to even; a block of zeros has
// scale 0. A NaN or an infinity makes the scale so, and nothing of the block decodes to a finite number. An encoded row is the
// bytes of its ceil(n / block) scales, then its n codes, so scales may lie at any address.
//
// The largest: the `count` elements of the largest magnitude, of equals those that come first; NaN is the largest of all. Their
// places are in order. Magnitudes are ordered as the integers of their bits are, so a radix select over 11, 10 and 10 bits
// finds the smallest of them.
#pragma once
#include "../common/exact.h"
#include "../common/isa.h"

namespace dt {

constexpr float LEAST_STEP = 0x1p-126f;  // below it a quotient by 127 loses its digits
constexpr float TO_INTEGER = 12582912.f;  // 1.5 · 2^23: x + it has x, rounded to the nearest, in its last bits, for |x| < 2^22

struct Int8Rows {
  int64_t rows, columns, block, dtype;  // dtype: of the floats
};
DT_HD int64_t blocks_of(const Int8Rows& a) { return (a.columns + a.block - 1) / a.block; }
DT_HD int64_t coded_columns(const Int8Rows& a) { return 4 * blocks_of(a) + a.columns; }

// A row's selection: `threshold` is the smallest magnitude taken, and of those equal to it the first `equals` are taken.
struct Threshold {
  uint32_t bits;
  int64_t equals;
};
constexpr int RADIX_BINS = 2048;
constexpr int RADIX_SHIFT[3] = {20, 10, 0}, RADIX_BITS[3] = {11, 10, 10};

// CPU kernels. Blocks [begin, end) of all rows · blocks_of(a); and one row, from which what is taken is set to zero.
DT_CPU_KERNEL(int8_encode, const Int8Rows&, const void*, int8_t*, int64_t, int64_t)
DT_CPU_KERNEL(int8_decode, const Int8Rows&, const int8_t*, void*, bool, int64_t, int64_t)
DT_CPU_KERNEL(take_largest, uint32_t*, int64_t, int64_t, int32_t*, int32_t*)

}  // namespace dt

// CUDA launchers. `scratch` for dt_take_largest: dt_take_scratch(rows, columns) bytes.
extern "C" {
int dt_int8_encode(const void* x, int8_t* coded, int64_t rows, int64_t columns, int64_t block, int64_t dtype, void* stream);
int dt_int8_decode(const int8_t* coded, void* out, int64_t rows, int64_t columns, int64_t block, int64_t dtype, int64_t add,
                   void* stream);
int64_t dt_take_scratch(int64_t rows, int64_t columns);
int dt_take_largest(void* x, void* out, void* scratch, int64_t rows, int64_t columns, int64_t count, void* stream);
}
