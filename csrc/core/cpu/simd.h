// Vec: one register of float32 lanes of the instruction set this file is compiled for.
// Elementwise operations round each lane exactly as the scalar operation does, so that results do not depend on
// the width. `partial` forms touch the first n lanes only (0 < n < kWidth); absent lanes load as zero.
// first(n) makes the lanes from n on zero. larger and smaller give b where a lane of either is NaN.
#pragma once

#include "core/host_device.h"
#include "core/prefetch.h"

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace rec_kernels {
inline namespace RK_ISA {

// GCC's AddressSanitizer does not check masked accesses, so this touches their ends. Bytewise, since rows of half
// precision that are copied as floats may be unaligned.
RK_HOST_DEVICE void show_sanitizer([[maybe_unused]] const float* p, [[maybe_unused]] int n) {
#if defined(__SANITIZE_ADDRESS__)
  const auto* bytes = reinterpret_cast<const volatile char*>(p);
  (void)bytes[0];
  (void)bytes[4 * n - 1];
#endif
}

#if defined(__AVX512F__) && defined(__AVX512VL__)

struct Vec {
  static constexpr int kWidth = 16;
  __m512 v;

  static __mmask16 mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
  static Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  // Loads in parts: a masked load waits for every cache line in its full width, which may be the next row's.
  static Vec load_partial(const float* p, int n) {
    show_sanitizer(p, n);
    if (n <= 4) return {_mm512_zextps128_ps512(_mm_maskz_loadu_ps(static_cast<__mmask8>(mask(n)), p))};
    const auto half = static_cast<__mmask8>(mask(n > 8 ? n - 8 : n));
    if (n <= 8) return {_mm512_zextps256_ps512(_mm256_maskz_loadu_ps(half, p))};
    return {_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(p)), _mm256_maskz_loadu_ps(half, p + 8), 1)};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store_partial(float* p, int n) const {
    show_sanitizer(p, n);
    const __m256 low = _mm512_castps512_ps256(v);
    if (n <= 8) return _mm256_mask_storeu_ps(p, static_cast<__mmask8>(mask(n)), low);
    _mm256_storeu_ps(p, low);
    _mm256_mask_storeu_ps(p + 8, static_cast<__mmask8>(mask(n - 8)), _mm512_extractf32x8_ps(v, 1));
  }
  Vec first(int n) const { return {_mm512_maskz_mov_ps(mask(n), v)}; }
};
RK_HOST_DEVICE Vec square_root(Vec a) { return {_mm512_sqrt_ps(a.v)}; }
RK_HOST_DEVICE Vec fused_multiply_add(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
RK_HOST_DEVICE Vec larger(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
RK_HOST_DEVICE Vec smaller(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }

#elif defined(__AVX2__) && defined(__FMA__)

struct Vec {
  static constexpr int kWidth = 8;
  __m256 v;

  static __m256i mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load_partial(const float* p, int n) {
    show_sanitizer(p, n);
    return {_mm256_maskload_ps(p, mask(n))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store_partial(float* p, int n) const {
    show_sanitizer(p, n);
    _mm256_maskstore_ps(p, mask(n), v);
  }
  Vec first(int n) const { return {_mm256_and_ps(v, _mm256_castsi256_ps(mask(n)))}; }
};
RK_HOST_DEVICE Vec square_root(Vec a) { return {_mm256_sqrt_ps(a.v)}; }
RK_HOST_DEVICE Vec fused_multiply_add(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
RK_HOST_DEVICE Vec larger(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
RK_HOST_DEVICE Vec smaller(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }

#else

// Four lanes: SSE4.2 (without fused multiply-add: libm's exact one gives the same bits, slower), NEON (GCC and Clang
// lower the vector type to it), or generic code. Unaligned in memory, like rows of half precision that are copied as
// floats.
typedef float Float4 __attribute__((vector_size(16), aligned(1)));
typedef float Float1 __attribute__((aligned(1)));

struct Vec {
  static constexpr int kWidth = 4;
  Float4 v;

  static Vec broadcast(float x) { return {Float4{x, x, x, x}}; }
  static Vec load(const float* p) { return {*reinterpret_cast<const Float4*>(p)}; }
  static Vec load_partial(const float* from, int n) {
    const Float1* p = from;
    return {Float4{p[0], n > 1 ? p[1] : 0.0f, n > 2 ? p[2] : 0.0f, 0.0f}};
  }
  void store(float* p) const { *reinterpret_cast<Float4*>(p) = v; }
  void store_partial(float* to, int n) const {
    Float1* p = to;
    for (int i = 0; i < n; ++i) p[i] = v[i];
  }
  Vec first(int n) const { return {Float4{v[0], n > 1 ? v[1] : 0.0f, n > 2 ? v[2] : 0.0f, 0.0f}}; }
};
RK_HOST_DEVICE Vec square_root(Vec a) {
  for (int i = 0; i < Vec::kWidth; ++i) a.v[i] = __builtin_sqrtf(a.v[i]);
  return a;
}
RK_HOST_DEVICE Vec fused_multiply_add(Vec a, Vec b, Vec c) {
#if defined(__ARM_NEON)
  return {vfmaq_f32(c.v, a.v, b.v)};
#else
  Float4 r;
  for (int i = 0; i < 4; ++i) r[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return {r};
#endif
}
RK_HOST_DEVICE Vec larger(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
RK_HOST_DEVICE Vec smaller(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }

#endif

constexpr int W = Vec::kWidth;

// GCC and Clang provide the operators for vectors of every width.
RK_HOST_DEVICE Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
RK_HOST_DEVICE Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
RK_HOST_DEVICE Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }

}  // namespace RK_ISA
}  // namespace rec_kernels
