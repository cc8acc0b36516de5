// Sums over the columns of a row, in the order of docs/numerics.md ("Row statistics"): partial sum p of 128 accumulates
// columns c = p (mod 128) in ascending order with fused multiply-adds; groups of four partials are added pairwise; the
// 32 results are reduced by an xor butterfly 16, 8, 4, 2, 1. Partials beyond the row's width are +0.
#pragma once

#include "core/cpu/simd.h"

namespace rec_kernels {
inline namespace RK_ISA {

constexpr int kRowPartials = 128;

typedef float Quad __attribute__((vector_size(16), aligned(4)));

// (a0+a1, a2+a3, b0+b1, b2+b3)
inline Quad add_neighbours(Quad a, Quad b) {
#if defined(__SSE2__)
  return _mm_shuffle_ps(a, b, 0x88) + _mm_shuffle_ps(a, b, 0xDD);
#else
  return Quad{a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]};
#endif
}

// Sums of four adjacent groups of four partials: t[4m .. 4m+3] for s = partials + 16m.
inline Quad sixteen_partials(const float* s) {
  const Quad* q = reinterpret_cast<const Quad*>(s);
  return add_neighbours(add_neighbours(q[0], q[1]), add_neighbours(q[2], q[3]));
}

// `partials` holds 128 floats; only the first `columns` rounded up to 16 are read when columns < 128.
inline float reduce_partials(const float* partials, int64_t columns) {
  Quad t[8] = {};
  const int groups = columns >= kRowPartials ? 8 : static_cast<int>((columns + 15) / 16);
  for (int m = 0; m < groups; ++m) t[m] = sixteen_partials(partials + 16 * m);
  const Quad by_eight[4] = {t[0] + t[4], t[1] + t[5], t[2] + t[6], t[3] + t[7]};
  const Quad r = (by_eight[0] + by_eight[2]) + (by_eight[1] + by_eight[3]);
  return (r[0] + r[2]) + (r[1] + r[3]);
}

// Square sum of a row of at most 128 columns in NV registers; lanes beyond the row must be zero.
template <int NV>
RK_HOST_DEVICE float square_sum(const Vec* g, int64_t columns) {
  const Vec zero = Vec::broadcast(0.0f);
#if defined(__AVX512F__)
  (void)columns;
  static_assert(NV <= 8, "128 columns");
  __m512 s[8];
  for (int v = 0; v < 8; ++v) s[v] = v < NV ? fused_multiply_add(g[v < NV ? v : 0], g[v < NV ? v : 0], zero).v : zero.v;
  const auto neighbours = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
  };
  // Element k of 128-bit lane j is t[4k + j], then (high) t[16 + 4k + j].
  const __m512 low = neighbours(neighbours(s[0], s[1]), neighbours(s[2], s[3]));
  const __m512 high = neighbours(neighbours(s[4], s[5]), neighbours(s[6], s[7]));
  __m512 t = _mm512_add_ps(low, high);
  t = _mm512_add_ps(t, _mm512_permute_ps(t, 0x4E));
  t = _mm512_add_ps(t, _mm512_permute_ps(t, 0xB1));
  t = _mm512_add_ps(t, _mm512_shuffle_f32x4(t, t, 0x4E));
  t = _mm512_add_ps(t, _mm512_shuffle_f32x4(t, t, 0xB1));
  return _mm512_cvtss_f32(t);
#else
  alignas(64) float partials[kRowPartials];
  for (int v = 0; v < NV; ++v) fused_multiply_add(g[v], g[v], zero).store(partials + v * W);
  for (int v = NV; v * W % 16 != 0; ++v) zero.store(partials + v * W);
  return reduce_partials(partials, columns);
#endif
}

// Returns the sum over c < columns of a[c] * b[c].
inline float row_dot(const float* a, const float* b, int64_t columns) {
  alignas(64) float partials[kRowPartials];
  const int64_t first = columns < kRowPartials ? (columns + 15) / 16 * 16 : kRowPartials;
  for (int64_t p = 0; p < first; p += W) {
    Vec sum = Vec::broadcast(0.0f);
    int64_t c = p;
    for (; c + W <= columns; c += kRowPartials) sum = fused_multiply_add(Vec::load(a + c), Vec::load(b + c), sum);
    sum.store(partials + p);
    if (c < columns) {
      // Lanes past the end keep their partial: fmaf(0, 0, -0) would turn -0 from an underflow into +0.
      const int n = static_cast<int>(columns - c);
      fused_multiply_add(Vec::load_partial(a + c, n), Vec::load_partial(b + c, n), sum).store_partial(partials + p, n);
    }
  }
  return reduce_partials(partials, columns);
}

}  // namespace RK_ISA
}  // namespace rec_kernels
