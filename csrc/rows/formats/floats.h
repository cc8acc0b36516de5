// Rows of plain floats: fp32, fp16, bf16. A code is the value's bits in the low end of a Word.
#pragma once

#include "rows/formats/rounding.h"

namespace rec_kernels {
inline namespace RK_ISA {

struct Fp32 {
  static constexpr int kBytes = 4;
  RK_HOST_DEVICE static int64_t row_bytes(int64_t D) { return D * kBytes; }

  template <bool, class F, class U>
  RK_HOST_DEVICE static U encode(F x, U) {
    const U bits = bits_of(x), nan = U{} + 0x7FC00000u;
    return (bits & kMagnitudeBits) > kInfinityBits ? nan : bits;
  }
  template <class U>
  RK_HOST_DEVICE static auto decode(U code) {
    return float_of(code);
  }
};

struct Bf16 {
  static constexpr int kBytes = 2;
  RK_HOST_DEVICE static int64_t row_bytes(int64_t D) { return D * kBytes; }

  // Nearest: IEEE, ties to even. Stochastic: adds the high half of `word` below the kept bits, except for values with
  // the kept bits of the largest finite number, so that finite values stay finite.
  template <bool kStochastic, class F, class U>
  RK_HOST_DEVICE static U encode(F x, U word) {
    const U bits = bits_of(x), magnitude = bits & kMagnitudeBits;
    const U nan = U{} + 0x7FC0u;
    U added = 0x7FFFu + ((bits >> 16) & 1);
    if constexpr (kStochastic) added = magnitude < 0x7F7F0000u ? word >> 16 : U{};
    return magnitude > kInfinityBits ? nan : (bits + added) >> 16;
  }
  template <class U>
  RK_HOST_DEVICE static auto decode(U code) {
    return float_of(code << 16);
  }
};

struct Fp16 {
  static constexpr int kBytes = 2;
  RK_HOST_DEVICE static int64_t row_bytes(int64_t D) { return D * kBytes; }
  static constexpr uint32_t kRebias = (127 - 15) << 23;  // from fp32's exponent to fp16's
  static constexpr uint32_t kSmallestNormal = 113u << 23, kInfinity = 0x7C00, kLargest = 0x7BFF;

  template <bool kStochastic, class F, class U>
  RK_HOST_DEVICE static U encode(F x, U word) {
    const U bits = bits_of(x), magnitude = bits & kMagnitudeBits, sign = (bits >> 16) & 0x8000u;
    const U nan = U{} + 0x7E00u;
    if constexpr (kStochastic) return magnitude > kInfinityBits ? nan : sign | stochastic(magnitude, word);
#if RK_CONVERTS_HALVES
    return magnitude > kInfinityBits ? nan : LanesOf<F>::to_half(x);
#else
    return magnitude > kInfinityBits ? nan : sign | nearest<F>(magnitude);
#endif
  }

  template <class U>
  RK_HOST_DEVICE static auto decode(U code) {
#if RK_CONVERTS_HALVES
    return LanesOf<U>::from_half(code);
#else
    const U magnitude = code & 0x7FFFu, sign = (code & 0x8000u) << 16;
    const U normal = (magnitude << 13) + kRebias, special = normal + kRebias;
    const U denormal = bits_of(to_float(magnitude) * 0x1p-24f);
    const U finite = magnitude < 0x0400u ? denormal : normal;
    return float_of(sign | (magnitude >= kInfinity ? special : finite));
#endif
  }

 private:
  template <class F, class U>
  RK_HOST_DEVICE static U nearest(U magnitude) {
    const U infinity = U{} + kInfinity, rebiased = magnitude - kRebias;
    const U normal = (rebiased + 0x0FFFu + ((rebiased >> 13) & 1)) >> 13;
    const U bounded = magnitude >= (143u << 23) ? infinity : normal;  // 2^16 and above
    // Bounded so that the rounding below is exact; the result is selected afterwards.
    const U small = magnitude < kSmallestNormal ? magnitude : U{} + kSmallestNormal;
    const U denormal = to_word(round_even(float_of(small) * 0x1p24f));
    return magnitude < kSmallestNormal ? denormal : bounded;
  }

  // Adds the highest bits of `word`, as many as are dropped, before truncation.
  template <class U>
  RK_HOST_DEVICE static U stochastic(U magnitude, U word) {
    const U largest = U{} + kLargest, infinity = U{} + kInfinity;
    const U normal = (magnitude - kRebias + (word >> 19)) >> 13;
    const U too_large = magnitude >= kInfinityBits ? infinity : largest;
    const U bounded = ((magnitude >= (143u << 23)) | (normal > kLargest)) ? too_large : normal;
    // Denormal halves, below 2^-14, drop 13 + (113 - field) >= 14 bits; beyond 56 the result is 0.
    const U field = exponent_field(magnitude), significand = (magnitude & 0x007FFFFFu) | 0x00800000u;
    const U drop = 126u - (field < 113u ? field : U{} + 112u);
    const U in_word = drop < 31u ? drop : U{} + 31u;
    const U low = (significand + (word >> (32u - in_word))) >> in_word;
    const U beyond = drop < 32u ? U{} : drop - 32u;
    const U rest = significand >> (beyond < 31u ? beyond : U{} + 31u);
    const U carried = word + rest, one = U{} + 1u;
    const U high = carried < word ? one : U{};
    const U denormal = field == 0u ? U{} : (drop < 32u ? low : high);  // fp32 denormals are smaller than every half
    return magnitude < kSmallestNormal ? denormal : bounded;
  }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
