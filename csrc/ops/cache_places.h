// Where rows may lie in a row cache, and how their uses are counted (docs/numerics.md, "Row cache"): plain structs that
// every backend's kernels read.
#pragma once

#include "core/division.h"
#include "core/philox.h"

namespace rec_kernels {

// MurmurHash3's finalizer (Austin Appleby, public domain).
RK_HOST_DEVICE uint64_t fmix64(uint64_t h) {
  h = (h ^ (h >> 33)) * UINT64_C(0xFF51AFD7ED558CCD);
  h = (h ^ (h >> 33)) * UINT64_C(0xC4CEB9FE1A85EC53);
  return h ^ (h >> 33);
}

// The slots that the rows of a part's table may lie in.
struct CachePlace {
  int64_t sets;    // how many; 0: the table is not cached
  int64_t first;   // of the sets
  int64_t offset;  // of the cache's rows: where slot 0 would lie, were all slots of the table's width
  bool in_turn;    // there is room for all rows of the table, which are dealt out in their order

  RK_HOST_DEVICE static CachePlace of(int64_t sets, int64_t first, int64_t offset, int64_t ways, int64_t rows) {
    return {sets, first, offset, sets * ways >= rows};
  }
  // Of a linear row.
  RK_HOST_DEVICE int64_t set(int64_t row) const {
    const auto key = static_cast<uint64_t>(row), n = static_cast<uint64_t>(sets);
    return first + static_cast<int64_t>(in_turn ? key % n : high_product(fmix64(key), n));
  }
};

// The way of a set's tags that is a row's, or -1. A number of ways that is known beforehand (kWays; else 0) takes a
// handful of instructions: there is no branch, so that compilers look at several at once.
template <int kWays>
RK_HOST_DEVICE int64_t way_of(const int64_t* tags, int64_t ways, int64_t row) {
  int64_t found = 0;
  const int64_t n = kWays ? kWays : ways;
  for (int64_t way = 0; way < n; ++way) found |= tags[way] == row ? way + 1 : 0;
  return found - 1;
}

// A row cache as those see it who look rows up or update them.
struct CacheView {
  const int64_t* tags;       // of the slots; null: there is no cache
  const CachePlace* places;  // of the parts
  float* rows;
  uint8_t* dirty;
  int64_t ways;
};

// The stream of noise of rows that leave (docs/numerics.md, "Random numbers").
constexpr uint32_t kEvictionStream = 3;

// Logarithmic counters of uses: count 16 k + m stands for 2^k (16 + m) - 16 of them.
RK_HOST_DEVICE int64_t uses_of(int count) { return ((INT64_C(16) + (count & 15)) << (count >> 4)) - 16; }

RK_HOST_DEVICE uint8_t halved_count(uint8_t count) {
  const int64_t uses = uses_of(count) / 2;
  int low = 0, high = count;  // the largest that stands for at most so many
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (uses_of(middle) <= uses) low = middle;
    else high = middle - 1;
  }
  return static_cast<uint8_t>(low);
}

// What the chances of an insertion's counts have in common.
RK_HOST_DEVICE uint64_t salt_of(int64_t seed, int64_t clock) {
  return fmix64(static_cast<uint64_t>(seed) + static_cast<uint64_t>(clock));
}
// Of a linear row that is used.
RK_HOST_DEVICE uint8_t raised_count(uint8_t count, int64_t row, uint64_t salt) {
  if (count == 255) return count;
  const uint64_t gap = (uint64_t{1} << (count >> 4)) - 1;
  return fmix64(salt + static_cast<uint64_t>(row)) & gap ? count : static_cast<uint8_t>(count + 1);
}

}  // namespace rec_kernels
