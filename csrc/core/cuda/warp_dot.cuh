// Dot products of rows by a warp, and sums of squares by a group of lanes, in the order of docs/numerics.md.
#pragma once

#include "core/cuda/group.cuh"

namespace rec_kernels {
inline namespace RK_ISA {

// Sum of the four partials of each lane of a group, on every lane ("Row statistics").
template <int G>
__device__ __forceinline__ float sum_partials(const float (&s)[4], const Group<G>& group) {
  float own = (s[0] + s[1]) + (s[2] + s[3]);
  if (G < kWarpSize) own += 0.0f;  // a full warp would add zeros, which only changes -0
  return group.sum(own);
}

// Sum over c of a[c] * b[c] ("Row statistics"): lane l has partials 4l .. 4l+3 of 128.
__device__ __forceinline__ float warp_row_dot(const float* a, const float* b, int64_t columns,
                                              const Group<kWarpSize>& warp) {
  const bool a_aligned = rows_aligned(a, columns), b_aligned = rows_aligned(b, columns);
  float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int64_t c = 4 * warp.lane; c < columns; c += 4 * kWarpSize) {
    const Vec4 x = load_columns(a, c, columns, a_aligned), y = load_columns(b, c, columns, b_aligned);
    for (int j = 0; j < 4; ++j)
      if (c + j < columns) s[j] = fused_multiply_add(x.v[j], y.v[j], s[j]);
  }
  return sum_partials(s, warp);
}

// Square sum of a row ("Row statistics"): quad q of four columns goes to partials 4 (q % 32) .. 4 (q % 32) + 3 of 128,
// and lane l of a warp has those of quad l. A lane of a smaller group has those of several quads, G apart.
template <int G, int kBlocks>
struct SquareSum {
  static constexpr int kApart = kWarpSize / G;  // a lane's quads G * i for i < kApart have separate partials
  static constexpr int kQuads = kBlocks < kApart ? kBlocks : kApart;
  const Group<G>& group;
  float partial[kQuads][4] = {};

  __device__ __forceinline__ void add(int64_t column, int64_t D, const Vec4 (&x)[kBlocks]) {
    const int left = columns_left<G, kBlocks>(column + group.lane * 4, D);
    constexpr int kAll = (kBlocks - 1) * G * 4 + 4;
    if (left >= kAll) add_first(kAll, x);  // without comparisons
    else add_first(left, x);
  }
  // The sum over all quads; quads without columns would add zeros.
  __device__ __forceinline__ float total() const {
    float sums[kQuads];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) sums[i] = (partial[i][0] + partial[i][1]) + (partial[i][2] + partial[i][3]);
#pragma unroll
    for (int distance = kQuads / 2; distance > 0; distance /= 2)
#pragma unroll
      for (int i = 0; i < distance; ++i) sums[i] += sums[i + distance];
    return group.sum(sums[0]);
  }

 private:
  // Adds the first `left` columns of this lane.
  __device__ __forceinline__ void add_first(int left, const Vec4 (&x)[kBlocks]) {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& sum = partial[k % kQuads][j];
        if (k * G * 4 + j < left) sum = fused_multiply_add(x[k].v[j], x[k].v[j], sum);
      }
  }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
