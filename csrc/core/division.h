// Division of non-negative 63-bit integers by an invariant divisor: a multiplication and a shift.
#pragma once

#include "core/host_device.h"

namespace rec_kernels {

// The upper half of a product.
RK_HOST_DEVICE uint64_t high_product(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// n / d, exactly, for every n in [0, 2^63). With s = ceil(log2(d)) and m = ceil(2^(63 + s) / d), which has 64 bits,
// n * m / 2^(63 + s) is above n / d by less than n / 2^63 / d < 1 / d, so both have the same integer part (Granlund and
// Montgomery, "Division by Invariant Integers using Multiplication", 1994).
// The same holds with 31 and 32 bits instead of 63 and 64.
struct Divisor {
  uint64_t multiplier;
  int64_t value;
  int shift;
  uint32_t narrow_multiplier;  // 0 for divisors of more than 31 bits

  // `d` is in [1, 2^63).
  RK_HOST_DEVICE static Divisor of(int64_t d) {
    int shift = 0;
    while (shift < 63 && (uint64_t{1} << shift) < static_cast<uint64_t>(d)) ++shift;
    const auto divisor = static_cast<unsigned __int128>(d);
    const unsigned __int128 power = static_cast<unsigned __int128>(1) << (63 + shift);
    const uint64_t narrow = d > INT32_MAX ? 0 : ((uint64_t{1} << (31 + shift)) + d - 1) / d;
    return {static_cast<uint64_t>((power + divisor - 1) / divisor), d, shift, static_cast<uint32_t>(narrow)};
  }
  RK_HOST_DEVICE int64_t divide(int64_t n) const {
    return static_cast<int64_t>(high_product(2 * static_cast<uint64_t>(n), multiplier) >> shift);
  }
  RK_HOST_DEVICE int64_t remainder(int64_t n) const { return n - divide(n) * value; }
  // n - floor(n / d) * d, in [0, d), for every n. For negative n it is d - 1 minus the remainder of -1 - n.
  RK_HOST_DEVICE int64_t floor_remainder(int64_t n) const {
    const int64_t negative = -static_cast<int64_t>(n < 0);
    return (remainder(n ^ negative) ^ negative) + (value & negative);
  }

  // For n < 2^31: vectorizable, and a single instruction on a GPU.
  RK_HOST_DEVICE uint32_t divide_narrow(uint32_t n) const {
    return static_cast<uint32_t>((uint64_t{n} * narrow_multiplier) >> (31 + (shift & 31)));
  }
  RK_HOST_DEVICE uint32_t remainder_narrow(uint32_t n) const {
    return n - divide_narrow(n) * static_cast<uint32_t>(value);
  }
};

}  // namespace rec_kernels
