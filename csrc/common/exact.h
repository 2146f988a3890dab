// Products and sums that are rounded one by one. Compilers make a fused multiply-add of a · b + c where the processor has one,
// and then the bits depend on the processor.
#pragma once
#include "dtype.h"
#if defined(DT_ISA)
#include "simd.h"
#endif

namespace dt {

DT_HD float exact_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  float product = a * b;
#if defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
#endif
}

}  // namespace dt

#if defined(DT_ISA)
namespace dt::DT_ISA {
DT_INLINE vf exact(vf product) {  // keeps it from becoming part of a fused multiply-add
#if defined(__x86_64__)
  asm("" : "+v"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}
}  // namespace dt::DT_ISA
#endif
