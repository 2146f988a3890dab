// int8: a warp encodes or decodes one block of a row. The largest of a row: three rounds of histogram and choice, then each
// thread block counts what it will take, and writes it where the counts before it end, so that places are in order.
#pragma once
#include "../common/reduce.cuh"
#include "quantise.h"

namespace dt {

constexpr int QUANTISE_THREADS = 256;
constexpr int QUANTISE_WARPS = QUANTISE_THREADS / WARP;

template <class T> __global__ void __launch_bounds__(QUANTISE_THREADS) int8_encode_kernel(Int8Rows a, const T* x, int8_t* coded) {
  const int64_t at = int64_t(blockIdx.x) * QUANTISE_WARPS + threadIdx.x / WARP, blocks = blocks_of(a);
  if (at >= a.rows * blocks) return;
  const int64_t row = at / blocks, start = at % blocks * a.block, lane = threadIdx.x % WARP;
  const int64_t n = a.columns - start < a.block ? a.columns - start : a.block;
  const T* from = x + row * a.columns + start;
  int8_t* to = coded + row * coded_columns(a);
  unsigned largest = 0;
  for (int64_t i = lane; i < n; i += WARP) {
    const unsigned size = float_bits(to_float(from[i])) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  for (int step = WARP / 2; step > 0; step /= 2) {
    const unsigned other = __shfl_xor_sync(ALL_LANES, largest, step);
    largest = other > largest ? other : largest;
  }
  const float quotient = bits_float(largest) / 127.f, step = quotient < LEAST_STEP ? LEAST_STEP : quotient;
  const float scale = largest == 0 ? 0.f : step;
  if (lane < 4) to[4 * (at % blocks) + lane] = int8_t(float_bits(scale) >> (8 * lane));
  to += 4 * blocks + start;
  for (int64_t i = lane; i < n; i += WARP) {
    const float q = to_float(from[i]) / step;
    to[i] = q == q ? int8_t(float_bits(q + TO_INTEGER)) : int8_t(0);
  }
}

template <class T> __global__ void __launch_bounds__(QUANTISE_THREADS) int8_decode_kernel(Int8Rows a, const int8_t* coded, T* out, bool add) {
  const int64_t at = int64_t(blockIdx.x) * QUANTISE_WARPS + threadIdx.x / WARP, blocks = blocks_of(a);
  if (at >= a.rows * blocks) return;
  const int64_t row = at / blocks, start = at % blocks * a.block;
  const int64_t n = a.columns - start < a.block ? a.columns - start : a.block;
  const int8_t* from = coded + row * coded_columns(a);
  uint32_t bits = 0;
  for (int k = 0; k < 4; ++k) bits |= uint32_t(uint8_t(from[4 * (at % blocks) + k])) << (8 * k);
  from += 4 * blocks + start;
  T* to = out + row * a.columns + start;
  for (int64_t i = threadIdx.x % WARP; i < n; i += WARP) {
    const float value = exact_product(float(from[i]), bits_float(bits));
    to[i] = from_float<T>(add ? to_float(to[i]) + value : value);
  }
}

constexpr int64_t TAKE_CHUNK = 1 << 14;  // elements of a thread block

struct Choice {  // of a row, as far as the rounds have got
  unsigned prefix, mask;
  long long left;  // how many to find among the elements with this prefix
};
struct Take {
  unsigned* x;      // rows × columns
  int* out;         // rows × 2 × count: bits and places
  unsigned* bins;   // rows × RADIX_BINS, zero
  Choice* choices;  // one for each row
  long long* tally;  // rows × chunks × 2: how many are above the threshold, how many equal it; then, of all chunks before
  int64_t columns, count, chunks;
};

// blockIdx.x: chunk, blockIdx.y: row, here and below.
inline __global__ void __launch_bounds__(QUANTISE_THREADS) take_count_kernel(Take a, int shift, unsigned low) {
  __shared__ unsigned bins[RADIX_BINS];
  for (int bin = threadIdx.x; bin < RADIX_BINS; bin += QUANTISE_THREADS) bins[bin] = 0;
  __syncthreads();
  const Choice choice = a.choices[blockIdx.y];
  const int64_t begin = blockIdx.x * TAKE_CHUNK, end = begin + TAKE_CHUNK < a.columns ? begin + TAKE_CHUNK : a.columns;
  for (int64_t i = begin + threadIdx.x; i < end; i += QUANTISE_THREADS) {
    const unsigned size = a.x[blockIdx.y * a.columns + i] & 0x7fffffffu;
    if ((size & choice.mask) == choice.prefix) atomicAdd(&bins[size >> shift & low], 1u);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < RADIX_BINS; bin += QUANTISE_THREADS)
    if (bins[bin]) atomicAdd(&a.bins[int64_t(blockIdx.y) * RADIX_BINS + bin], bins[bin]);
}

// One thread block for each row (blockIdx.x). Thread 0 belongs to the highest bins.
inline __global__ void __launch_bounds__(QUANTISE_THREADS) take_choose_kernel(Take a, int shift, unsigned low) {
  constexpr int EACH = RADIX_BINS / QUANTISE_THREADS;
  __shared__ long long held[QUANTISE_THREADS];
  unsigned* bins = a.bins + int64_t(blockIdx.x) * RADIX_BINS;
  const int top = RADIX_BINS - 1 - threadIdx.x * EACH;
  unsigned mine[EACH];
  long long total = 0;
  for (int k = 0; k < EACH; ++k) total += mine[k] = bins[top - k], bins[top - k] = 0;
  held[threadIdx.x] = total;
  const Choice before = a.choices[blockIdx.x];
  __syncthreads();
  long long left = before.left;
  for (int thread = 0; thread < int(threadIdx.x); ++thread) left -= held[thread];
  if (left <= 0 || total < left) return;  // the last one to be taken is not among these bins
  int k = 0;
  for (; k < EACH - 1 && mine[k] < left; ++k) left -= mine[k];
  a.choices[blockIdx.x] = {before.prefix | unsigned(top - k) << shift, before.mask | low << shift, left};
}

inline __global__ void __launch_bounds__(QUANTISE_THREADS) take_tally_kernel(Take a) {
  __shared__ int parts[2][QUANTISE_WARPS];
  const unsigned threshold = a.choices[blockIdx.y].prefix;
  const int64_t begin = blockIdx.x * TAKE_CHUNK, end = begin + TAKE_CHUNK < a.columns ? begin + TAKE_CHUNK : a.columns;
  int counts[2] = {};
  for (int64_t i = begin + threadIdx.x; i < end; i += QUANTISE_THREADS) {
    const unsigned size = a.x[blockIdx.y * a.columns + i] & 0x7fffffffu;
    counts[0] += size > threshold, counts[1] += size == threshold;
  }
  for (int k = 0; k < 2; ++k) {
    for (int step = WARP / 2; step > 0; step /= 2) counts[k] += __shfl_xor_sync(ALL_LANES, counts[k], step);
    if (threadIdx.x % WARP == 0) parts[k][threadIdx.x / WARP] = counts[k];
  }
  __syncthreads();
  if (threadIdx.x >= 2) return;
  long long total = 0;
  for (int warp = 0; warp < QUANTISE_WARPS; ++warp) total += parts[threadIdx.x][warp];
  a.tally[(blockIdx.y * a.chunks + blockIdx.x) * 2 + threadIdx.x] = total;
}

// One thread for each row and kind of count: what lies in all chunks before each.
inline __global__ void take_offset_kernel(Take a) {
  long long before = 0;
  for (int64_t chunk = 0; chunk < a.chunks; ++chunk) {
    long long& at = a.tally[(blockIdx.x * a.chunks + chunk) * 2 + threadIdx.x];
    const long long here = at;
    at = before;
    before += here;
  }
}

inline __global__ void __launch_bounds__(QUANTISE_THREADS) take_write_kernel(Take a) {
  __shared__ int parts[2][2][QUANTISE_WARPS];  // above and equal, of each warp; in turns, so that one barrier is enough
  const Choice choice = a.choices[blockIdx.y];
  long long above = a.tally[(blockIdx.y * a.chunks + blockIdx.x) * 2], equal = a.tally[(blockIdx.y * a.chunks + blockIdx.x) * 2 + 1];
  const int64_t begin = blockIdx.x * TAKE_CHUNK, end = begin + TAKE_CHUNK < a.columns ? begin + TAKE_CHUNK : a.columns;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const unsigned below = (1u << lane) - 1;
  int turn = 0;
  for (int64_t start = begin; start < end; start += QUANTISE_THREADS, turn ^= 1) {
    const int64_t i = start + threadIdx.x;
    unsigned* x = a.x + blockIdx.y * a.columns + i;
    const unsigned value = i < end ? *x : 0, size = value & 0x7fffffffu;
    const bool is_above = i < end && size > choice.prefix, is_equal = i < end && size == choice.prefix;
    const unsigned votes[2] = {__ballot_sync(ALL_LANES, is_above), __ballot_sync(ALL_LANES, is_equal)};
    if (lane < 2) parts[turn][lane][warp] = __popc(votes[lane]);
    __syncthreads();
    long long mine[2] = {above + __popc(votes[0] & below), equal + __popc(votes[1] & below)};
    for (int w = 0; w < QUANTISE_WARPS; ++w) {
      if (w < warp) mine[0] += parts[turn][0][w], mine[1] += parts[turn][1][w];
      above += parts[turn][0][w], equal += parts[turn][1][w];
    }
    if (!is_above && !(is_equal && mine[1] < choice.left)) continue;
    const long long place = mine[0] + (mine[1] < choice.left ? mine[1] : choice.left);
    if (place >= a.count) continue;  // never, unless the counts are wrong
    int* out = a.out + 2 * blockIdx.y * a.count + place;
    out[0] = int(value);
    out[a.count] = int(i);
    *x = 0;
  }
}

}  // namespace dt
