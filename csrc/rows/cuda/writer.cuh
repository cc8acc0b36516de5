// Writers of encoded rows in CUDA kernels: a group of lanes takes a row, a lane four adjacent columns.
#pragma once

#include "core/philox.h"
#include "rows/cuda/reader.cuh"

namespace rec_kernels {
inline namespace RK_ISA {

// Stores kBytes (1, 2, 4 or 8) bytes: with one store if `aligned`, else the first `count` bytes in a loop, which is not
// unrolled, since the rare path would cost every kernel registers.
template <int kBytes>
__device__ __forceinline__ void store_little(uint8_t* p, LittleEndian<kBytes> word, bool aligned,
                                             int64_t count = kBytes) {
  if (kBytes > 1 && aligned) {
    check_alignment(p, kBytes);
    if (kBytes == 2) *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(word);
    else *reinterpret_cast<LittleEndian<kBytes>*>(p) = word;
    return;
  }
  const int here = static_cast<int>(count < kBytes ? count : kBytes);
#pragma unroll 1
  for (int i = 0; i < here; ++i) p[i] = static_cast<uint8_t>(word >> 8 * i);
}

// Stores columns c .. c+3 of a row of D values, rounded to the nearest fp16 or bf16.
__device__ __forceinline__ void store_halves(uint8_t* row, int64_t c, int64_t D, bool is_fp16, const Vec4& x) {
  if (c >= D) return;
  uint64_t codes = 0;
  for (int j = 0; j < 4; ++j) {
    const uint32_t half = is_fp16 ? Fp16::encode<false>(x.v[j], uint32_t{0}) : Bf16::encode<false>(x.v[j], uint32_t{0});
    codes |= uint64_t{half} << 16 * j;
  }
  store_little<8>(row + 2 * c, codes, columns_aligned<Fp16>(row, D), 2 * (D - c));
}

// Rounding mode of rows. It is uniform over a launch, so a branch is cheap, and separate kernels would double the code.
struct Rounding {
  Noise noise;
  bool round_up;  // scale rule "rceil"; else "floor"
  bool stochastic;
};

// Rounding of rows that an update writes back: stochastic, with the step's noise and scales rounded up, or to nearest.
// A null seed is 0. Callers pass Part::whole_row() as row indices; computing them here would cost registers.
__device__ __forceinline__ Rounding update_rounding(const int64_t* seed, const int64_t* step, const TableShard& shard,
                                                    bool stochastic) {
  return {make_noise(seed ? *seed : 0, *step, {shard.table, shard.first_block, 0}), stochastic, stochastic};
}

__device__ __forceinline__ PhiloxWords words_of(const Rounding& how, int64_t number, int64_t c) {
  if (how.stochastic) return noise_words(how.noise, number, static_cast<uint32_t>(c / 4));
  return {};
}

// The code of a value: `args` are those of the format's encode(), the last one its noise word.
template <class Format, class... Args>
__device__ __forceinline__ uint32_t code_of(const Rounding& how, const Args&... args) {
  return how.stochastic ? Format::template encode<true>(args...) : Format::template encode<false>(args...);
}

// Maximum over `lanes` adjacent lanes of a group; `lanes` is a power of two.
__device__ __forceinline__ uint32_t largest_of(uint32_t x, int lanes, unsigned mask) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(mask, x, distance, lanes);
    x = x > other ? x : other;
  }
  return x;
}

// ColumnWriter<Format, G>: a group of G lanes writes a row. If kScans, scan() must see all columns before write(). All
// lanes of the group call scan() and write() equally often, for c = 4 * lane, + 4 * G, ... until the last column is
// covered; columns after it are zeros. A row that cannot be encoded decodes to NaN, and close_scan() reports it. With D
// = 0 nothing is written.
template <class Format, int G>
struct ColumnWriter {  // floats
  static constexpr bool kScans = false;
  const Group<G>& group;
  Rounding how;
  int64_t number, D;
  uint8_t* row;
  bool aligned;

  __device__ __forceinline__ void write(int64_t c, const Vec4& x) {
    if (c >= D) return;
    const auto words = words_of(how, number, c);
    if constexpr (Format::kBytes == 4) {
      Vec4 out;
      for (int j = 0; j < 4; ++j) out.v[j] = float_of(code_of<Format>(how, x.v[j], words.word[j]));
      store_columns(reinterpret_cast<float*>(row), c, D, aligned, out);
    } else {
      uint64_t codes = 0;
      for (int j = 0; j < 4; ++j) codes |= static_cast<uint64_t>(code_of<Format>(how, x.v[j], words.word[j])) << 16 * j;
      store_little<8>(row + 2 * c, codes, aligned, 2 * (D - c));
    }
  }
};

template <int kBits, int G>
struct ColumnWriter<Affine<kBits>, G> {
  using Format = Affine<kBits>;
  static constexpr bool kScans = true;
  const Group<G>& group;
  Rounding how;
  int64_t number, D;
  uint8_t* row;
  bool aligned;
  float low = __builtin_inff(), high = -__builtin_inff();
  uint32_t largest = 0, first_zero = 0xffffffffu;  // column << 1 | sign
  AffineGrid grid = {};

  __device__ __forceinline__ void scan(int64_t c, const Vec4& x) {
    for (int j = 0; j < 4; ++j) {
      if (c + j >= D) continue;
      low = x.v[j] < low ? x.v[j] : low;
      high = x.v[j] > high ? x.v[j] : high;
      const uint32_t bits = bits_of(x.v[j]), magnitude = bits & kMagnitudeBits;
      largest = magnitude > largest ? magnitude : largest;
      const uint32_t zero = static_cast<uint32_t>(c + j) << 1 | bits >> 31;
      if (magnitude == 0 && zero < first_zero) first_zero = zero;
    }
  }

  // Called after the last scan(): computes the grid, which one lane writes.
  __device__ __forceinline__ bool close_scan() {
    for (int distance = G / 2; distance > 0; distance /= 2) {
      const float other_low = __shfl_xor_sync(group.mask, low, distance, G);
      const float other_high = __shfl_xor_sync(group.mask, high, distance, G);
      low = other_low < low ? other_low : low;
      high = other_high > high ? other_high : high;
    }
    largest = largest_of(largest, G, group.mask);
    first_zero = ~largest_of(~first_zero, G, group.mask);
    // If low or high is zero, it gets the sign of the row's first zero.
    const float zero = float_of(first_zero << 31);
    const bool finite = largest < kInfinityBits;
    if (low == 0.0f) low = zero;
    if (high == 0.0f) high = zero;
    if (!finite) high = __builtin_inff();
    grid = how.stochastic ? Format::template grid<true>(low, high) : Format::template grid<false>(low, high);
    if (group.lane == 0 && D > 0) {
      uint8_t* p = row + Format::code_bytes(D);
      if constexpr (kBits == 8) {
        store_little<4>(p, bits_of(grid.scale), aligned);
        store_little<4>(p + 4, bits_of(grid.bias), aligned);
      } else {
        store_little<2>(p, Fp16::encode<false>(grid.scale, 0u), aligned);
        store_little<2>(p + 2, Fp16::encode<false>(grid.bias, 0u), aligned);
      }
    }
    return finite;
  }

  __device__ __forceinline__ void write(int64_t c, const Vec4& x) {
    if (c >= D) return;
    const auto words = words_of(how, number, c);
    uint32_t codes = 0;
    for (int j = 0; j < 4; ++j)
      if (c + j < D) codes |= code_of<Format>(how, x.v[j], grid, words.word[j]) << j * kBits;
    store_little<kBits / 2>(row + c * kBits / 8, codes, aligned, Format::code_bytes(D - c));
  }
};

template <int m, int G>
struct ColumnWriter<SharedMicroexponents<m>, G> {
  using Format = SharedMicroexponents<m>;
  static constexpr bool kScans = false;
  static constexpr int kLanes = Format::kBlock / 4;  // lanes per block
  const Group<G>& group;
  Rounding how;
  int64_t number, D;
  uint8_t* row;
  bool aligned;

  __device__ __forceinline__ void write(int64_t c, const Vec4& x) {
    constexpr int kWidth = Format::kMagnitudeWidth;
    uint32_t needed[2];
    for (int p = 0; p < 2; ++p) {
      const uint32_t a = bits_of(x.v[2 * p]) & kMagnitudeBits, b = bits_of(x.v[2 * p + 1]) & kMagnitudeBits;
      needed[p] = Format::pair_exponent(a > b ? a : b, how.round_up);
    }
    const uint32_t exponent = largest_of(needed[0] > needed[1] ? needed[0] : needed[1], kLanes, group.mask);
    const auto words = words_of(how, number, c);
    uint32_t codes = 0, signs = 0, pairs = 0;
    for (int j = 0; j < 4 && exponent != 255; ++j) {
      const uint32_t bit = Format::pair_bit(exponent, needed[j / 2]), sign = bits_of(x.v[j]) >> 31;
      const uint32_t step = Format::step_field(exponent, bit);
      codes |= code_of<Format>(how, x.v[j], step, words.word[j]) << j * kWidth;
      if constexpr (Format::kSignPlane) signs |= sign << j;
      else codes |= sign << (j * kWidth + 7);
      pairs |= bit << j / 2;
    }
    // Two adjacent lanes share a sign byte, and four lanes a pair byte.
    const int in_block = static_cast<int>(c / 4 % kLanes);
    signs = combine(signs << 4 * (in_block % 2), 2);
    pairs = combine(pairs << 2 * in_block, kLanes);
    const int64_t block = c / Format::kBlock;
    if (block >= Format::blocks(D)) return;
    store_little<kWidth / 2>(row + c * kWidth / 8, codes, aligned);
    if (Format::kSignPlane && in_block % 2 == 0) row[Format::signs(D) + c / 8] = static_cast<uint8_t>(signs);
    if (in_block == 0) {
      row[Format::exponents(D) + block] = static_cast<uint8_t>(exponent);
      row[Format::pairs(D) + block] = static_cast<uint8_t>(pairs);
    }
  }

 private:
  __device__ __forceinline__ uint32_t combine(uint32_t bits, int lanes) const {
    for (int distance = lanes / 2; distance > 0; distance /= 2)
      bits |= __shfl_xor_sync(group.mask, bits, distance, lanes);
    return bits;
  }
};

// G must be at least eight, the lanes of a block.
template <class Element, int G>
struct ColumnWriter<Microscaling<Element>, G> {
  using Format = Microscaling<Element>;
  static constexpr bool kScans = false;
  static constexpr int kLanes = Format::kBlock / 4;
  static_assert(G >= kLanes);
  const Group<G>& group;
  Rounding how;
  int64_t number, D;
  uint8_t* row;
  bool aligned;

  __device__ __forceinline__ void write(int64_t c, const Vec4& x) {
    uint32_t largest = 0;
    for (int j = 0; j < 4; ++j) {
      const uint32_t magnitude = bits_of(x.v[j]) & kMagnitudeBits;
      largest = magnitude > largest ? magnitude : largest;
    }
    const uint32_t scale = Format::scale(largest_of(largest, kLanes, group.mask), how.round_up);
    if (c / Format::kBlock >= Format::blocks(D)) return;
    const auto words = words_of(how, number, c);
    uint32_t low = 0, high = 0;
    for (int j = 0; j < 4 && scale != 255; ++j) {
      const uint32_t code = code_of<Element>(how, x.v[j] * Format::inverse(scale), words.word[j]);
      low |= Element::kBits == 8 ? code << 8 * j : (code & 15) << 4 * j;
      high |= code >> 4 << 2 * j;
    }
    if constexpr (Element::kBits == 8) store_little<4>(row + c, low, aligned);
    else store_little<2>(row + c / 2, low, aligned);
    if constexpr (Element::kBits == 6) row[Format::high_bits(D) + c / 4] = static_cast<uint8_t>(high);
    if (c % Format::kBlock == 0) row[Format::scales(D) + c / Format::kBlock] = static_cast<uint8_t>(scale);
  }
};

}  // namespace RK_ISA

// At least eight lanes, which a block of an OCP format needs.
template <class Body>
void with_row_lanes(int64_t D, const Body& body) {
  if (D <= 4 * kFewLanes) body(Constant<kFewLanes>());
  else body(Constant<kWarpSize>());
}

}  // namespace rec_kernels
