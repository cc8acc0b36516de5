// Mapping of rows to cache sets, tag search and use counts of a row cache (docs/numerics.md, "Row cache"), for the
// kernels of every backend.
#pragma once

#include "core/bits.h"
#include "core/division.h"
#include "core/philox.h"

namespace rec_kernels {

// The sets that may hold rows of a part's table.
struct CachePlace {
  int64_t sets;    // number of sets; 0: the table is not cached
  int64_t first;   // first set
  int64_t offset;  // position of slot 0 in cache_rows if all slots had the table's width
  bool in_turn;    // all rows of the table fit: sets are assigned round-robin, not by hash

  RK_HOST_DEVICE static CachePlace of(int64_t sets, int64_t first, int64_t offset, int64_t ways, int64_t rows) {
    return {sets, first, offset, sets * ways >= rows};
  }
  // True if a slot is in one of the sets. The unsigned comparison excludes slots before the first one.
  RK_HOST_DEVICE bool has(int64_t slot, int64_t ways) const {
    return static_cast<uint64_t>(slot) - static_cast<uint64_t>(first * ways) < static_cast<uint64_t>(sets * ways);
  }
  // Set of a linear row.
  RK_HOST_DEVICE int64_t set(int64_t row) const { return set(row, fmix64(static_cast<uint64_t>(row))); }
  // `hash` is fmix64() of the row.
  RK_HOST_DEVICE int64_t set(int64_t row, uint64_t hash) const {
    const auto n = static_cast<uint64_t>(sets);
    return first + static_cast<int64_t>(in_turn ? static_cast<uint64_t>(row) % n : high_product(hash, n));
  }
};

// Mark of a row: one byte of its hash. Searching marks reads an eighth of the bytes of the tags.
RK_HOST_DEVICE uint8_t mark_of(int64_t row) { return static_cast<uint8_t>(fmix64(static_cast<uint64_t>(row))); }

// Packs at most eight marks into a word, the first one lowest.
RK_HOST_DEVICE uint64_t eight_marks(const uint8_t* marks, int64_t n) {
  uint64_t word = 0;
#if defined(__CUDA_ARCH__)
  if (n >= 8 && reinterpret_cast<uintptr_t>(marks) % 8 == 0) return *reinterpret_cast<const uint64_t*>(marks);
#else
  if (n >= 8) {
    __builtin_memcpy(&word, marks, 8);
    return word;
  }
#endif
  for (int64_t i = 0; i < n && i < 8; ++i) word |= static_cast<uint64_t>(marks[i]) << (8 * i);
  return word;
}

// Ways that one search step compares.
constexpr int64_t kWaysAtOnce = 32;

// Bit mask of the ways, at most kWaysAtOnce, whose mark equals `mark`. It may have false positives, which the tags
// exclude. Branch-free, since the position of a row in its set is unpredictable.
RK_HOST_DEVICE uint32_t match_marks(const uint8_t* marks, int64_t n, uint8_t mark) {
  constexpr uint64_t kOnes = UINT64_C(0x0101010101010101), kGather = UINT64_C(0x0102040810204080);
  uint64_t found = 0;
  for (int64_t first = 0; first < n; first += 8) {
    // Equal bytes become 0, which sets their highest bits; the borrow may also set that of a byte 1 above a 0.
    const uint64_t differ = eight_marks(marks + first, n - first) ^ kOnes * mark;
    const uint64_t zero = (differ - kOnes) & ~differ & (kOnes << 7);
    found |= ((zero >> 7) * kGather >> 56) << first;
  }
  return static_cast<uint32_t>(n < kWaysAtOnce ? found & ((UINT64_C(1) << n) - 1) : found);
}
// match_marks() with the default number of ways as a compile-time constant.
RK_HOST_DEVICE uint32_t matching_ways(const uint8_t* marks, int64_t n, uint8_t mark) {
  return n == kWaysAtOnce ? match_marks(marks, kWaysAtOnce, mark) : match_marks(marks, n, mark);
}

// The way of a set that holds a row, or -1.
RK_HOST_DEVICE int64_t way_of(const int64_t* tags, const uint8_t* marks, int64_t ways, int64_t row) {
  const uint8_t mark = mark_of(row);
  for (int64_t first = 0; first < ways; first += kWaysAtOnce) {
    const int64_t n = ways - first < kWaysAtOnce ? ways - first : kWaysAtOnce;
    uint32_t found = matching_ways(marks + first, n, mark);
    for (; found; found &= found - 1)
      if (tags[first + lowest_bit(found)] == row) return first + lowest_bit(found);
  }
  return -1;
}

// View of a row cache for lookups and updates.
struct CacheView {
  const int64_t* tags;  // per slot; null: no cache
  const uint8_t* marks;
  const CachePlace* places;  // per part
  float* rows;
  uint8_t* dirty;
  int64_t ways;

  // The slot of a linear row of a part, or -1.
  RK_HOST_DEVICE int64_t slot_of(const CachePlace& place, int64_t row) const {
    const int64_t first = place.set(row) * ways;
    const int64_t way = way_of(tags + first, marks + first, ways, row);
    return way < 0 ? -1 : first + way;
  }
};

// Noise stream of evicted rows (docs/numerics.md, "Random numbers").
constexpr uint32_t kEvictionStream = 3;

// Logarithmic use counters: count 16 k + m stands for 2^k (16 + m) - 16 uses.
RK_HOST_DEVICE int64_t uses_of(int count) { return ((INT64_C(16) + (count & 15)) << (count >> 4)) - 16; }

RK_HOST_DEVICE uint8_t halved_count(uint8_t count) {
  const int64_t uses = uses_of(count) / 2;
  int low = 0, high = count;  // binary search for the largest count of at most `uses`
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (uses_of(middle) <= uses) low = middle;
    else high = middle - 1;
  }
  return static_cast<uint8_t>(low);
}

// Salt of an insertion, shared by the random increments of all counts.
RK_HOST_DEVICE uint64_t salt_of(int64_t seed, int64_t clock) {
  return fmix64(static_cast<uint64_t>(seed) + static_cast<uint64_t>(clock));
}
// Count of a linear row after one more use.
RK_HOST_DEVICE uint8_t raised_count(uint8_t count, int64_t row, uint64_t salt) {
  if (count == 255) return count;
  const uint64_t gap = (uint64_t{1} << (count >> 4)) - 1;
  return fmix64(salt + static_cast<uint64_t>(row)) & gap ? count : static_cast<uint8_t>(count + 1);
}

}  // namespace rec_kernels
