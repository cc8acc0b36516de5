// Batched search for the slots of rows in a row cache, for the kernels of one instruction set.
#pragma once

#include "core/cpu/simd.h"
#include "row_cache/places.h"

namespace rec_kernels {
inline namespace RK_ISA {

// matching_ways() of places.h, vectorized for the default number of ways.
RK_HOST_DEVICE uint32_t matching_ways_simd(const uint8_t* marks, int64_t n, uint8_t mark) {
#if defined(__AVX2__)
  if (n == 32) {
    const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(marks));
    return static_cast<uint32_t>(
        _mm256_movemask_epi8(_mm256_cmpeq_epi8(all, _mm256_set1_epi8(static_cast<char>(mark)))));
  }
#endif
  return matching_ways(marks, n, mark);
}

// A software pipeline of three stages over groups of rows: prefetch marks; compare marks and prefetch tags; compare
// tags. While one group is in a stage, the memory of the following groups is being fetched.
class SlotFinder {
 public:
  // `place` belongs to a cached table.
  RK_HOST_DEVICE SlotFinder(const CacheView& cache, const CachePlace& place)
      : cache_(cache), place_(place), ways_per_mask_(cache.ways < kWaysAtOnce ? cache.ways : kWaysAtOnce) {}

  // slots[i] = the slot of the i-th of `count` linear rows, or -1. read(first, n, rows) writes rows [first, first + n).
  template <class Read>
  RK_HOST_DEVICE void find(int64_t count, const Read& read, int64_t* slots) const {
    Group groups[3];
    const int64_t last = (count + kGroup - 1) / kGroup;
    for (int64_t i = 0; i < last + 2; ++i) {
      if (i < last) {
        Group& g = groups[i % 3];
        g.begin = i * kGroup;
        g.count = count - g.begin < kGroup ? count - g.begin : kGroup;
        read(g.begin, g.count, g.rows);
        prefetch_marks(&g);
      }
      if (i >= 1 && i <= last) prefetch_tags(&groups[(i - 1) % 3]);
      if (i >= 2) compare_tags(groups[(i - 2) % 3], slots);
    }
  }

 private:
  static constexpr int64_t kGroup = 32;

  struct Group {
    int64_t begin, count;
    int64_t rows[kGroup], set_starts[kGroup];  // set_starts: first slot of the row's set
    uint64_t hashes[kGroup];
    uint32_t matches[kGroup];  // bit mask of ways whose mark matches
  };

  // Hashes have a loop of their own, which compilers vectorize.
  RK_HOST_DEVICE void prefetch_marks(Group* g) const {
    for (int64_t j = 0; j < g->count; ++j) g->hashes[j] = fmix64(static_cast<uint64_t>(g->rows[j]));
    for (int64_t j = 0; j < g->count; ++j) {
      g->set_starts[j] = place_.set(g->rows[j], g->hashes[j]) * cache_.ways;
      prefetch_bytes(cache_.marks + g->set_starts[j], ways_per_mask_);
    }
  }
  // Prefetches two tags: if several marks match, the row is usually in one of the first two ways.
  RK_HOST_DEVICE void prefetch_tags(Group* g) const {
    for (int64_t j = 0; j < g->count; ++j) {
      const int64_t first = g->set_starts[j];
      const uint32_t found =
          matching_ways_simd(cache_.marks + first, ways_per_mask_, static_cast<uint8_t>(g->hashes[j]));
      g->matches[j] = found;
      if (!found) continue;
      const uint32_t others = found & (found - 1);
      prefetch_line(cache_.tags + first + lowest_bit(found));
      prefetch_line(cache_.tags + first + lowest_bit(others ? others : found));
    }
  }
  RK_HOST_DEVICE void compare_tags(const Group& g, int64_t* slots) const {
    for (int64_t j = 0; j < g.count; ++j) slots[g.begin + j] = slot_of(g.rows[j], g.set_starts[j], g.matches[j]);
  }
  RK_HOST_DEVICE int64_t slot_of(int64_t row, int64_t first, uint32_t matches) const {
    for (; matches; matches &= matches - 1)
      if (cache_.tags[first + lowest_bit(matches)] == row) return first + lowest_bit(matches);
    return cache_.ways <= kWaysAtOnce ? -1 : cache_.slot_of(place_, row);
  }

  const CacheView cache_;  // copies, which stores to slots cannot alias
  const CachePlace place_;
  const int64_t ways_per_mask_;  // number of leading ways of a set that one mask covers
};

}  // namespace RK_ISA
}  // namespace rec_kernels
