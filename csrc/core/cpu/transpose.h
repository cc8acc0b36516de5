// Square matrices in registers: transposition, and reduction of each register to a scalar.
#pragma once

#include "core/cpu/simd_words.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Exchanges every second block of kDistance lanes of a with the preceding block of b.
template <int kDistance>
RK_HOST_DEVICE void swap_blocks(FloatLanes* a, FloatLanes* b) {
  WordLanes upper, lower;
  for (int lane = 0; lane < kLanes; ++lane) {
    const bool second = (lane & kDistance) != 0;
    upper[lane] = static_cast<uint32_t>(second ? kLanes + lane - kDistance : lane);
    lower[lane] = static_cast<uint32_t>(second ? kLanes + lane : lane + kDistance);
  }
  const FloatLanes x = *a, y = *b;
  *a = shuffle(x, y, upper);
  *b = shuffle(x, y, lower);
}

// Lane l of register r becomes lane r of register l, in kLanes registers.
template <int kDistance = kLanes / 2>
RK_HOST_DEVICE void transpose(FloatLanes* rows) {
  for (int i = 0; i < kLanes; ++i)
    if ((i & kDistance) == 0) swap_blocks<kDistance>(rows + i, rows + i + kDistance);
  if constexpr (kDistance > 1) transpose<kDistance / 2>(rows);
}

// Reduces each register: lane l is the commutative choose(a, b) over all lanes of rows[l]. Overwrites the kLanes
// registers.
template <int kDistance = kLanes / 2, class Choose>
RK_HOST_DEVICE FloatLanes reduce_each(FloatLanes* rows, const Choose& choose) {
  for (int i = 0; i < kDistance; ++i) {
    swap_blocks<kDistance>(rows + i, rows + i + kDistance);
    rows[i] = choose(rows[i], rows[i + kDistance]);
  }
  if constexpr (kDistance > 1) return reduce_each<kDistance / 2>(rows, choose);
  else return rows[0];
}

}  // namespace RK_ISA
}  // namespace rec_kernels
