// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) on logical coordinates: the
// noise of a column of a row depends on seed, step, table, row and column, never on who draws it.
#pragma once

#include "core/lanes.h"

namespace rec_kernels {

// What the noise of a table's rows has in common.
struct Noise {
  uint32_t seed_low, seed_high, step;
  uint32_t table;   // of the whole model, below 2^16
  uint32_t stream;  // 0: weights; others: optimizer state kept in low precision
};

// Tables have 16 bits of a counter.
constexpr int64_t kMaxTableId = 65536;

inline Noise make_noise(int64_t seed, int64_t step, int64_t table = 0) {
  const auto key = static_cast<uint64_t>(seed);
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(step),
          static_cast<uint32_t>(table), 0};
}

inline namespace RK_ISA {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u, kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

// Four words, or four vectors of words.
template <class U>
struct PhiloxWords {
  U word[4];
};

template <class U>
RK_HOST_DEVICE PhiloxWords<U> philox(PhiloxWords<U> c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    U high0, low0, high1, low1;
    LanesOf<U>::multiply_wide(c.word[0], kPhiloxM0, &high0, &low0);
    LanesOf<U>::multiply_wide(c.word[2], kPhiloxM1, &high1, &low1);
    c = {{high1 ^ c.word[1] ^ key0, low1, high0 ^ c.word[3] ^ key1, low0}};
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  return c;
}

// The words of columns 4 * block .. 4 * block + 3 of a row.
template <class U>
RK_HOST_DEVICE PhiloxWords<U> noise_words(const Noise& n, int64_t row, U block) {
  const auto low = static_cast<uint32_t>(row), high = static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32);
  const uint32_t place = n.table | n.stream << 16 | high << 20;
  return philox(PhiloxWords<U>{{block, U{} + low, U{} + place, U{} + n.step}}, n.seed_low, n.seed_high);
}

}  // namespace RK_ISA
}  // namespace rec_kernels
