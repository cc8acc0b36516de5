// Dot products of rows by a warp, in the order of docs/numerics.md.
#pragma once

#include "core/cuda/group.cuh"

namespace rec_kernels {
inline namespace RK_ISA {

// sum over c of g[c] * x[c] ("Row statistics"): lane l owns partials 4l .. 4l+3 of 128. read(c): x[c .. c+3].
template <class Read>
__device__ __forceinline__ float warp_dot(const float* g, int64_t columns, const Group<kWarpSize>& warp,
                                          const Read& read) {
  const bool aligned = rows_aligned(g, columns);
  float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int64_t c = 4 * warp.lane; c < columns; c += 4 * kWarpSize) {
    const Vec4 a = load_columns(g, c, columns, aligned), x = read(c);
    for (int j = 0; j < 4; ++j)
      if (c + j < columns) s[j] = fused_multiply_add(a.v[j], x.v[j], s[j]);
  }
  return warp.sum((s[0] + s[1]) + (s[2] + s[3]));
}

// warp_dot of two rows of floats.
__device__ __forceinline__ float warp_row_dot(const float* a, const float* b, int64_t columns,
                                              const Group<kWarpSize>& warp) {
  const bool aligned = rows_aligned(b, columns);
  return warp_dot(a, columns, warp, [&](int64_t c) { return load_columns(b, c, columns, aligned); });
}

}  // namespace RK_ISA
}  // namespace rec_kernels
