// Runs CUDA kernels on the CPU (x86-64): g++ compiles the kernels' own source against this header instead of the CUDA
// runtime. One block runs at a time; each of its threads is a fiber with a stack of its own.
//
// Every warp runs alone until all its lanes wait at __syncthreads or have exited, in an order that `dt_shim_order` sets.
// That is the most skewed schedule the programming model allows, so a missing barrier shows as a wrong result. Barriers
// that not all threads reach, warp operations whose lanes disagree, and shuffles from lanes outside the mask are errors:
// the launch returns LAUNCH_FAILURE. Overruns of any memory, shared memory included, show with -fsanitize=address.
//
// It does not see: weak memory order, races between blocks, limits of registers and shared memory, speed.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define SHIM_ASAN(...) __VA_ARGS__
#else
#define SHIM_ASAN(...)
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define DT_LAUNCH(kernel, grid, block, shared, stream, ...) \
  ((void)(stream), shim::launch(grid, block, shared, [=] { (kernel)(__VA_ARGS__); }))
#define DT_DYNAMIC_SHARED(name) float* name = shim::dynamic_shared()

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

extern "C" void shim_switch(void** save, void* load);
asm(R"(.text
.weak shim_switch
.type shim_switch,@function
shim_switch:
 pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
 movq %rsp,(%rdi); movq %rsi,%rsp
 popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
 ret
.size shim_switch,.-shim_switch
)");

namespace shim {

constexpr int LAUNCH_FAILURE = 719;  // cudaErrorLaunchFailure
constexpr size_t STACK = 32 << 10;
constexpr unsigned MOST_THREADS = 1024;
constexpr size_t MOST_SHARED = 227 << 10;  // of a block on sm_90

enum State { RUNS, AT_BARRIER, AT_WARP_BARRIER, SHUFFLES, VOTES, DONE };
struct Fiber {
  void *sp, *fake_stack;
  char* stack;
  uint3 index;
  State state;
  unsigned mask;        // lanes that take part in the warp operation waited for
  int source;           // lane to read in a shuffle
  uint64_t give, take;  // operand and result of a warp operation
};
struct Block {
  std::vector<Fiber> fibers;
  int current;
  void *sp, *fake_stack;  // of the scheduler
  const void* stack_bottom;
  size_t stack_size;
  void (*entry)(void*);
  void* body;
  std::vector<float> shared;
  const char* error;
};
inline Block* block;
inline int order;  // 0: warps and lanes as numbered, 1: backwards, more: warps shuffled with this seed

inline float* dynamic_shared() { return block->shared.data(); }
inline int lane() { return block->current % 32; }

inline void to_scheduler(bool last = false) {
  Fiber& fiber = block->fibers[block->current];
  (void)last;
  SHIM_ASAN(__sanitizer_start_switch_fiber(last ? nullptr : &fiber.fake_stack, block->stack_bottom, block->stack_size);)
  shim_switch(&fiber.sp, block->sp);
  SHIM_ASAN(__sanitizer_finish_switch_fiber(fiber.fake_stack, &block->stack_bottom, &block->stack_size);)
}
inline void start() {
  SHIM_ASAN(__sanitizer_finish_switch_fiber(nullptr, &block->stack_bottom, &block->stack_size);)
  block->entry(block->body);
  block->fibers[block->current].state = DONE;
  to_scheduler(true);
}
inline void resume(int i) {
  Fiber& fiber = block->fibers[i];
  block->current = i;
  threadIdx = fiber.index;
  SHIM_ASAN(__sanitizer_start_switch_fiber(&block->fake_stack, fiber.stack, STACK);)
  shim_switch(&block->sp, fiber.sp);
  SHIM_ASAN(__sanitizer_finish_switch_fiber(block->fake_stack, nullptr, nullptr);)
}
inline uint64_t wait(State state, unsigned mask = 0, uint64_t give = 0, int source = 0) {
  Fiber& fiber = block->fibers[block->current];
  fiber.state = state, fiber.mask = mask, fiber.give = give, fiber.source = source;
  to_scheduler();
  return block->fibers[block->current].take;
}

// Completes the warp operations of lanes [begin, end) at which all lanes of the mask have arrived.
inline bool release_warp(int begin, int end) {
  bool any = false;
  const auto in = [](unsigned mask, int lane) { return mask >> lane & 1; };
  for (int i = begin; i < end; ++i) {
    const Fiber fiber = block->fibers[i];
    if (fiber.state != AT_WARP_BARRIER && fiber.state != SHUFFLES && fiber.state != VOTES) continue;
    if (!in(fiber.mask, i - begin)) return block->error = "a lane is not in its own mask", false;
    bool complete = true;
    unsigned votes = 0;
    for (int k = 0; k < 32; ++k) {
      if (!in(fiber.mask, k)) continue;
      if (begin + k >= end) return block->error = "a mask names lanes past the block", false;
      const Fiber& other = block->fibers[begin + k];
      if (other.state == DONE) return block->error = "a warp operation waits for a lane that has exited", false;
      complete &= other.state == fiber.state && other.mask == fiber.mask;
      votes |= unsigned(other.give != 0) << k;
    }
    if (!complete) continue;
    for (int k = 0; k < 32; ++k) {
      if (!in(fiber.mask, k)) continue;
      Fiber& other = block->fibers[begin + k];
      if (fiber.state == SHUFFLES && !in(fiber.mask, other.source)) return block->error = "a shuffle reads outside its mask", false;
      other.take = fiber.state == SHUFFLES ? block->fibers[begin + other.source].give : votes;
    }
    for (int k = 0; k < 32; ++k)
      if (in(fiber.mask, k)) block->fibers[begin + k].state = RUNS;
    any = true;
  }
  return any;
}

inline void run_block(const std::vector<int>& first_lanes, std::mt19937& random) {
  std::vector<Fiber>& fibers = block->fibers;
  const int n = int(fibers.size());
  std::vector<int> warps = first_lanes;
  for (;;) {
    if (order == 1) std::reverse(warps.begin(), warps.end());
    if (order > 1) std::shuffle(warps.begin(), warps.end(), random);
    for (const int begin : warps) {
      const int end = std::min(n, begin + 32);
      do {
        for (int k = begin; k < end; ++k) {
          const int i = order == 1 ? begin + end - 1 - k : k;
          if (fibers[i].state == RUNS) resume(i);
        }
      } while (release_warp(begin, end));
      if (block->error) return;
    }
    const auto count = [&](State state) { return std::count_if(fibers.begin(), fibers.end(), [=](const Fiber& f) { return f.state == state; }); };
    if (count(DONE) == n) return;
    if (count(AT_BARRIER) != n) {
      block->error = count(AT_BARRIER) + count(DONE) == n ? "__syncthreads is not reached by threads that have exited"
                                                          : "threads wait at different barriers or warp operations";
      return;
    }
    for (Fiber& fiber : fibers) fiber.state = RUNS;
  }
}

inline char* stacks() {
  static char* memory = static_cast<char*>(
      mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return memory;
}

template <class F> int launch(dim3 grid, dim3 threads, size_t shared_bytes, F body) {
  const unsigned n = threads.x * threads.y * threads.z;
  if (n == 0 || n > MOST_THREADS || grid.x * grid.y * grid.z == 0 || shared_bytes > MOST_SHARED) return 9;  // cudaErrorInvalidConfiguration
  Block now{};
  now.fibers.resize(n);
  now.body = &body;
  now.entry = [](void* f) { (*static_cast<F*>(f))(); };
  std::vector<int> first_lanes;
  for (unsigned i = 0; i < n; i += 32) first_lanes.push_back(int(i));
  std::mt19937 random(order);
  block = &now, gridDim = grid, blockDim = threads;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        std::vector<float>(shared_bytes / sizeof(float), NAN).swap(now.shared);  // fresh, so that its ends are guarded
        for (unsigned i = 0; i < n; ++i) {
          Fiber& fiber = now.fibers[i];
          fiber.index = {i % threads.x, i / threads.x % threads.y, i / (threads.x * threads.y)};
          fiber.state = RUNS;
          fiber.stack = stacks() + i * STACK;
          SHIM_ASAN(__asan_unpoison_memory_region(fiber.stack, STACK);)
          void** top = reinterpret_cast<void**>(fiber.stack + STACK - 16);
          *--top = nullptr;  // where `start` would return to; it never does
          *--top = reinterpret_cast<void*>(&start);
          for (int k = 0; k < 6; ++k) *--top = nullptr;  // the registers that shim_switch restores
          fiber.sp = top;
        }
        run_block(first_lanes, random);
        if (now.error) {
          std::fprintf(stderr, "shim: block (%u, %u, %u): %s\n", x, y, z, now.error);
          block = nullptr;
          return LAUNCH_FAILURE;
        }
      }
  block = nullptr;
  return 0;
}

template <class T> T shuffle(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = wait(SHUFFLES, mask, bits, source);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace shim

inline void __syncthreads() { shim::wait(shim::AT_BARRIER); }
inline void __syncwarp(unsigned mask = ~0u) { shim::wait(shim::AT_WARP_BARRIER, mask); }
inline unsigned __ballot_sync(unsigned mask, int vote) { return unsigned(shim::wait(shim::VOTES, mask, vote != 0)); }
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == mask; }
template <class T> T __shfl_sync(unsigned mask, T value, int source) { return shim::shuffle(mask, value, source & 31); }
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits) { return shim::shuffle(mask, value, shim::lane() ^ bits); }
template <class T> T __shfl_down_sync(unsigned mask, T value, int by) {
  return shim::shuffle(mask, value, shim::lane() + by > 31 ? shim::lane() : shim::lane() + by);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, int by) {
  return shim::shuffle(mask, value, shim::lane() < by ? shim::lane() : shim::lane() - by);
}
template <class T> T atomicAdd(T* p, T value) {  // blocks and threads take turns, so nothing need be atomic
  const T before = *p;
  *p += value;
  return before;
}
inline int atomicMax(int* p, int value) { const int before = *p; *p = std::max(*p, value); return before; }
inline unsigned atomicMax(unsigned* p, unsigned value) { const unsigned before = *p; *p = std::max(*p, value); return before; }
inline int atomicOr(int* p, int value) { const int before = *p; *p |= value; return before; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline float __fdividef(float a, float b) { return a / b; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> void __stcs(T* p, T value) { *p = value; }
inline void __threadfence() {}

extern "C" __attribute__((weak)) void dt_shim_order(int order) { shim::order = order; }
