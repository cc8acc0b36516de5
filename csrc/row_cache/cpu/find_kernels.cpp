// Finds the rows of ids in a row cache. Compiled once per instruction set: no torch header and no std template here.
//
// Ids are mapped to sets a few at a time, so that the marks of all of them are on their way before the first is
// compared, and then the tags.
#include "core/cpu/simd.h"
#include "embedding_bag/cpu/bag_loop.h"
#include "row_cache/cpu/find.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

constexpr int kAtOnce = 32;
constexpr int64_t kNoRow = -2;  // no tag is that

// Ids [begin, end) of the bags of a feature, with one part.
struct Ids {
  int64_t begin, end;
  const Part* part;
  CachePlace place;  // without sets: not cached
};

// The linear rows of ids; kNoRow of those that do not count, of which bad ones are noted.
template <class Id>
RK_HOST_DEVICE void rows_of(const Bags& bags, const Part& f, const Id* ids, int64_t begin, int64_t count, int64_t* rows,
                            Bounds* bounds) {
  const int64_t padding = bags.padding_of(f);
  for (int64_t j = 0; j < count; ++j) {
    const auto id = static_cast<int64_t>(ids[begin + j]);
    const bool in_range = bags.in_range(id, f);
    if (__builtin_expect(!in_range, 0)) note_bad(bounds, begin + j);
    rows[j] = in_range && id != padding ? f.row_offset + f.row(id) : kNoRow;
  }
}

template <class Id>
void find_ids(const FindSlots& a, const Ids& k, Bounds* bounds) {
  const Bags bags = a.bags;
  const Part f = *k.part;
  const CachePlace place = k.place;
  const int64_t ways = a.cache.ways, *tags = a.cache.tags;
  const int64_t at_once = ways < kWaysAtOnce ? ways : kWaysAtOnce;
  const uint8_t* marks = a.cache.marks;
  int64_t rows[kAtOnce], firsts[kAtOnce], maybe[kAtOnce];
  for (int64_t begin = k.begin; begin < k.end; begin += kAtOnce) {
    const int64_t count = k.end - begin < kAtOnce ? k.end - begin : kAtOnce;
    rows_of(bags, f, static_cast<const Id*>(bags.ids), begin, count, rows, bounds);
    if (place.sets == 0) {
      for (int64_t j = 0; j < count; ++j) a.slots[begin + j] = -1;
      continue;
    }
    for (int64_t j = 0; j < count; ++j) {
      firsts[j] = place.set(rows[j]) * ways;
      prefetch_bytes(marks + firsts[j], at_once);
    }
    for (int64_t j = 0; j < count; ++j) {
      const uint32_t found = marked_ways(marks + firsts[j], at_once, mark_of(rows[j]));
      maybe[j] = found ? firsts[j] + lowest_bit(found) : -1;
      if (found) prefetch_line(tags + maybe[j]);
    }
    for (int64_t j = 0; j < count; ++j) {
      const bool certain = maybe[j] >= 0 ? tags[maybe[j]] == rows[j] : ways <= kWaysAtOnce;
      a.slots[begin + j] = certain ? maybe[j] : a.cache.slot_of(place, rows[j]);
    }
  }
}

void find(const FindSlots& a, int64_t begin, int64_t end, Bounds* bounds) {
  if (!offsets_good(a.bags, begin, end, bounds)) return;
  by_feature(a.bags, a.parts, begin, end, [&](const Part* parts, int64_t count, int64_t from, int64_t to) {
    Ids k{a.bags.offset(from), a.bags.offset(to), parts, {}};
    if (count == 1) k.place = a.cache.places[parts - a.parts];
    if (a.bags.ids64) find_ids<int64_t>(a, k, bounds);
    else find_ids<int32_t>(a, k, bounds);
  });
}

}  // namespace
}  // namespace RK_ISA

template <>
const RowCacheKernels RowCacheKernels::table<CpuIsa::RK_ISA> = {RK_ISA::find};

}  // namespace rec_kernels
