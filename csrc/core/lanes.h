// Operations that row formats are written in. F is a float or, on the CPU, a vector of floats (LanesOf below); Word is
// the unsigned integer of the same width. The same source then serves a lane of a CUDA kernel and a register of a CPU
// kernel.
#pragma once

#include <string.h>

#include "core/host_device.h"

// Instructions that convert halves. Each rounds once, keeps denormals on either side and overflows to Inf, or, rounded
// towards it, to the largest half. On the CPU that is F16C. On a GPU it is PTX's cvt: the ISA has it exact from .f16 to
// .f32, and correctly rounded to nearest even (.rn), down (.rm) or up (.rp) the other way; without .ftz a denormal of
// either type is neither read nor written as 0. Only what becomes of a NaN is the machine's own.
#if defined(__CUDA_ARCH__)
#define RK_CONVERTS_HALVES 1
#elif defined(__F16C__) && !defined(__CUDACC__)
#define RK_CONVERTS_HALVES 1
#include <immintrin.h>
#else
#define RK_CONVERTS_HALVES 0
#endif

namespace rec_kernels {
inline namespace RK_ISA {

#if defined(__CUDA_ARCH__)
RK_HOST_DEVICE uint32_t half_nearest(float x) {
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
}
RK_HOST_DEVICE uint32_t half_below(float x) {
  uint16_t half;
  asm("cvt.rm.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
}
RK_HOST_DEVICE uint32_t half_above(float x) {
  uint16_t half;
  asm("cvt.rp.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
}
RK_HOST_DEVICE float float_of_half(uint32_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(bits)));
  return x;
}
#elif RK_CONVERTS_HALVES
RK_HOST_DEVICE uint32_t half_nearest(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
RK_HOST_DEVICE uint32_t half_below(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEG_INF); }
RK_HOST_DEVICE uint32_t half_above(float x) { return _cvtss_sh(x, _MM_FROUND_TO_POS_INF); }
RK_HOST_DEVICE float float_of_half(uint32_t bits) { return _cvtsh_ss(static_cast<uint16_t>(bits)); }
#endif

// Operations that differ between a scalar and a register, specialised for F and for its Word.
template <class T>
struct LanesOf;

template <>
struct LanesOf<float> {
  using Word = uint32_t;
  RK_HOST_DEVICE static uint32_t bits(float x) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
  }
  RK_HOST_DEVICE static uint32_t to_word(float whole) { return static_cast<uint32_t>(static_cast<int32_t>(whole)); }
  RK_HOST_DEVICE static uint32_t to_nearest_word(float x) { return bits(x + 12582912.0f) - 0x4B400000u; }
  RK_HOST_DEVICE static float fused(float a, float b, float c) { return fused_multiply_add(a, b, c); }
#if RK_CONVERTS_HALVES
  RK_HOST_DEVICE static uint32_t to_half(float x) { return half_nearest(x); }
#endif
  RK_HOST_DEVICE static float larger(float a, float b) { return a > b ? a : b; }
  RK_HOST_DEVICE static float smaller(float a, float b) { return a < b ? a : b; }
};

template <>
struct LanesOf<uint32_t> {
  using Float = float;
  RK_HOST_DEVICE static float number(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
#endif
  }
  RK_HOST_DEVICE static float to_float(uint32_t word) { return static_cast<float>(static_cast<int32_t>(word)); }
#if RK_CONVERTS_HALVES
  RK_HOST_DEVICE static float from_half(uint32_t bits) { return float_of_half(bits); }
#endif
};

template <class F>
using WordOf = typename LanesOf<F>::Word;
template <class U>
using FloatOf = typename LanesOf<U>::Float;

// The bits of x, unchanged.
template <class F>
RK_HOST_DEVICE WordOf<F> bits_of(F x) {
  return LanesOf<F>::bits(x);
}
template <class U>
RK_HOST_DEVICE FloatOf<U> float_of(U bits) {
  return LanesOf<U>::number(bits);
}
// Converts integers below 2^24, exactly.
template <class U>
RK_HOST_DEVICE FloatOf<U> to_float(U word) {
  return LanesOf<U>::to_float(word);
}
template <class F>
RK_HOST_DEVICE WordOf<F> to_word(F whole) {
  return LanesOf<F>::to_word(whole);
}

// The nearest integer, ties to even, for 0 <= x <= 2^22: 12582912, whose bits are 0x4B400000, leaves no fraction.
template <class F>
RK_HOST_DEVICE WordOf<F> to_nearest_word(F x) {
  return LanesOf<F>::to_nearest_word(x);
}
// The larger and the smaller of two values; b if one of them is NaN.
template <class F>
RK_HOST_DEVICE F larger(F a, F b) {
  return LanesOf<F>::larger(a, b);
}
template <class F>
RK_HOST_DEVICE F smaller(F a, F b) {
  return LanesOf<F>::smaller(a, b);
}

constexpr uint32_t kSignBit = 0x80000000u, kMagnitudeBits = 0x7fffffffu, kInfinityBits = 0x7f800000u;

// 0 for zeros and denormals, 255 for Inf and NaN.
template <class U>
RK_HOST_DEVICE U exponent_field(U bits) {
  return (bits >> 23) & 255;
}

// 2^(field - 127); a denormal for field 0.
template <class F, class U>
RK_HOST_DEVICE F power_of_two(U field) {
  const U denormal = U{} + 0x00400000u;
  return float_of(field == 0u ? denormal : field << 23);
}

template <class F>
RK_HOST_DEVICE F magnitude_of(F x) {
  return float_of(bits_of(x) & kMagnitudeBits);
}

}  // namespace RK_ISA
}  // namespace rec_kernels
