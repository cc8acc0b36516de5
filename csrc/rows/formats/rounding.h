// Rounding to a grid: docs/numerics.md, "Rounding".
#pragma once

#include "core/lanes.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Rounds to the nearest integer, ties to even; |t| <= 2^22. The addition leaves no mantissa bits for a fraction.
template <class F>
RK_HOST_DEVICE F round_even(F t) {
  return (t + 12582912.0f) - 12582912.0f;
}

// Rounds t >= 0 up with the probability of its fraction, else down; `word` is uniform in 32 bits.
template <class F, class U>
RK_HOST_DEVICE F round_stochastic(F t, U word) {
  const F rounded = round_even(t), one = F{} + 1.0f;
  const F floor = rounded > t ? rounded - one : rounded;
  const F uniform = to_float(word >> 8) * 0x1p-24f;
  return uniform < t - floor ? floor + one : floor;
}

template <bool kStochastic, class F, class U>
RK_HOST_DEVICE F round_to_grid(F t, U word) {
  if constexpr (kStochastic) return round_stochastic(t, word);
  else return round_even(t);
}

// round_to_grid() as an integer number of steps, for 0 <= t <= 2^22.
template <bool kStochastic, class F, class U>
RK_HOST_DEVICE U steps_on_grid(F t, U word) {
  if constexpr (kStochastic) {
    const U floor = to_word(t), one = U{} + 1u;
    const F uniform = to_float(word >> 8) * 0x1p-24f;
    return floor + (uniform < t - to_float(floor) ? one : U{});
  } else {
    return to_nearest_word(t);
  }
}

}  // namespace RK_ISA
}  // namespace rec_kernels
