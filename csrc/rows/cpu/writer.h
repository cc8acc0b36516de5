// RowsWriter<Format, kStochastic>: encodes float rows.
#pragma once

#include "core/cpu/transpose.h"
#include "core/cpu/wide_philox.h"
#include "rows/cpu/reader.h"
#include "rows/cpu/row_formats.h"

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

// Noise words for rows in ascending order, and within a row for columns in ascending order.
template <bool kStochastic>
class RowNoise {
 public:
  RowNoise(const Noise& noise, const RowPlaces& places, int64_t N, int64_t D)
      : places_(places),
        N_(N),
        D_(D),
        columns_(columns_of(D)),
        random_(noise, columns_ < kWords ? columns_ : 0, streams_to_keep()) {}
  RK_HOST_DEVICE void start(int64_t n) {
    row_ = n;
    const int64_t within = n & (rows_a_draw() - 1);
    first_ = words_ + within * columns_;
    drawn_ = n - within == shared_ ? columns_ : 0;
  }
  // Generates the words of columns c .. c + 4 * kLanes - 1 or c .. c + 15; must be called before at().
  RK_HOST_DEVICE void draw(int64_t c) {
    if (c >= drawn_) draw_more(c);
  }
  // The words of register v of columns c and after.
  RK_HOST_DEVICE WordLanes at(int64_t c, int v) const { return load_as<WordLanes>(first_ + c % kWords + v * kLanes); }

 private:
  static constexpr int kStreams = kLanes == 16 ? 4 : 2, kWords = kStreams * kDrawn;
  static_assert(kWords % (4 * kLanes) == 0 && kWords % kStep == 0, "what is asked for at once is drawn at once");

  // Columns per row in a draw.
  static int columns_of(int64_t D) {
    int columns = kStep;
    while (columns < D && columns < kWords) columns *= 2;
    return columns;
  }
  int64_t rows_a_draw() const { return kWords / columns_; }  // a power of two, as columns_ is
  // Number of streams per row to keep; 0 if too few rows use them.
  int64_t streams_to_keep() const {
    const bool narrow = columns_ < kWords;
    const int64_t draws = narrow ? ceil_div(N_ * columns_, kWords) : N_;
    return draws < 2 ? 0 : (narrow ? ceil_div(columns_, kDrawn) : ceil_div(D_, kWords) * kStreams);
  }
  // Not inlined, to leave registers to the caller.
  __attribute__((noinline)) void draw_more(int64_t c) {
    if (columns_ < kWords) return draw_narrow();
    const int64_t left = D_ - c, row = places_.number(row_);
    if (left <= 2 * kDrawn || kStreams == 2) random_.template draw_columns<2>(row, c, words_);
    else random_.template draw_columns<kStreams>(row, c, words_);
    drawn_ = c + kWords;
  }
  // Rows of at most half as many columns as a draw share a draw.
  void draw_narrow() {
    shared_ = row_ & -rows_a_draw();
    const int64_t rows = N_ - shared_ < rows_a_draw() ? N_ - shared_ : rows_a_draw();
    const DoubleWords numbers = places_.numbers ? load_first(places_.numbers + shared_, static_cast<int>(rows))
                                                : double_word_ramp(1) + static_cast<uint64_t>(places_.number(shared_));
    if (rows * columns_ <= kWords / 2 && kStreams > 2) random_.template draw_rows<2>(numbers, words_);
    else random_.template draw_rows<kStreams>(numbers, words_);
    drawn_ = columns_;
  }

  const RowPlaces& places_;
  int64_t N_, D_, row_ = 0, drawn_ = 0;
  int64_t shared_ = -1;  // first row of a draw shared by several rows
  int columns_;          // columns per row in a draw
  const uint32_t* first_ = words_;
  alignas(64) uint32_t words_[kWords];
  RowWords random_;
};

// Rounding to nearest uses no noise.
template <>
class RowNoise<false> {
 public:
  RowNoise(const Noise&, const RowPlaces&, int64_t, int64_t) {}
  RK_HOST_DEVICE void start(int64_t) {}
  RK_HOST_DEVICE void draw(int64_t) {}
  RK_HOST_DEVICE WordLanes at(int64_t, int) const { return WordLanes{}; }
};

// kBits bits of each of 16 columns, low bits first.
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

// Bits of the largest magnitude in 16 columns.
RK_HOST_DEVICE uint32_t largest_magnitude(const Columns& x) {
  WordLanes largest = {};
  for (int v = 0; v < kStepVecs; ++v) largest = larger_word(largest, bits_of(x.v[v]) & kMagnitudeBits);
  return largest_lane(largest);
}

template <class Format, bool kStochastic>
struct RowWriter {                        // floats
  static constexpr int kColumns = kStep;  // per write

  static bool write(const float* x, int64_t D, [[maybe_unused]] bool round_up, RowNoise<kStochastic>& noise,
                    uint8_t* row) {
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

inline float first_zero(const float* x) {
  while (*x != 0.0f) ++x;
  return *x;
}

// Range of the columns seen so far, per lane.
struct LaneRange {
  FloatLanes low, high;
  FloatLanes finite;  // 0, or NaN if a value was not finite

  RK_HOST_DEVICE void add(FloatLanes x) {
    low = smaller(x, low);
    high = larger(x, high);
    finite = LanesOf<FloatLanes>::fused(x, FloatLanes{}, finite);
  }
};

RK_HOST_DEVICE LaneRange range_of(const float* x, int64_t D) {
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
  return r;
}

// Not inlined: rarely called.
__attribute__((noinline)) bool is_finite(const float* x, int64_t D) { return !any_lane(range_of(x, D).finite != 0.0f); }

template <int kBits, bool kStochastic>
struct RowWriter<Affine<kBits>, kStochastic> {
  using Format = Affine<kBits>;

  // Grids of up to kLanes rows, computed together with one lane per row.
  struct Grids {
    alignas(64) float scale[kLanes], bias[kLanes], inverse[kLanes];

    RK_HOST_DEVICE Grids(const float* x, int64_t count, int64_t D) {
      FloatLanes lows[kLanes], highs[kLanes], finite = {};
      const auto lower = [](FloatLanes a, FloatLanes b) { return smaller(a, b); };
      const auto higher = [](FloatLanes a, FloatLanes b) { return larger(a, b); };
      if (count < kFew) {
        for (int64_t n = 0; n < count; ++n) {
          const LaneRange r = range_of(x + n * D, D);
          set(n, x + n * D, D, reduce_lanes(r.low, lower)[0], reduce_lanes(r.high, higher)[0],
              !any_lane(r.finite != 0.0f));
        }
        return;
      }
      for (int64_t n = 0; n < kLanes; ++n) {
        if (n < count) {
          const LaneRange r = range_of(x + n * D, D);
          lows[n] = r.low;
          highs[n] = r.high;
          finite = finite + r.finite;
        } else {
          lows[n] = highs[n] = FloatLanes{} + 1.0f;
        }
      }
      const FloatLanes low = reduce_each(lows, lower), high = reduce_each(highs, higher);
      const bool all_finite = !any_lane(finite != 0.0f);
      if constexpr (kBits == 8) {
        const AffineGridOf<FloatLanes> g = Format::template grid_of_bytes<kStochastic>(low, high);
        const FloatLanes sum = g.scale + low;
        const IntLanes usual = (low * high != 0.0f) & (sum - sum == 0.0f);
        if (__builtin_expect(all_finite && !any_lane(~usual), 1)) {
          store_as(scale, g.scale);
          store_as(bias, g.bias);
          store_as(inverse, g.inverse);
          return;
        }
      }
      for (int64_t n = 0; n < count; ++n) set(n, x + n * D, D, low[n], high[n], all_finite);
    }
    RK_HOST_DEVICE AffineGrid of(int64_t n) const { return {scale[n], bias[n], inverse[n]}; }

   private:
    static constexpr int64_t kFew = 3;  // up to this many rows are faster one by one

    // If low or high is zero, it gets the sign of the row's first zero.
    void set(int64_t n, const float* x, int64_t D, float low, float high, bool all_finite) {
      const bool finite = all_finite || is_finite(x, D);
      if (low == 0.0f && finite) low = first_zero(x);
      if (high == 0.0f && finite) high = first_zero(x);
      const AffineGrid g = Format::template grid<kStochastic>(low, finite ? high : float_of(kInfinityBits));
      scale[n] = g.scale;
      bias[n] = g.bias;
      inverse[n] = g.inverse;
    }
  };

  // Returns false if the row cannot be encoded because of a NaN or Inf.
  RK_HOST_DEVICE static bool write(const float* x, int64_t D, RowNoise<kStochastic>& noise, const AffineGrid& g,
                                   uint8_t* row) {
    store_grid(g, row + Format::code_bytes(D));
    if (__builtin_expect(g.scale != g.scale, 0)) {
      memset(row, 0, static_cast<size_t>(Format::code_bytes(D)));
      return is_finite(x, D);
    }
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
  static constexpr int kColumns = kStep;

  static bool write(const float* x, int64_t D, [[maybe_unused]] bool round_up, RowNoise<kStochastic>& noise,
                    uint8_t* row) {
    uint8_t *signs = row + Format::signs(D), *exponents = row + Format::exponents(D), *pairs = row + Format::pairs(D);
    for (int64_t c = 0; c < D; c += kStep) {
      const int64_t block = c / kStep;
      noise.draw(c);
      const Columns in = load_columns(x, c, D);
      WordLanes pair[kStepVecs], largest = {}, codes[kStepVecs], sign[kStepVecs], bits[kStepVecs];
      for (int v = 0; v < kStepVecs; ++v) {
        const WordLanes magnitude = bits_of(in.v[v]) & kMagnitudeBits;
        pair[v] = larger_word(magnitude, swap_pairs(magnitude));
        largest = larger_word(largest, pair[v]);
      }
      const uint32_t exponent = Format::pair_exponent(largest_lane(largest), round_up);
      const WordLanes edge = WordLanes{} + Format::lower_pairs(exponent, round_up);
      const FloatLanes long_steps = FloatLanes{} + inverse_step(exponent, 0u),
                       short_steps = FloatLanes{} + inverse_step(exponent, 1u);
      for (int v = 0; v < kStepVecs; ++v) {
        bits[v] = pair[v] < edge ? WordLanes{} + 1u : WordLanes{};
        const FloatLanes steps = magnitude_of(in.v[v]) * (pair[v] < edge ? short_steps : long_steps);
        codes[v] = Format::template encode_scaled<kStochastic>(steps, noise.at(c, v));
        sign[v] = bits_of(in.v[v]) >> 31;
        if constexpr (m == 7) codes[v] |= sign[v] << 7;
      }
      if (__builtin_expect(exponent == 255u, 0))
        for (int v = 0; v < kStepVecs; ++v) codes[v] = sign[v] = WordLanes{};
      store_codes<Format::kMagnitudeWidth>(row + block * 2 * Format::kMagnitudeWidth, codes);
      if constexpr (m != 7) store_as(signs + 2 * block, static_cast<uint16_t>(pack_registers<1>(sign)));
      exponents[block] = static_cast<uint8_t>(exponent);
      pairs[block] = every_second_bit(static_cast<uint32_t>(pack_registers<1>(bits)));
    }
    return true;
  }

 private:
  RK_HOST_DEVICE static float inverse_step(uint32_t exponent, uint32_t bit) {
    return power_of_two<float>(254u - Format::step_field(exponent, bit));
  }

  RK_HOST_DEVICE static uint8_t every_second_bit(uint32_t x) {
#if defined(__BMI2__)
    return static_cast<uint8_t>(_pext_u32(x, 0x5555u));
#else
    x &= 0x5555u;
    x = (x | x >> 1) & 0x3333u;
    x = (x | x >> 2) & 0x0F0Fu;
    return static_cast<uint8_t>(x | x >> 4);
#endif
  }
};

template <class Element, bool kStochastic>
struct RowWriter<Microscaling<Element>, kStochastic> {
  using Format = Microscaling<Element>;
  static constexpr int kColumns = Format::kBlock;

  static bool write(const float* x, int64_t D, [[maybe_unused]] bool round_up, RowNoise<kStochastic>& noise,
                    uint8_t* row) {
    for (int64_t block = 0; block < Format::blocks(D); ++block) {
      const int64_t c = block * Format::kBlock;
      const Columns in[2] = {load_columns(x, c, D), load_columns(x, c + kStep, D)};
      const uint32_t first = largest_magnitude(in[0]), second = largest_magnitude(in[1]);
      const uint32_t scale = Format::scale(first > second ? first : second, round_up);
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

// Prefetches the row about 8 KiB after row n: hardware prefetchers do not cross pages.
RK_HOST_DEVICE void prefetch_next(const float* x, int64_t n, int64_t N, int64_t D) {
  const int64_t row = n + 1 + 2048 / D;
  if (row < N) prefetch_bytes(x + row * D, D * 4);
}

// Encodes the rows of x [N, D]. Returns the first row that the format cannot encode, or N.
template <class Format, bool kStochastic>
struct RowsWriter {
  static int64_t write(const float* x, int64_t N, int64_t D, const RowRounding& how, const RowPlaces& to) {
    const int64_t bytes = Format::row_bytes(D);
    using Writer = RowWriter<Format, kStochastic>;
    // Consecutive float rows are written as one row, except with noise, which depends on the row.
    if (kIsFloats<Format> && !kStochastic && !to.numbers && N > 1) return N * write(x, 1, N * D, how, to);
    RowNoise<kStochastic> noise(how.noise, to, N, ceil_div(D, Writer::kColumns) * Writer::kColumns);
    int64_t bad = N;
    for (int64_t n = 0; n < N; ++n) {
      prefetch_next(x, n, N, D);
      noise.start(n);
      const bool held = Writer::write(x + n * D, D, how.round_up, noise, to.row(n, bytes));
      if (!held && bad == N) bad = n;
    }
    return bad;
  }
};

// Batches of rows whose grids are computed together; they stay in the L1 cache until their codes are written.
template <int kBits, bool kStochastic>
struct RowsWriter<Affine<kBits>, kStochastic> {
  static int64_t write(const float* x, int64_t N, int64_t D, const RowRounding& how, const RowPlaces& to) {
    return D == kStep ? write_rows(x, N, kStep, how, to) : write_rows(x, N, D, how, to);
  }

 private:
  using Writer = RowWriter<Affine<kBits>, kStochastic>;

  RK_HOST_DEVICE static int64_t write_rows(const float* x, int64_t N, int64_t D, const RowRounding& how,
                                           const RowPlaces& to) {
    const int64_t bytes = Affine<kBits>::row_bytes(D), fit = 1 + 2048 / D, most = fit < kLanes ? fit : kLanes;
    RowNoise<kStochastic> noise(how.noise, to, N, D);
    int64_t bad = N;
    for (int64_t first = 0; first < N; first += most) {
      const int64_t count = N - first < most ? N - first : most;
      const typename Writer::Grids grids(x + first * D, count, D);
      for (int64_t n = first; n < first + count; ++n) {
        prefetch_next(x, n, N, D);
        noise.start(n);
        if (!Writer::write(x + n * D, D, noise, grids.of(n - first), to.row(n, bytes)) && bad == N) bad = n;
      }
    }
    return bad;
  }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
