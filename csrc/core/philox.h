// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) on logical coordinates: the
// noise of an element depends on seed, step, table, row and column, never on the thread that generates it.
#pragma once

#include "core/host_device.h"

namespace rec_kernels {

// Position of a shard in the noise of a model: its rows have the noise of the unsharded table.
struct TableShard {
  uint32_t table;        // table index in the model, below 2^16
  uint32_t first_block;  // first column / 4
  int64_t first_row;

  RK_HOST_DEVICE bool operator==(const TableShard& o) const {
    return table == o.table && first_block == o.first_block && first_row == o.first_row;
  }
};

// Noise parameters that all rows of a table share.
struct Noise {
  uint32_t seed_low, seed_high, step;
  uint32_t stream;  // 0: weights; others: low-precision optimizer state and evicted rows
  TableShard shard;
};

// A table index has 16 bits of a counter.
constexpr int64_t kMaxTableId = 65536;
// Maximum rows of a table that have distinct noise.
constexpr int64_t kMaxNoisyRows = INT64_C(1) << 44;

RK_HOST_DEVICE Noise make_noise(int64_t seed, int64_t step, const TableShard& shard = {}) {
  const auto key = static_cast<uint64_t>(seed);
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(step), 0, shard};
}

// Rounding of an encoded row.
struct RowRounding {
  Noise noise;
  bool round_up;  // scale rule "rceil"; else "floor"
};

inline namespace RK_ISA {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u, kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

struct PhiloxWords {
  uint32_t word[4];
};

// One round; core/cpu/wide_philox.h has the vectorized version.
RK_HOST_DEVICE PhiloxWords philox_round(const PhiloxWords& c, uint32_t key0, uint32_t key1) {
  const uint64_t p0 = uint64_t{c.word[0]} * kPhiloxM0, p1 = uint64_t{c.word[2]} * kPhiloxM1;
  return {{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ key0, static_cast<uint32_t>(p1),
           static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ key1, static_cast<uint32_t>(p0)}};
}

// The counters of columns 4 * block .. 4 * block + 3 of a row of the shard.
RK_HOST_DEVICE PhiloxWords noise_counters(const Noise& n, int64_t row, uint32_t block) {
  const auto whole = static_cast<uint64_t>(n.shard.first_row + row);
  const uint32_t place = n.shard.table | n.stream << 16 | static_cast<uint32_t>(whole >> 32) << 20;
  return {{n.shard.first_block + block, static_cast<uint32_t>(whole), place, n.step}};
}

// The words of these columns.
RK_HOST_DEVICE PhiloxWords noise_words(const Noise& n, int64_t row, uint32_t block) {
  PhiloxWords words = noise_counters(n, row, block);
  uint32_t key0 = n.seed_low, key1 = n.seed_high;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    words = philox_round(words, key0, key1);
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  return words;
}

}  // namespace RK_ISA
}  // namespace rec_kernels
