// What every CUDA kernel uses: 16-byte loads and stores, the launch. With DT_SHIM the same source is compiled by g++ and
// runs on the CPU (tests/csrc/shim.h), so nothing here or in a kernel may need a CUDA header that is not named below.
#pragma once
#ifdef DT_SHIM
#include "shim.h"
#else
#include <cuda_runtime.h>
// Starts a kernel and yields its cudaError_t: DT_LAUNCH((kernel<float, 4>), grid, block, bytes of shared memory, stream, arguments...)
#define DT_LAUNCH(kernel, grid, block, shared, stream, ...) \
  ((kernel)<<<(grid), (block), (shared), static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__), static_cast<int>(cudaGetLastError()))
// The dynamic shared memory of the launch, as an array of floats.
#define DT_DYNAMIC_SHARED(name) extern __shared__ float name[]
#endif
#include "dtype.h"

namespace dt {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// N values that move in one instruction (N * sizeof(T) is 16 for the fast path, N is 1 for what is odd or unaligned).
template <class T, int N> struct alignas(sizeof(T) * N) Pack {
  T v[N];
};
template <class T> constexpr int PACK = 16 / int(sizeof(T));

template <int N, class T> __device__ __forceinline__ Pack<T, N> load_pack(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <int N, class T> __device__ __forceinline__ void store_pack(T* p, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(p) = pack;
}
// N floats from memory that holds T, or float where `is_float`: a norm's weight may be float beside bf16 activations.
template <int N, class T> __device__ __forceinline__ void load_floats(const void* p, bool is_float, int64_t i, float (&out)[N]) {
  constexpr int STEP = N * 4 > 16 ? 4 : N;
  if (is_float) {
#pragma unroll
    for (int k = 0; k < N; k += STEP) {
      const auto pack = load_pack<STEP>(static_cast<const float*>(p) + i + k);
#pragma unroll
      for (int j = 0; j < STEP; ++j) out[k + j] = pack.v[j];
    }
  } else {
    const auto pack = load_pack<N>(static_cast<const T*>(p) + i);
#pragma unroll
    for (int k = 0; k < N; ++k) out[k] = to_float(pack.v[k]);
  }
}

// May rows of `columns` elements of `size` bytes be read in 16-byte packs, from each of these addresses? Null is passed over.
template <class... P> DT_HD bool packable(int64_t columns, int64_t size, P... pointers) {
  return columns * size % 16 == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

inline int multiprocessors() {
#ifdef DT_SHIM
  return 2;
#else
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
#endif
}

}  // namespace dt
