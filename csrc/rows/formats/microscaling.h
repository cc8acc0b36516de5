// mxfp8, mxfp6, mxfp4, mxint8: OCP Microscaling Formats (MX) Specification, version 1.0. A block of 32 columns shares a
// power-of-two scale (E8M0); each column is a small float or an integer.
//
// Bytes of a row, in planes over all blocks: codes (8 bits: a byte; 4 bits: two to a byte, low first; 6 bits: the low
// four bits two to a byte, then the high two bits four to a byte), then the scales, a byte per block. Columns past the
// row's end are zeros.
#pragma once

#include "rows/formats/rounding.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Float element. kExponentBits and kMantissaBits as in its name; Top: exponent and code of the largest value.
template <int kExponentBits, int kMantissaBits, int kTopExponent, uint32_t kTopCode>
struct FloatElement {
  static constexpr int kBits = 1 + kExponentBits + kMantissaBits;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kTop = kTopExponent;
  static constexpr uint32_t kLowestField = 128 - kBias;  // fp32 exponent field of the smallest normal value
  static constexpr uint32_t kSign = 1u << (kBits - 1);
  static constexpr float kMax =
      (1.0f + static_cast<float>(kTopCode & ((1u << kMantissaBits) - 1)) / (1 << kMantissaBits)) * (1 << kTopExponent);

  template <bool kStochastic, class F, class U>
  RK_HOST_DEVICE static U encode(F x, U word) {
    const F magnitude = magnitude_of(x), most = F{} + kMax;
    const U own = exponent_field(bits_of(magnitude)), lowest = U{} + kLowestField;
    const U step = (own > kLowestField ? own : lowest) - static_cast<uint32_t>(kMantissaBits);
    const F steps = round_to_grid<kStochastic>(magnitude * power_of_two<F>(254u - step), word);
    const F rounded = steps * power_of_two<F>(step);
    const U bits = bits_of(smaller(rounded, most));
    const U normal = (bits >> (23 - kMantissaBits)) - (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
    const U denormal = to_word(steps);
    return (bits < (kLowestField << 23) ? denormal : normal) | ((bits_of(x) >> (32 - kBits)) & kSign);
  }

  template <class U>
  RK_HOST_DEVICE static auto decode(U code) {
    const U sign = (code & kSign) << (32 - kBits), magnitude = code & (kSign - 1);
    const U normal = (magnitude << (23 - kMantissaBits)) + (static_cast<uint32_t>(127 - kBias) << 23);
    const auto one_step = float_of((kLowestField - kMantissaBits) << 23);
    const U denormal = bits_of(to_float(magnitude) * one_step), nan = U{} + 0x7FC00000u;
    U bits = magnitude < (1u << kMantissaBits) ? denormal : normal;
    // Codes that the encoder never writes: E5M2 has infinities and NaNs above its largest value, E4M3 one NaN.
    if constexpr (kBits == 8 && kExponentBits == 5) {
      const U infinity = U{} + kInfinityBits;
      bits = magnitude > kTopCode ? (magnitude == kTopCode + 1 ? infinity : nan) : bits;
    } else if constexpr (kBits == 8) {
      bits = magnitude > kTopCode ? nan : bits;
    }
    return float_of(bits | sign);
  }
};

using E4M3 = FloatElement<4, 3, 8, 0x7E>;
using E5M2 = FloatElement<5, 2, 15, 0x7B>;
using E3M2 = FloatElement<3, 2, 4, 0x1F>;
using E2M3 = FloatElement<2, 3, 2, 0x1F>;
using E2M1 = FloatElement<2, 1, 2, 0x07>;

// Two's complement in steps of 2^-6; -128 is decoded but never written.
struct Int8Element {
  static constexpr int kBits = 8;
  static constexpr int kTop = 0;
  static constexpr float kMax = 127.0f / 64;

  template <bool kStochastic, class F, class U>
  RK_HOST_DEVICE static U encode(F x, U word) {
    const U magnitude = steps_on_grid<kStochastic>(smaller(magnitude_of(x) * 64.0f, F{} + 127.0f), word);
    return ((bits_of(x) & kSignBit) != 0u ? U{} - magnitude : magnitude) & 255u;
  }

  template <class U>
  RK_HOST_DEVICE static auto decode(U code) {
    return (to_float(code ^ 128u) - 128.0f) * 0x1p-6f;
  }
};

template <class ElementType>
struct Microscaling {
  using Element = ElementType;
  static constexpr int kBlock = 32;

  RK_HOST_DEVICE static int64_t blocks(int64_t D) { return ceil_div(D, kBlock); }
  // Offsets of the high bits of 6-bit codes, and of the scales.
  RK_HOST_DEVICE static int64_t high_bits(int64_t D) { return blocks(D) * 16; }
  RK_HOST_DEVICE static int64_t scales(int64_t D) { return blocks(D) * 4 * Element::kBits; }
  RK_HOST_DEVICE static int64_t row_bytes(int64_t D) { return scales(D) + blocks(D); }

  // The scale byte, from the bits of the block's largest magnitude. If rounded up, no element is clipped unless it
  // would decode to Inf: the scale is at most 254 - kTop. The lowest scale, 2^-127, is a denormal.
  RK_HOST_DEVICE static uint32_t scale(uint32_t largest, bool round_up) {
    if (largest >= kInfinityBits) return 255;
    if (round_up) {
      const uint32_t needed = bits_of(float_of(largest) * (1.0f / Element::kMax));
      const uint32_t field = needed >> 23, exact = field == 0 ? 0x00400000u : 0u, most = 254 - Element::kTop;
      const uint32_t above = field + ((needed & 0x007FFFFFu) > exact);
      return above < most ? above : most;
    }
    const uint32_t field = largest >> 23;
    return field > static_cast<uint32_t>(Element::kTop) ? field - Element::kTop : 0;
  }

  // 1 / scale and scale as powers of two; at either end of the range one of them is a denormal.
  RK_HOST_DEVICE static float inverse(uint32_t scale) { return power_of_two<float>(254u - scale); }
  RK_HOST_DEVICE static float factor(uint32_t scale) {
    return scale == 255 ? float_of(0x7FC00000u) : power_of_two<float>(scale);
  }
};

using MxFp8E4M3 = Microscaling<E4M3>;
using MxFp8E5M2 = Microscaling<E5M2>;
using MxFp6E3M2 = Microscaling<E3M2>;
using MxFp6E2M3 = Microscaling<E2M3>;
using MxFp4E2M1 = Microscaling<E2M1>;
using MxInt8 = Microscaling<Int8Element>;

}  // namespace RK_ISA
}  // namespace rec_kernels
