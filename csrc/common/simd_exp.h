// exp of a vector of floats, for the CPU kernels.
#pragma once
#include "simd.h"

namespace dt::DT_ISA {

// Within 1.2 units in the last place of the true value, denormal results included; 0, infinity and NaN where std::exp has them.
// x = n · ln 2 + r with |r| ≤ ln 2 / 2: 2^n goes into the exponent, and e^r = 1 + r + r² · p(r), p interpolated at the
// Chebyshev nodes of that interval.
DT_INLINE vf exp(vf x) {
  x = max(splat(-104.f), min(splat(89.f), x));  // past the denormals and past the largest float; NaN goes through
  const vf shifted = x * 1.44269504f + 0x1.8p23f;  // the sum's last bit is worth 1: rounds to n and leaves it in the low bits
  const vf n = shifted - 0x1.8p23f;
  const vf r = x - n * 0x1.63p-1f - n * -0x1.bd0106p-13f;  // ln 2 in two parts; the first has few digits, so n times it is exact
  const vf p = (((r * 0.0013926250394f + 0.0083632329479f) * r + 0.0416665524244f) * r + 0.1666657626629f) * r + 0.5f;
  const vf e = p * (r * r) + r + 1.f;
  const vi k = (vi)shifted - 0x4b400000, half = k >> 1;  // two factors, for 2^n alone may leave the range of floats
  return e * (vf)((half + 127) << 23) * (vf)((k - half + 127) << 23);
}

}  // namespace dt::DT_ISA
