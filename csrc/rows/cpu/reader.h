// RowReader: decodes any 16 adjacent columns of a row into registers.
#pragma once

#include "core/cpu/simd_words.h"
#include "rows/formats/format_list.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Columns per read or write.
constexpr int kStep = 16;
constexpr int kStepVecs = kStep / kLanes;

struct Columns {
  FloatLanes v[kStepVecs];

  RK_HOST_DEVICE static Columns broadcast(float x) {
    Columns out;
    for (int i = 0; i < kStepVecs; ++i) out.v[i] = FloatLanes{} + x;
    return out;
  }
};
RK_HOST_DEVICE Columns operator+(Columns a, const Columns& b) {
  for (int i = 0; i < kStepVecs; ++i) a.v[i] = a.v[i] + b.v[i];
  return a;
}
RK_HOST_DEVICE Columns operator*(Columns a, const Columns& b) {
  for (int i = 0; i < kStepVecs; ++i) a.v[i] = a.v[i] * b.v[i];
  return a;
}
RK_HOST_DEVICE Columns operator/(Columns a, const Columns& b) {
  for (int i = 0; i < kStepVecs; ++i) a.v[i] = a.v[i] / b.v[i];
  return a;
}
RK_HOST_DEVICE Columns fused_multiply_add(const Columns& a, const Columns& b, Columns c) {
  for (int i = 0; i < kStepVecs; ++i) c.v[i] = LanesOf<FloatLanes>::fused(a.v[i], b.v[i], c.v[i]);
  return c;
}

// Copy of the first `bytes` bytes at p, at most 64, padded with zeros.
struct PartialBytes {
  uint8_t bytes[64] = {};
  RK_HOST_DEVICE PartialBytes(const void* p, int64_t count) {
    memcpy(bytes, p, static_cast<size_t>(count < 64 ? count : 64));
  }
};

// The bits of register v of 16 columns of kBits bits each.
template <int kBits>
RK_HOST_DEVICE WordLanes unpack_register(uint64_t packed, int v) {
  return unpack<kBits>(packed >> (kBits * kLanes * v) % 64);
}

// True for formats of plain floats, whose rows are contiguous.
template <class Format>
inline constexpr bool kIsFloats = false;
template <>
inline constexpr bool kIsFloats<Fp32> = true;
template <>
inline constexpr bool kIsFloats<Fp16> = true;
template <>
inline constexpr bool kIsFloats<Bf16> = true;

template <class Format>
struct RowReader {  // floats
  const uint8_t* row;

  RK_HOST_DEVICE RowReader(const uint8_t* row, int64_t) : row(row) {}
  // Reads columns [c, c + 16). kPartial: only `count` of them exist.
  template <bool kPartial>
  RK_HOST_DEVICE Columns read(int64_t c, int64_t count) const {
    const uint8_t* p = row + c * Format::kBytes;
    if constexpr (kPartial) return decode(PartialBytes(p, count * Format::kBytes).bytes);
    return decode(p);
  }

 private:
  RK_HOST_DEVICE static Columns decode(const uint8_t* p) {
    Columns out;
    for (int v = 0; v < kStepVecs; ++v) {
      if constexpr (Format::kBytes == 4) out.v[v] = load_as<FloatLanes>(p + v * 4 * kLanes);
      else out.v[v] = Format::decode(load_shorts(p + v * 2 * kLanes));
    }
    return out;
  }
};

template <int kBits>
struct RowReader<Affine<kBits>> {
  const uint8_t* row;
  float scale, bias;

  RK_HOST_DEVICE RowReader(const uint8_t* row, int64_t D) : row(row) {
    const uint8_t* grid = row + Affine<kBits>::code_bytes(D);
    if constexpr (kBits == 8) {
      scale = load_as<float>(grid);
      bias = load_as<float>(grid + 4);
    } else {
      scale = Fp16::decode(uint32_t{load_as<uint16_t>(grid)});
      bias = Fp16::decode(uint32_t{load_as<uint16_t>(grid + 2)});
    }
  }
  template <bool kPartial>
  RK_HOST_DEVICE Columns read(int64_t c, int64_t count) const {
    const uint8_t* p = row + (c * kBits >> 3);
    if constexpr (kPartial) return decode(PartialBytes(p, (count * kBits + 7) / 8).bytes);
    return decode(p);
  }

 private:
  RK_HOST_DEVICE Columns decode(const uint8_t* p) const {
    Columns out;
    const FloatLanes s = FloatLanes{} + scale, b = FloatLanes{} + bias;
    for (int v = 0; v < kStepVecs; ++v) out.v[v] = Affine<kBits>::decode(to_float(codes(p, v)), s, b);
    return out;
  }
  RK_HOST_DEVICE static WordLanes codes(const uint8_t* p, int v) {
    if constexpr (kBits == 8) return load_bytes(p + v * kLanes);
    if constexpr (kBits == 4) return unpack_register<4>(load_as<uint64_t>(p), v);
    return unpack_register<2>(load_as<uint32_t>(p), v);
  }
};

template <int m>
struct RowReader<SharedMicroexponents<m>> {
  using Format = SharedMicroexponents<m>;
  const uint8_t *magnitudes, *signs, *exponents, *pairs;

  RK_HOST_DEVICE RowReader(const uint8_t* row, int64_t D)
      : magnitudes(row),
        signs(row + Format::signs(D)),
        exponents(row + Format::exponents(D)),
        pairs(row + Format::pairs(D)) {}
  template <bool>
  RK_HOST_DEVICE Columns read(int64_t c, int64_t) const {
    const int64_t block = c / kStep;
    const uint32_t exponent = exponents[block], bits = pairs[block];
    const uint32_t long_step = Format::step_field(exponent, 0u), short_step = Format::step_field(exponent, 1u);
    Columns out;
    for (int v = 0; v < kStepVecs; ++v) {
      const WordLanes magnitude = magnitude_of_register(block, v);
      WordLanes sign;
      if constexpr (m == 7) sign = magnitude << 24;
      else sign = (WordLanes{} + uint32_t{load_as<uint16_t>(signs + 2 * block)}) << (31u - kLanes * v - word_ramp());
      const WordLanes step = choose_by_bit(bits >> (kLanes / 2 * v), long_step << 23, short_step << 23);
      const FloatLanes value = to_float(magnitude & Format::kMaxMagnitude) * float_of(step);
      out.v[v] = float_of(bits_of(value) | (sign & kSignBit));
    }
    if (__builtin_expect(exponent == 255u, 0))
      for (int v = 0; v < kStepVecs; ++v) out.v[v] = float_of(WordLanes{} + 0x7FC00000u);
    return out;
  }

 private:
  RK_HOST_DEVICE WordLanes magnitude_of_register(int64_t block, int v) const {
    if constexpr (m == 7) return load_bytes(magnitudes + block * kStep + v * kLanes);
    if constexpr (m == 4) return unpack_register<4>(load_as<uint64_t>(magnitudes + 8 * block), v);
    return unpack_register<2>(load_as<uint32_t>(magnitudes + 4 * block), v);
  }
};

template <class Element>
struct RowReader<Microscaling<Element>> {
  using Format = Microscaling<Element>;
  const uint8_t *codes, *high, *scales;

  RK_HOST_DEVICE RowReader(const uint8_t* row, int64_t D)
      : codes(row), high(row + Format::high_bits(D)), scales(row + Format::scales(D)) {}
  template <bool>
  RK_HOST_DEVICE Columns read(int64_t c, int64_t) const {
    const FloatLanes factor = FloatLanes{} + Format::factor(uint32_t{scales[c / Format::kBlock]});
    Columns out;
    for (int v = 0; v < kStepVecs; ++v) out.v[v] = Element::decode(code(c, v)) * factor;
    return out;
  }

 private:
  RK_HOST_DEVICE WordLanes code(int64_t c, int v) const {
    if constexpr (Element::kBits == 8) return load_bytes(codes + c + v * kLanes);
    const WordLanes low = unpack_register<4>(load_as<uint64_t>(codes + c / 2), v);
    if constexpr (Element::kBits == 4) return low;
    return low | unpack_register<2>(load_as<uint32_t>(high + c / 4), v) << 4;
  }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
