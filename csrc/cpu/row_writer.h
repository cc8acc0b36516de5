// Writing rows: write_row<Format, kStochastic> encodes a row of floats.
#pragma once

#include "cpu/row_formats.h"
#include "cpu/row_reader.h"

namespace rec_kernels {
inline namespace RK_ISA {

RK_HOST_DEVICE Columns load_columns(const float* x, int64_t c, int64_t D) {
  Columns out;
  for (int v = 0; v < kStepVecs; ++v) {
    const int64_t first = c + v * kLanes, left = D - first;
    if (left >= kLanes) out.v[v] = (FloatLanes)Vec::load(x + first).v;
    else if (left > 0) out.v[v] = (FloatLanes)Vec::load_partial(x + first, static_cast<int>(left)).v;
    else out.v[v] = FloatLanes{};
  }
  return out;
}

// A row's noise, for columns in ascending order.
template <bool kStochastic>
class RowNoise {
 public:
  RowNoise(const Noise& noise, int64_t row, int64_t D) : noise_(noise), row_(row), D_(D) {}
  // To be called before the words of columns c .. c + 4 * kLanes - 1 or c .. c + 15 are asked for.
  RK_HOST_DEVICE void draw(int64_t c) {
    if (c >= drawn_) draw_more(c);
  }
  // The words of register v of columns c and after.
  RK_HOST_DEVICE WordLanes at(int64_t c, int v) const { return load_as<WordLanes>(words_ + c % kWords + v * kLanes); }

 private:
  static constexpr int kStreams = kLanes == 16 ? 4 : 2, kWords = kStreams * kDrawn;
  static_assert(kWords % (4 * kLanes) == 0 && kWords % kStep == 0, "what is asked for at once is drawn at once");

  // Not inlined: in place it would keep the registers of who asks from being used.
  __attribute__((noinline)) void draw_more(int64_t c) {
    const auto block = static_cast<uint32_t>(c / 4);
    const int64_t left = D_ - c;
    if (left <= kDrawn && kStep <= kDrawn) draw_words<1>(noise_, row_, block, words_);
    else if (left <= 2 * kDrawn || kStreams == 2) draw_words<2>(noise_, row_, block, words_);
    else draw_words<kStreams>(noise_, row_, block, words_);
    drawn_ = c + kWords;
  }

  const Noise& noise_;
  int64_t row_, D_, drawn_ = 0;
  alignas(64) uint32_t words_[kWords];
};

// Rounding to nearest takes none.
template <>
class RowNoise<false> {
 public:
  RowNoise(const Noise&, int64_t, int64_t) {}
  RK_HOST_DEVICE void draw(int64_t) {}
  RK_HOST_DEVICE WordLanes at(int64_t, int) const { return WordLanes{}; }
};

// bits of all registers of 16 columns, low bits first.
template <int kBits>
RK_HOST_DEVICE uint64_t pack_registers(const WordLanes* codes) {
  uint64_t packed = 0;
  for (int v = 0; v < kStepVecs; ++v) packed |= pack<kBits>(codes[v]) << (kBits * kLanes * v) % 64;
  return packed;
}

// 16 codes of 8, 4 or 2 bits at p.
template <int kBits>
RK_HOST_DEVICE void store_codes(uint8_t* p, const WordLanes* codes) {
  if constexpr (kBits == 8) {
    for (int v = 0; v < kStepVecs; ++v) store_bytes(p + v * kLanes, codes[v]);
  } else if constexpr (kBits == 4) {
    store_as(p, pack_registers<4>(codes));
  } else {
    store_as(p, static_cast<uint32_t>(pack_registers<2>(codes)));
  }
}

// The larger of the magnitudes' bits in 16 columns.
RK_HOST_DEVICE uint32_t largest_magnitude(const Columns& x) {
  WordLanes largest = {};
  for (int v = 0; v < kStepVecs; ++v) largest = larger_word(largest, bits_of(x.v[v]) & kMagnitudeBits);
  return largest_lane(largest);
}

template <class Format, bool kStochastic>
struct RowWriter {  // floats
  static bool write(const float* x, int64_t D, const RowRounding& how, int64_t number, uint8_t* row) {
    RowNoise<kStochastic> noise(how.noise, number, D);
    for (int64_t c = 0; c < D; c += kStep) {
      alignas(64) uint8_t last[kStep * Format::kBytes];
      const bool whole = c + kStep <= D;
      uint8_t *at = row + c * Format::kBytes, *to = whole ? at : last;
      noise.draw(c);
      const Columns in = load_columns(x, c, D);
      for (int v = 0; v < kStepVecs; ++v) {
        const WordLanes code = Format::template encode<kStochastic>(in.v[v], noise.at(c, v));
        if constexpr (Format::kBytes == 4) store_as(to + v * 4 * kLanes, code);
        else store_shorts(to + v * 2 * kLanes, code);
      }
      if (!whole) memcpy(at, last, static_cast<size_t>((D - c) * Format::kBytes));
    }
    return true;
  }
};

struct RowRange {
  float low, high;  // a zero has the sign of the row's first zero
  bool finite;
};

inline float first_zero(const float* x) {
  while (*x != 0.0f) ++x;
  return *x;
}

// Columns seen so far, lane by lane.
struct LaneRange {
  FloatLanes low, high;
  FloatLanes finite;  // 0, or NaN after a number that is not

  RK_HOST_DEVICE void add(FloatLanes x) {
    low = smaller(x, low);
    high = larger(x, high);
    finite = LanesOf<FloatLanes>::fused(x, FloatLanes{}, finite);
  }
};

RK_HOST_DEVICE RowRange range_of(const float* x, int64_t D) {
  const FloatLanes first = FloatLanes{} + x[0];
  LaneRange r = {first, first, FloatLanes{}};
  int64_t c = 0;
  for (; c + 4 * kLanes <= D; c += 4 * kLanes)
    for (int v = 0; v < 4; ++v) r.add((FloatLanes)Vec::load(x + c + v * kLanes).v);
  for (; c + kLanes <= D; c += kLanes) r.add((FloatLanes)Vec::load(x + c).v);
  if (c < D) {
    const auto left = static_cast<int>(D - c);
    const IntLanes present = (IntLanes)word_ramp() < left;
    r.add(present ? (FloatLanes)Vec::load_partial(x + c, left).v : first);
  }
  RowRange row = {reduce_lanes(r.low, [](FloatLanes a, FloatLanes b) { return smaller(a, b); })[0],
                  reduce_lanes(r.high, [](FloatLanes a, FloatLanes b) { return larger(a, b); })[0],
                  !any_lane(r.finite != 0.0f)};
  if (row.low == 0.0f && row.finite) row.low = first_zero(x);
  if (row.high == 0.0f && row.finite) row.high = first_zero(x);
  return row;
}

template <int kBits, bool kStochastic>
struct RowWriter<Affine<kBits>, kStochastic> {
  using Format = Affine<kBits>;

  struct Grid {
    AffineGrid g;
    bool finite;
  };

  static bool write(const float* x, int64_t D, const RowRounding& how, int64_t number, uint8_t* row) {
    return write(x, D, how, number, row, grid_of(x, D));
  }
  RK_HOST_DEVICE static Grid grid_of(const float* x, int64_t D) {
    const RowRange range = range_of(x, D);
    return {Format::template grid<kStochastic>(range.low, range.finite ? range.high : float_of(kInfinityBits)),
            range.finite};
  }
  RK_HOST_DEVICE static bool write(const float* x, int64_t D, const RowRounding& how, int64_t number, uint8_t* row,
                                   const Grid& grid) {
    const AffineGrid& g = grid.g;
    store_grid(g, row + Format::code_bytes(D));
    if (__builtin_expect(g.scale != g.scale, 0)) {
      memset(row, 0, static_cast<size_t>(Format::code_bytes(D)));
      return grid.finite;
    }
    RowNoise<kStochastic> noise(how.noise, number, D);
    int64_t c = 0;
    if constexpr (kBits != 2) {
      for (; c + 4 * kLanes <= D; c += 4 * kLanes) {
        noise.draw(c);
        WordLanes codes[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
          const auto in = (FloatLanes)Vec::load(x + c + v * kLanes).v;
          codes[v] = Format::template encode_held<kStochastic>(in, g, noise.at(c, v));
        }
        store_four<kBits>(row + c * kBits / 8, codes);
      }
    }
    for (; c < D; c += kStep) {
      noise.draw(c);
      const Columns in = load_columns(x, c, D);
      WordLanes codes[kStepVecs];
      for (int v = 0; v < kStepVecs; ++v)
        codes[v] = Format::template encode_held<kStochastic>(in.v[v], g, noise.at(c, v));
      if (D - c >= kStep) store_codes<kBits>(row + c * kBits / 8, codes);
      else store_last(codes, static_cast<int>(D - c), row + c * kBits / 8);
    }
    return true;
  }

 private:
  RK_HOST_DEVICE static void store_grid(const AffineGrid& g, uint8_t* p) {
    if constexpr (kBits == 8) {
      store_as(p, g.scale);
      store_as(p + 4, g.bias);
    } else {
      store_as(p, static_cast<uint16_t>(Fp16::encode<false>(g.scale, 0u)));
      store_as(p + 2, static_cast<uint16_t>(Fp16::encode<false>(g.bias, 0u)));
    }
  }
  static void store_last(WordLanes* codes, int count, uint8_t* p) {
    for (int v = 0; v < kStepVecs; ++v) codes[v] = (IntLanes)word_ramp() + kLanes * v < count ? codes[v] : WordLanes{};
    uint8_t out[kStep];
    store_codes<kBits>(out, codes);
    memcpy(p, out, static_cast<size_t>((count * kBits + 7) / 8));
  }
};

template <int m, bool kStochastic>
struct RowWriter<SharedMicroexponents<m>, kStochastic> {
  using Format = SharedMicroexponents<m>;

  static bool write(const float* x, int64_t D, const RowRounding& how, int64_t number, uint8_t* row) {
    RowNoise<kStochastic> noise(how.noise, number, D);
    uint8_t *signs = row + Format::signs(D), *exponents = row + Format::exponents(D), *pairs = row + Format::pairs(D);
    for (int64_t c = 0; c < D; c += kStep) {
      const int64_t block = c / kStep;
      noise.draw(c);
      const Columns in = load_columns(x, c, D);
      WordLanes needed[kStepVecs], codes[kStepVecs], sign[kStepVecs], bits[kStepVecs];
      const uint32_t exponent = exponents_of(in, how.round_up, needed);
      const WordLanes shared = WordLanes{} + exponent;
      for (int v = 0; v < kStepVecs; ++v) {
        bits[v] = Format::pair_bit(shared, needed[v]);
        const WordLanes step = Format::step_field(shared, bits[v]);
        const WordLanes number_of_steps = Format::template encode<kStochastic>(in.v[v], step, noise.at(c, v));
        codes[v] = exponent == 255 ? WordLanes{} : number_of_steps;
        sign[v] = exponent == 255 ? WordLanes{} : bits_of(in.v[v]) >> 31;
        if constexpr (m == 7) codes[v] |= sign[v] << 7;
      }
      store_codes<Format::kMagnitudeWidth>(row + block * 2 * Format::kMagnitudeWidth, codes);
      if constexpr (m != 7) store_as(signs + 2 * block, static_cast<uint16_t>(pack_registers<1>(sign)));
      exponents[block] = static_cast<uint8_t>(exponent);
      pairs[block] = every_second_bit(static_cast<uint32_t>(pack_registers<1>(bits)));
    }
    return true;
  }

 private:
  RK_HOST_DEVICE static uint32_t exponents_of(const Columns& x, bool round_up, WordLanes* needed) {
    WordLanes largest = {};
    for (int v = 0; v < kStepVecs; ++v) {
      const WordLanes magnitude = bits_of(x.v[v]) & kMagnitudeBits;
      needed[v] = Format::pair_exponent(larger_word(magnitude, swap_pairs(magnitude)), round_up);
      largest = larger_word(largest, needed[v]);
    }
    return largest_lane(largest);
  }

  RK_HOST_DEVICE static uint8_t every_second_bit(uint32_t x) {
    x &= 0x5555u;
    x = (x | x >> 1) & 0x3333u;
    x = (x | x >> 2) & 0x0F0Fu;
    return static_cast<uint8_t>(x | x >> 4);
  }
};

template <class Element, bool kStochastic>
struct RowWriter<Microscaling<Element>, kStochastic> {
  using Format = Microscaling<Element>;

  static bool write(const float* x, int64_t D, const RowRounding& how, int64_t number, uint8_t* row) {
    RowNoise<kStochastic> noise(how.noise, number, D);
    for (int64_t block = 0; block < Format::blocks(D); ++block) {
      const int64_t c = block * Format::kBlock;
      const Columns in[2] = {load_columns(x, c, D), load_columns(x, c + kStep, D)};
      const uint32_t first = largest_magnitude(in[0]), second = largest_magnitude(in[1]);
      const uint32_t scale = Format::scale(first > second ? first : second, how.round_up);
      row[Format::scales(D) + block] = static_cast<uint8_t>(scale);
      for (int half = 0; half < 2; ++half) {
        noise.draw(c + half * kStep);
        WordLanes codes[kStepVecs];
        for (int v = 0; v < kStepVecs; ++v) {
          const FloatLanes scaled = in[half].v[v] * Format::inverse(scale);
          codes[v] = Element::template encode<kStochastic>(scaled, noise.at(c + half * kStep, v));
          if (scale == 255) codes[v] = WordLanes{};
        }
        store(codes, c + half * kStep, D, row);
      }
    }
    return true;
  }

 private:
  RK_HOST_DEVICE static void store(const WordLanes* codes, int64_t c, int64_t D, uint8_t* row) {
    if constexpr (Element::kBits == 8) return store_codes<8>(row + c, codes);
    WordLanes low[kStepVecs], high[kStepVecs];
    for (int v = 0; v < kStepVecs; ++v) {
      low[v] = codes[v] & 15u;
      high[v] = codes[v] >> 4;
    }
    store_codes<4>(row + c / 2, low);
    if constexpr (Element::kBits == 6) store_codes<2>(row + Format::high_bits(D) + c / 4, high);
  }
};

// Rows of x [N, D], of which the first is number `first`, one after the other. Returns the first row that the format
// cannot hold, or N.
template <class Format, bool kStochastic>
struct RowsWriter {
  static int64_t write(const float* x, int64_t N, int64_t D, const RowRounding& how, int64_t first, uint8_t* rows) {
    const int64_t bytes = Format::row_bytes(D);
    int64_t bad = N;
    for (int64_t n = N - 1; n >= 0; --n)
      if (!RowWriter<Format, kStochastic>::write(x + n * D, D, how, first + n, rows + n * bytes)) bad = n;
    return bad;
  }
};

// A row's codes wait for its range: they are written while the next row's is found.
template <int kBits, bool kStochastic>
struct RowsWriter<Affine<kBits>, kStochastic> {
  static int64_t write(const float* x, int64_t N, int64_t D, const RowRounding& how, int64_t first, uint8_t* rows) {
    using Writer = RowWriter<Affine<kBits>, kStochastic>;
    const int64_t bytes = Affine<kBits>::row_bytes(D);
    int64_t bad = N;
    auto grid = Writer::grid_of(x, D);
    for (int64_t n = 0; n < N; ++n) {
      const auto next = n + 1 < N ? Writer::grid_of(x + (n + 1) * D, D) : grid;
      if (!Writer::write(x + n * D, D, how, first + n, rows + n * bytes, grid) && bad == N) bad = n;
      grid = next;
    }
    return bad;
  }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
