// Rows of integer codes with a scale and bias per row: value = fmaf(code, scale, bias). int8: D codes, FP32
// scale, FP32 bias; int4 and int2: codes packed low bits first, FP16 scale, FP16 bias. Rounded to nearest, the bytes
// are those of torch.ops.quantized.embedding_bag_{byte,4bit,2bit}_prepack.
#pragma once

#include "rows/formats/floats.h"

namespace rec_kernels {
inline namespace RK_ISA {

// A row's grid as stored, and the factor that converts x - bias to steps. With F a register: those of several rows.
template <class F>
struct AffineGridOf {
  F scale, bias, inverse;
};
using AffineGrid = AffineGridOf<float>;

#if !RK_CONVERTS_HALVES
// The nearest half at or below x, and the nearest at or above it.
RK_HOST_DEVICE uint32_t half_below(float x) {
  const uint32_t h = Fp16::encode<false>(x, 0u);
  if (!(Fp16::decode(h) > x)) return h;
  return h & 0x8000u ? h + 1 : h - 1;
}
RK_HOST_DEVICE uint32_t half_above(float x) {
  const uint32_t h = Fp16::encode<false>(x, 0u);
  if (!(Fp16::decode(h) < x)) return h;
  return h & 0x8000u ? h - 1 : h + 1;
}
#endif

template <int kCodeBits>
struct Affine {
  static constexpr int kBits = kCodeBits;
  static constexpr uint32_t kMaxCode = (1u << kBits) - 1;
  static constexpr int kGridBytes = kBits == 8 ? 8 : 4;

  RK_HOST_DEVICE static int64_t code_bytes(int64_t D) { return ceil_div(D * kBits, 8); }
  RK_HOST_DEVICE static int64_t row_bytes(int64_t D) { return code_bytes(D) + kGridBytes; }

  // Grid of a row with values in [low, high]; NaN if the row cannot be encoded.
  template <bool kStochastic>
  RK_HOST_DEVICE static AffineGrid grid(float low, float high) {
    AffineGrid g;
    if constexpr (kBits == 8) {
      g = grid_of_bytes<kStochastic>(low, high);
    } else {
      const uint32_t bias = kStochastic ? half_below(low) : Fp16::encode<false>(low, 0u);
      g.bias = Fp16::decode(bias);
      const float range = high - g.bias, exact = range / static_cast<float>(kMaxCode);
      g.scale = Fp16::decode(kStochastic ? half_above(exact) : Fp16::encode<false>(exact, 0u));
      const bool no_steps = g.scale == 0.0f;
      if (no_steps) g.scale = 1.0f;
      g.inverse = kStochastic && no_steps ? 0.0f : 1.0f / g.scale;
    }
    const float sum = g.scale + g.bias;
    if (!(sum - sum == 0.0f) || !(high - high == 0.0f)) return {float_of(0x7FC00000u), 0.0f, 0.0f};
    return g;
  }
  // The int8 grid of a row that can be encoded.
  template <bool kStochastic, class F>
  RK_HOST_DEVICE static AffineGridOf<F> grid_of_bytes(F low, F high) {
    const F range = high - low, scale = range / 255.0f;
    if constexpr (kStochastic) return {scale, low, scale < 0x1p-126f ? F{} : 1.0f / scale};
    else return {scale, low, 255.0f / (range + 1e-8f)};
  }

  // The code of x; 0 for NaN, as in rows that cannot be encoded.
  template <bool kStochastic, class F, class U>
  RK_HOST_DEVICE static U encode(F x, const AffineGrid& g, U word) {
    const F steps = larger((x - g.bias) * g.inverse, F{});
    return steps_on_grid<kStochastic>(smaller(steps, F{} + static_cast<float>(kMaxCode)), word);
  }
  // encode() without clamping, for rows that can be encoded. With stochastic rounding no value is below the bias. With
  // rounding to nearest, the bias of the int8 grid is the row's minimum, and its maximum is at most 2^-14 steps above
  // the last code.
  template <bool kStochastic, class F, class U>
  RK_HOST_DEVICE static U encode_held(F x, const AffineGrid& g, U word) {
    const F steps = (x - g.bias) * g.inverse;
    if constexpr (kStochastic) return steps_on_grid<true>(smaller(steps, F{} + static_cast<float>(kMaxCode)), word);
    else if constexpr (kBits == 8) return to_nearest_word(steps);
    else return encode<false>(x, g, word);
  }

  template <class F>
  RK_HOST_DEVICE static F decode(F code, F scale, F bias) {
    return LanesOf<F>::fused(code, scale, bias);
  }
};

using Int8 = Affine<8>;
using Int4 = Affine<4>;
using Int2 = Affine<2>;

}  // namespace RK_ISA
}  // namespace rec_kernels
