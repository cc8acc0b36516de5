// Transposing squares of numbers in registers.
#pragma once

#include "core/cpu/simd_words.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Swaps, of each two registers kDistance apart, the blocks of kDistance lanes beside the diagonal.
template <int kDistance>
RK_HOST_DEVICE void swap_blocks(FloatLanes* rows) {
  WordLanes upper, lower;
  for (int lane = 0; lane < kLanes; ++lane) {
    const bool second = (lane & kDistance) != 0;
    upper[lane] = static_cast<uint32_t>(second ? kLanes + lane - kDistance : lane);
    lower[lane] = static_cast<uint32_t>(second ? kLanes + lane : lane + kDistance);
  }
  for (int i = 0; i < kLanes; ++i) {
    if (i & kDistance) continue;
    const FloatLanes a = rows[i], b = rows[i + kDistance];
    rows[i] = __builtin_shuffle(a, b, upper);
    rows[i + kDistance] = __builtin_shuffle(a, b, lower);
  }
}

// Lane l of register r becomes lane r of register l, in kLanes registers.
template <int kDistance = kLanes / 2>
RK_HOST_DEVICE void transpose(FloatLanes* rows) {
  swap_blocks<kDistance>(rows);
  if constexpr (kDistance > 1) transpose<kDistance / 2>(rows);
}

}  // namespace RK_ISA
}  // namespace rec_kernels
