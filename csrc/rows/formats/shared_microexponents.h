// mx9, mx6, mx4: shared microexponents (Darvish Rouhani et al., "With Shared Microexponents, A Little Shifting Goes a
// Long Way", ISCA 2023). A block of 16 columns shares an exponent E, a pair of columns one bit more (D); a column is a
// sign and m magnitude bits in steps of 2^(E - 127 - D + 1 - m).
//
// Bytes of a row, in planes over all blocks, so that neighbouring columns are neighbours in memory: magnitudes (mx9: a
// byte, with the sign in bit 7; mx6: 4 bits; mx4: 2 bits; low bits first), signs (mx6, mx4: a bit), E (a byte per
// block), D (a byte per block, bit p for pair p). Columns past the row's end are zeros.
#pragma once

#include "rows/formats/rounding.h"

namespace rec_kernels {
inline namespace RK_ISA {

template <int kMagnitude>
struct SharedMicroexponents {
  static constexpr int m = kMagnitude;
  static constexpr int kBlock = 16;
  static constexpr int kMagnitudeWidth = m == 7 ? 8 : m;  // bits per column in the first plane
  static constexpr bool kSignPlane = m != 7;
  static constexpr uint32_t kMaxMagnitude = (1u << m) - 1;

  RK_HOST_DEVICE static int64_t blocks(int64_t D) { return ceil_div(D, kBlock); }
  // Offsets of the planes.
  RK_HOST_DEVICE static int64_t signs(int64_t D) { return blocks(D) * 2 * kMagnitudeWidth; }
  RK_HOST_DEVICE static int64_t exponents(int64_t D) { return signs(D) + (kSignPlane ? 2 * blocks(D) : 0); }
  RK_HOST_DEVICE static int64_t pairs(int64_t D) { return exponents(D) + blocks(D); }
  RK_HOST_DEVICE static int64_t row_bytes(int64_t D) { return pairs(D) + blocks(D); }

  // The exponent of a pair, from the bits of its larger magnitude. If rounded up, the pair is never clipped.
  template <class U>
  RK_HOST_DEVICE static U pair_exponent(U largest, bool round_up) {
    const U field = largest >> 23;
    if (!round_up) return field;
    constexpr uint32_t kMantissa = ((1u << (m - 1)) - 1) << (24 - m), kDenormal = kMaxMagnitude << (23 - m);
    const U limit = field == 0u ? U{} + kDenormal : (field << 23) + kMantissa, one = U{} + 1u;
    const U needed = field + (largest > limit ? one : U{}), most = U{} + 254u;
    return field == 255u ? field : (needed < most ? needed : most);
  }

  // D of a pair: 1 if it is at least a binade below its block.
  template <class U>
  RK_HOST_DEVICE static U pair_bit(U block, U pair) {
    const U one = U{} + 1u;
    const U lower = pair < block ? one : U{};
    return ((block < static_cast<uint32_t>(m + 1)) | (block == 255u)) ? U{} : lower;
  }

  // Exponent field of the step, at least 1.
  template <class U>
  RK_HOST_DEVICE static U step_field(U block, U bit) {
    const U one = U{} + 1u;
    return block > static_cast<uint32_t>(m - 1) + bit ? block - static_cast<uint32_t>(m - 1) - bit : one;
  }

  // Pairs with a magnitude, as bits, of less than this have D = 1: pair_bit(block, pair_exponent(largest)) as a single
  // comparison. The addition carries into the exponent where pair_exponent rounds up; denormals and the largest values
  // differ, but not in D.
  RK_HOST_DEVICE static uint32_t lower_pairs(uint32_t block, bool round_up) {
    if (block < static_cast<uint32_t>(m + 1) || block == 255u) return 0;
    return (block << 23) - (round_up ? (1u << (24 - m)) - 1 : 0);
  }

  template <bool kStochastic, class F, class U>
  RK_HOST_DEVICE static U encode(F x, U step, U word) {
    return encode_scaled<kStochastic>(magnitude_of(x) * power_of_two<F>(254u - step), word);
  }
  // A magnitude in steps.
  template <bool kStochastic, class F, class U>
  RK_HOST_DEVICE static U encode_scaled(F steps, U word) {
    return steps_on_grid<kStochastic>(smaller(steps, F{} + static_cast<float>(kMaxMagnitude)), word);
  }

  // `sign`: the column's, in bit 31.
  template <class U>
  RK_HOST_DEVICE static auto decode(U magnitude, U sign, U block, U bit) {
    const auto step = power_of_two<FloatOf<U>>(step_field(block, bit));
    const U value = bits_of(to_float(magnitude) * step) | sign, nan = U{} + 0x7FC00000u;
    return float_of(block == 255u ? nan : value);
  }
};

using Mx9 = SharedMicroexponents<7>;
using Mx6 = SharedMicroexponents<4>;
using Mx4 = SharedMicroexponents<2>;

}  // namespace RK_ISA
}  // namespace rec_kernels
