// Readers of encoded rows in CUDA kernels: a group of lanes takes a row, a lane four adjacent columns.
#pragma once

#include <type_traits>

#include "core/cuda/group.cuh"
#include "rows/formats/format_list.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Loads kBytes (1, 2, 4 or 8) little-endian bytes: with one load if `aligned`, else the first `count` bytes in a loop,
// which is not unrolled, since the rare path would cost every kernel registers.
template <int kBytes>
using LittleEndian = typename std::conditional<kBytes == 8, uint64_t, uint32_t>::type;

template <int kBytes>
__device__ __forceinline__ LittleEndian<kBytes> load_little(const uint8_t* p, bool aligned, int64_t count = kBytes) {
  if (kBytes == 1) return *p;
  if (aligned) {
    check_alignment(p, kBytes);
    if (kBytes == 2) return *reinterpret_cast<const uint16_t*>(p);
    return *reinterpret_cast<const LittleEndian<kBytes>*>(p);
  }
  LittleEndian<kBytes> word = 0;
  const int here = static_cast<int>(count < kBytes ? count : kBytes);
#pragma unroll 1
  for (int i = 0; i < here; ++i) word |= static_cast<LittleEndian<kBytes>>(p[i]) << 8 * i;
  return word;
}

// Bytes of four columns of a format in its main plane, at most 16, which a lane reads or writes with one access. For
// int2, the two bytes of its scale. kWhole: rows are padded to multiples of four columns.
template <class Format>
struct FourColumns {  // floats
  static constexpr int kBytes = 4 * Format::kBytes;
  static constexpr bool kWhole = false;
};
template <int kBits>
struct FourColumns<Affine<kBits>> {
  static constexpr int kBytes = kBits > 4 ? kBits / 2 : 2;
  static constexpr bool kWhole = false;
};
template <int m>
struct FourColumns<SharedMicroexponents<m>> {
  static constexpr int kBytes = SharedMicroexponents<m>::kMagnitudeWidth / 2;
  static constexpr bool kWhole = true;
};
template <class Element>
struct FourColumns<Microscaling<Element>> {
  static constexpr int kBytes = Element::kBits == 8 ? 4 : 2;
  static constexpr bool kWhole = true;
};

// True if all rows of the table at `first` can be accessed in aligned words of kBytes, four whole columns each.
template <class Format, int kBytes = FourColumns<Format>::kBytes>
__device__ __forceinline__ bool columns_aligned(const uint8_t* first, int64_t D) {
  return (D % 4 == 0 || FourColumns<Format>::kWhole) && Format::row_bytes(D) % kBytes == 0 &&
         reinterpret_cast<uintptr_t>(first) % kBytes == 0;
}

// Undecoded per-row parameters: the grid of Affine.
template <class Format>
struct RawGrid {
  __device__ __forceinline__ void load(const uint8_t*, int64_t, bool) {}
};

template <int kBits>
struct RawGrid<Affine<kBits>> {
  using Format = Affine<kBits>;
  uint32_t scale, bias;

  __device__ __forceinline__ void load(const uint8_t* row, int64_t D, bool aligned) {
    constexpr int kBytes = Format::kGridBytes / 2;
    const uint8_t* grid = row + Format::code_bytes(D);
    scale = load_little<kBytes>(grid, aligned);
    bias = load_little<kBytes>(grid + kBytes, aligned);
  }
};

// Four undecoded columns of a row. Reading has two steps, so that a lane can load several rows before it waits for the
// first: load() only issues loads, decode() converts. `c` is a multiple of 4 and less than the row's D columns; values
// after column D are undefined. `aligned`: columns_aligned() of the table.
template <class Format>
struct RawColumns {  // 16-bit floats
  uint32_t codes[2];

  __device__ __forceinline__ void load(const uint8_t* row, int64_t c, int64_t D, bool aligned) {
    const uint64_t four = load_little<8>(row + 2 * c, aligned, 2 * (D - c));
    codes[0] = static_cast<uint32_t>(four);
    codes[1] = static_cast<uint32_t>(four >> 32);
  }
  __device__ __forceinline__ Vec4 decode(int64_t, const RawGrid<Format>&) const {
    Vec4 out;
    for (int j = 0; j < 4; ++j) out.v[j] = Format::decode(codes[j / 2] >> 16 * (j % 2) & 0xFFFFu);
    return out;
  }
};

template <>
struct RawColumns<Fp32> {
  Vec4 x;

  __device__ __forceinline__ void load(const uint8_t* row, int64_t c, int64_t D, bool aligned) {
    const auto* from = reinterpret_cast<const float*>(row) + c;
    if (aligned) {
      x = load_columns(from, 0, 4, true);
      return;
    }
    check_alignment(from, sizeof(float));
    const int last = D - c < 4 ? static_cast<int>(D - c) - 1 : 3;
#pragma unroll
    for (int j = 0; j < 4; ++j) x.v[j] = from[j < last ? j : last];
  }
  __device__ __forceinline__ Vec4 decode(int64_t, const RawGrid<Fp32>&) const { return x; }
};

template <int kBits>
struct RawColumns<Affine<kBits>> {
  using Format = Affine<kBits>;
  uint32_t codes;

  __device__ __forceinline__ void load(const uint8_t* row, int64_t c, int64_t D, bool aligned) {
    codes = load_little<kBits / 2>(row + c * kBits / 8, aligned, Format::code_bytes(D - c));
  }
  __device__ __forceinline__ Vec4 decode(int64_t, const RawGrid<Format>& grid) const {
    float scale, bias;
    if constexpr (kBits == 8) {
      scale = float_of(grid.scale);
      bias = float_of(grid.bias);
    } else {
      scale = Fp16::decode(grid.scale);
      bias = Fp16::decode(grid.bias);
    }
    Vec4 out;
    for (int j = 0; j < 4; ++j) out.v[j] = Format::decode(to_float(codes >> j * kBits & Format::kMaxCode), scale, bias);
    return out;
  }
};

template <int m>
struct RawColumns<SharedMicroexponents<m>> {
  using Format = SharedMicroexponents<m>;
  uint32_t codes, signs, exponent, pairs;

  __device__ __forceinline__ void load(const uint8_t* row, int64_t c, int64_t D, bool aligned) {
    constexpr int kWidth = Format::kMagnitudeWidth;
    const uint8_t* block = row + Format::exponents(D) + c / Format::kBlock;
    codes = load_little<kWidth / 2>(row + c * kWidth / 8, aligned);
    signs = 0;
    if constexpr (Format::kSignPlane) signs = row[Format::signs(D) + c / 8];
    exponent = block[0];
    pairs = block[Format::blocks(D)];
  }
  __device__ __forceinline__ Vec4 decode(int64_t c, const RawGrid<Format>&) const {
    constexpr int kWidth = Format::kMagnitudeWidth;
    const uint32_t here = signs >> c % 8, bits = pairs >> c % Format::kBlock / 2;
    Vec4 out;
    for (int j = 0; j < 4; ++j) {
      const uint32_t code = codes >> j * kWidth, sign = Format::kSignPlane ? here >> j : code >> 7;
      out.v[j] = Format::decode(code & Format::kMaxMagnitude, sign << 31, exponent, bits >> j / 2 & 1);
    }
    return out;
  }
};

template <class Element>
struct RawColumns<Microscaling<Element>> {
  using Format = Microscaling<Element>;
  uint32_t low, high, scale;

  __device__ __forceinline__ void load(const uint8_t* row, int64_t c, int64_t D, bool aligned) {
    scale = row[Format::scales(D) + c / Format::kBlock];
    if constexpr (Element::kBits == 8) low = load_little<4>(row + c, aligned);
    else low = load_little<2>(row + c / 2, aligned);
    high = 0;
    if constexpr (Element::kBits == 6) high = row[Format::high_bits(D) + c / 4];
  }
  __device__ __forceinline__ Vec4 decode(int64_t, const RawGrid<Format>&) const {
    const float factor = Format::factor(scale);
    Vec4 out;
    for (int j = 0; j < 4; ++j) {
      const uint32_t code = Element::kBits == 8 ? low >> 8 * j & 255 : (low >> 4 * j & 15) | (high >> 2 * j & 3) << 4;
      out.v[j] = Element::decode(code) * factor;
    }
    return out;
  }
};

// Eight adjacent undecoded columns of a row, which share an exponent, for one lane of a lookup. `first` is a multiple
// of 8.
template <class Format>
struct RawEightColumns;

template <int m>
struct RawEightColumns<SharedMicroexponents<m>> {
  using Format = SharedMicroexponents<m>;
  static constexpr int kWidth = Format::kMagnitudeWidth;
  static constexpr int kBytes = kWidth < 4 ? kWidth : 4;  // of a word of the first plane
  uint32_t codes[kWidth == 8 ? 2 : 1], signs, exponent, pairs;

  __device__ __forceinline__ void load(const uint8_t* row, uint32_t first, uint32_t D, bool aligned) {
    const uint32_t last = (D - 1) & ~7u, c = first < last ? first : last, block = c / Format::kBlock;
    const auto exponents = static_cast<uint32_t>(Format::exponents(D)),
               blocks = static_cast<uint32_t>(Format::blocks(D));
    codes[0] = load_little<kBytes>(row + c * kWidth / 8, aligned);
    if constexpr (kWidth == 8) codes[1] = load_little<kBytes>(row + (c + 4), aligned);
    if constexpr (Format::kSignPlane) signs = row[static_cast<uint32_t>(Format::signs(D)) + c / 8];
    exponent = row[exponents + block];
    pairs = row[exponents + blocks + block];
  }
  // Steps are powers of two, so products are exact. The step of a block of NaNs is NaN without a sign.
  __device__ __forceinline__ void decode(uint32_t first, Vec4 (&x)[2]) const {
    const bool nan = exponent == 255u;
    const uint32_t one = 1, none = 0, sign = nan ? 0u : kSignBit;
    const float high = float_of(nan ? 0x7FC00000u : Format::step_field(exponent, none) << 23);
    const float low = float_of(nan ? 0x7FC00000u : Format::step_field(exponent, one) << 23);
    const uint32_t bits = pairs >> first % Format::kBlock / 2;
    for (int i = 0; i < 8; ++i) {
      constexpr int kEach = kWidth == 8 ? 4 : 8;  // codes per word
      const uint32_t code = codes[i / kEach] >> kWidth * (i % kEach) & Format::kMaxMagnitude;
      const uint32_t signed_code = kWidth == 8 ? codes[i / kEach] << (24 - 8 * (i % kEach)) : signs << (31 - i);
      const float step = bits & 1u << i / 2 ? low : high;
      x[i / 4].v[i % 4] = float_of(bits_of(to_float(code) * step) | (signed_code & sign));
    }
  }
};

// The undecoded columns of a row for one lane of G: kBlocks blocks of four starting at `first`; past the end of the
// row, its last four columns. Loads are unconditional: nvcc would turn conditions into branches or copies that wait for
// the data, and delay the loads of the next row. Column indices have 32 bits, since a lane keeps several in registers.
template <class Format, int G, int kBlocks>
struct RawRow {
  RawGrid<Format> grid;
  RawColumns<Format> columns[kBlocks];

  __device__ __forceinline__ void load(const uint8_t* row, uint32_t first, uint32_t D, bool aligned) {
    grid.load(row, D, aligned);
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) columns[k].load(row, column(first, k, D), D, aligned);
  }
  __device__ __forceinline__ void decode(uint32_t first, Vec4 (&x)[kBlocks]) const {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) x[k] = columns[k].decode(first + k * 4 * G, grid);
  }

 private:
  __device__ __forceinline__ static uint32_t column(uint32_t first, int k, uint32_t D) {
    const uint32_t c = first + k * 4 * G, last = (D - 1) & ~3u;
    return c < last ? c : last;
  }
};

// Loads and decodes four columns of a row in one call.
template <class Format>
struct ColumnReader {
  const uint8_t* row;
  int64_t D;
  bool aligned;
  RawGrid<Format> grid;

  __device__ __forceinline__ ColumnReader(const uint8_t* row, int64_t D, bool aligned)
      : row(row), D(D), aligned(aligned) {
    grid.load(row, D, aligned);
  }
  __device__ __forceinline__ Vec4 read(int64_t c) const {
    RawColumns<Format> x;
    x.load(row, c, D, aligned);
    return x.decode(c, grid);
  }
};

}  // namespace RK_ISA

// with_widths() for rows of floats, with_few_widths() for others.
template <class Format, class Body>
void with_widths_of(int64_t max_dim, const Body& body) {
  if constexpr (std::is_same<Format, Fp32>::value) with_widths(max_dim, body);
  else with_few_widths(max_dim, body);
}

}  // namespace rec_kernels
