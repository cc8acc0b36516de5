// Division of non-negative 63-bit numbers by one that is known beforehand: a multiplication and a shift.
#pragma once

#include "core/host_device.h"

namespace rec_kernels {

// n / d, exactly, for every n in [0, 2^63). With s = ceil(log2(d)) and m = ceil(2^(63 + s) / d), which has 64 bits,
// n * m / 2^(63 + s) is above n / d by less than n / 2^63 / d < 1 / d, so both have the same integer part (Granlund and
// Montgomery, "Division by Invariant Integers using Multiplication", 1994).
struct Divisor {
  uint64_t multiplier;
  int64_t value;
  int shift;

  // `d` is in [1, 2^63).
  RK_HOST_DEVICE static Divisor of(int64_t d) {
    int shift = 0;
    while (shift < 63 && (uint64_t{1} << shift) < static_cast<uint64_t>(d)) ++shift;
    const auto divisor = static_cast<unsigned __int128>(d);
    const unsigned __int128 power = static_cast<unsigned __int128>(1) << (63 + shift);
    return {static_cast<uint64_t>((power + divisor - 1) / divisor), d, shift};
  }
  RK_HOST_DEVICE int64_t divide(int64_t n) const {
    return static_cast<int64_t>(high_product(2 * static_cast<uint64_t>(n), multiplier) >> shift);
  }
  RK_HOST_DEVICE int64_t remainder(int64_t n) const { return n - divide(n) * value; }

 private:
  RK_HOST_DEVICE static uint64_t high_product(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
    return __umul64hi(a, b);
#else
    return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
  }
};

}  // namespace rec_kernels
