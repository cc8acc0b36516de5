// Sums within a warp, in the order of docs/numerics.md.
#pragma once

#include "core/host_device.h"

namespace rec_kernels {
inline namespace RK_ISA {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// The xor butterfly 16, 8, 4, 2, 1 over the warp's lanes; every lane gets the sum.
__device__ __forceinline__ float warp_butterfly_sum(float t) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) t += __shfl_xor_sync(kFullWarp, t, distance);
  return t;
}

// sum over c of a[c] * b[c] ("Row statistics"): lane l owns partials 4l .. 4l+3 of 128.
__device__ __forceinline__ float warp_row_dot(const float* a, const float* b, int64_t columns, int lane) {
  float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int64_t base = 0; base < columns; base += 4 * kWarpSize)
    for (int j = 0; j < 4; ++j) {
      const int64_t c = base + 4 * lane + j;
      if (c < columns) s[j] = fused_multiply_add(a[c], b[c], s[j]);
    }
  return warp_butterfly_sum((s[0] + s[1]) + (s[2] + s[3]));
}

}  // namespace RK_ISA
}  // namespace rec_kernels
