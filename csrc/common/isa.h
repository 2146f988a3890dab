// Which of the three builds of a CPU kernel runs. Every <op>_cpu.cpp is compiled once for each instruction set, into the
// namespace dt::<set>; the best one that this processor has is picked at run time, so one library serves all of them.
#pragma once

namespace dt {

enum Isa : int { BASE = 0, AVX2 = 1, AVX512 = 2 };  // dist_train/ops/library.py names them in this order

Isa isa();                  // the set in use
Isa limit_isa(int highest);  // use none above `highest` (tests, benchmarks); returns what is then in use

}  // namespace dt

// Declares a kernel in each namespace. In <op>.h, inside namespace dt: DT_CPU_KERNEL(norm_rows, const Norm&, int64_t, int64_t)
#define DT_CPU_KERNEL(name, ...)              \
  namespace base { void name(__VA_ARGS__); }  \
  DT_CPU_KERNEL_X86(name, __VA_ARGS__)
#if defined(__x86_64__)
#define DT_CPU_KERNEL_X86(name, ...)            \
  namespace avx2 { void name(__VA_ARGS__); }    \
  namespace avx512 { void name(__VA_ARGS__); }
// The address of the kernel to run.
#define DT_PICK(name) \
  (::dt::isa() == ::dt::AVX512 ? &::dt::avx512::name : ::dt::isa() == ::dt::AVX2 ? &::dt::avx2::name : &::dt::base::name)
#else
#define DT_CPU_KERNEL_X86(name, ...)
#define DT_PICK(name) (&::dt::base::name)
#endif
