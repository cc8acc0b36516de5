// Vectorized Philox (core/philox.h): the noise words of the columns of rows.
#pragma once

#include "core/cpu/simd_words.h"
#include "core/philox.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Columns per register of counters.
constexpr int kDrawn = 2 * kLanes;

// Each word is in the low half of a 64-bit lane, as needed for the products of the next round. High halves are never
// read.
struct WidePhilox {
  DoubleWords word[4];

  RK_HOST_DEVICE void round(uint64_t key0, uint64_t key1) {
    const DoubleWords p0 = multiply_low_halves(word[0], DoubleWords{} + uint64_t{kPhiloxM0});
    const DoubleWords p1 = multiply_low_halves(word[2], DoubleWords{} + uint64_t{kPhiloxM1});
    word[0] = xor_three(p1 >> 32, word[1], DoubleWords{} + key0);
    word[2] = xor_three(p0 >> 32, word[3], DoubleWords{} + key1);
    word[1] = p1;
    word[3] = p0;
  }
  // Performs the last round and writes the words of kDrawn columns to `out`.
  RK_HOST_DEVICE void finish(uint64_t key0, uint64_t key1, uint32_t* out) const {
    const DoubleWords p0 = multiply_low_halves(word[0], DoubleWords{} + uint64_t{kPhiloxM0});
    const DoubleWords p1 = multiply_low_halves(word[2], DoubleWords{} + uint64_t{kPhiloxM1});
    const DoubleWords first = xor_three(swap_halves(p1), word[1] & 0xFFFFFFFFu, DoubleWords{} + key0);
    const DoubleWords second = xor_three(swap_halves(p0), word[3] & 0xFFFFFFFFu, DoubleWords{} + key1);
    DoubleWords low, high;
    weave(first, second, &low, &high);
    store_as(out, low);
    store_as(out + kLanes, high);
  }

 private:
  RK_HOST_DEVICE static DoubleWords swap_halves(DoubleWords x) { return (DoubleWords)swap_lanes<1>((WordLanes)x); }
};

// Rounds 1 to 3 for the counters (block, row, place, step) of a register. After round 1 only the first word depends on
// the row, and rounds 2 and 3 need only its product with kPhiloxM0. Everything else is the same for every row and
// cached.
struct FirstRounds {
  DoubleWords third_of_two, first, third, fourth;

  RK_HOST_DEVICE static FirstRounds of(const Noise& n, uint32_t place, DoubleWords blocks) {
    const DoubleWords m0 = DoubleWords{} + uint64_t{kPhiloxM0}, m1 = DoubleWords{} + uint64_t{kPhiloxM1};
    const uint32_t second_of_one = place * kPhiloxM1;
    const DoubleWords one = multiply_low_halves(blocks, m0);
    const DoubleWords two = multiply_low_halves((one >> 32) ^ uint64_t{n.step ^ n.seed_high}, m1);
    const DoubleWords three = multiply_low_halves((two >> 32) ^ uint64_t{second_of_one ^ key0(n, 1)}, m0);
    return {one ^ uint64_t{key1(n, 1)}, two ^ uint64_t{key0(n, 2)}, (three >> 32) ^ uint64_t{key1(n, 2)}, three};
  }
  // Products of rows with kPhiloxM0; only the lower halves of `rows` are used.
  RK_HOST_DEVICE static DoubleWords products(const Noise& n, uint32_t place, DoubleWords rows) {
    const auto high = static_cast<uint32_t>((uint64_t{place} * kPhiloxM1) >> 32);
    return multiply_low_halves(rows ^ uint64_t{high ^ n.seed_low}, DoubleWords{} + uint64_t{kPhiloxM0});
  }
  // The words after these rounds, given products() of the rows.
  RK_HOST_DEVICE WidePhilox after(DoubleWords products) const {
    const DoubleWords three = multiply_low_halves((products >> 32) ^ third_of_two, DoubleWords{} + uint64_t{kPhiloxM1});
    return {{(three >> 32) ^ first, three, third ^ products, fourth}};
  }

 private:
  RK_HOST_DEVICE static uint32_t key0(const Noise& n, uint32_t round) { return n.seed_low + round * kPhiloxW0; }
  RK_HOST_DEVICE static uint32_t key1(const Noise& n, uint32_t round) { return n.seed_high + round * kPhiloxW1; }
};

// Generates the words of a table's rows. Several independent streams hide the latency of the rounds.
class RowWords {
 public:
  // `columns`: columns per row in a draw shared by several rows, a power of two, or 0. `streams`: number of a row's
  // first streams whose rounds are cached.
  RowWords(const Noise& n, int columns, int64_t streams)
      : noise_(n), columns_(columns), wanted_(streams < kKept ? streams : kKept) {
    while (columns_ > 4 << shift_) ++shift_;
  }

  // Generates the words of kStreams * kDrawn columns of a row, starting at column c, a multiple of kDrawn.
  template <int kStreams>
  RK_HOST_DEVICE void draw_columns(int64_t row, int64_t c, uint32_t* out) {
    const PhiloxWords counters = noise_counters(noise_, row, 0);
    keep(counters.word[2]);
    draw<kStreams>(c / kDrawn, DoubleWords{} + uint64_t{counters.word[1]}, out, [](DoubleWords x, int) { return x; });
  }

  // Generates the words of the first `columns` columns of kStreams * kDrawn / columns rows, whose indices are in the
  // first lanes of `rows`.
  template <int kStreams>
  RK_HOST_DEVICE void draw_rows(DoubleWords rows, uint32_t* out) {
    keep(noise_counters(noise_, static_cast<int64_t>(rows[0]), 0).word[2]);
    const DoubleWords whole = rows + static_cast<uint64_t>(noise_.shard.first_row);
    const DoubleWords apart = (whole ^ whole[0]) >> 32;
    if (__builtin_expect(any_lane((IntLanes)(apart != 0)), 0)) return draw_one_by_one(rows, kStreams * kDrawn, out);
    draw<kStreams>(0, whole, out, [this](DoubleWords x, int i) {
      return shuffle(x, (double_word_ramp(1) + static_cast<uint64_t>(i * kDrawn / 4)) >> shift_);
    });
  }

 private:
  static constexpr int kKept = 16;

  // lanes(row indices, i) returns the lanes of stream i.
  template <int kStreams, class Lanes>
  RK_HOST_DEVICE void draw(int64_t first, DoubleWords rows, uint32_t* out, const Lanes& lanes) const {
    WidePhilox streams[kStreams];
    // A power of two.
    const int period = columns_ > kDrawn ? columns_ / kDrawn : (columns_ ? 1 : kStreams);
    if (first + period <= kept_) {
      const DoubleWords products = FirstRounds::products(noise_, place_, rows);
      for (int i = 0; i < kStreams; ++i)
        streams[i] = kept_rounds_[first + (i & (period - 1))].after(lanes(products, i));
      finish<kStreams, 3>(streams, out);
    } else {
      for (int i = 0; i < kStreams; ++i)
        streams[i] = {{blocks(first + (i & (period - 1))), lanes(rows, i), DoubleWords{} + uint64_t{place_},
                       DoubleWords{} + uint64_t{noise_.step}}};
      finish<kStreams, 0>(streams, out);
    }
  }
  // Performs the rounds after the first kDone and writes the words.
  template <int kStreams, int kDone>
  RK_HOST_DEVICE void finish(WidePhilox* streams, uint32_t* out) const {
    uint32_t key0 = noise_.seed_low + kDone * kPhiloxW0, key1 = noise_.seed_high + kDone * kPhiloxW1;
    for (int round = kDone + 1; round < kPhiloxRounds; ++round) {
      for (int i = 0; i < kStreams; ++i) streams[i].round(key0, key1);
      key0 += kPhiloxW0;
      key1 += kPhiloxW1;
    }
    for (int i = 0; i < kStreams; ++i) streams[i].finish(key0, key1, out + i * kDrawn);
  }
  // The first words of stream s of a row.
  RK_HOST_DEVICE DoubleWords blocks(int64_t s) const {
    DoubleWords of_row = double_word_ramp(1) + static_cast<uint64_t>(s * kDrawn / 4);
    if (columns_) of_row &= static_cast<uint64_t>(columns_ / 4 - 1);
    return of_row + uint64_t{noise_.shard.first_block};
  }
  RK_HOST_DEVICE void keep(uint32_t place) {
    if (__builtin_expect(place != place_, 0)) keep_rounds(place);
  }
  __attribute__((noinline)) void keep_rounds(uint32_t place) {
    place_ = place;
    for (kept_ = 0; kept_ < wanted_; ++kept_) kept_rounds_[kept_] = FirstRounds::of(noise_, place, blocks(kept_));
  }
  // Rows may cross a multiple of 2^32.
  __attribute__((noinline)) void draw_one_by_one(DoubleWords rows, int count, uint32_t* out) const {
    for (int c = 0; c < count; c += 4) {
      const auto row = static_cast<int64_t>(rows[c / columns_]);
      store_as(out + c, noise_words(noise_, row, static_cast<uint32_t>(c % columns_ / 4)));
    }
  }

  const Noise& noise_;
  int columns_, shift_ = 0;  // a row has 2^shift counters in a draw
  int64_t wanted_, kept_ = 0;
  uint32_t place_ = 0xFFFFFFFF;  // place of the cached rounds; never a valid place
  FirstRounds kept_rounds_[kKept];
};

}  // namespace RK_ISA
}  // namespace rec_kernels
