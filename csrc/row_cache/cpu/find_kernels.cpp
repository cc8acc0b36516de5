// Finds the rows of ids in a row cache. Compiled once per instruction set: no torch header and no std template here.
#include "embedding_bag/cpu/bag_loop.h"
#include "embedding_bag/cpu/slot_finder.h"
#include "row_cache/cpu/find.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

constexpr int64_t kNoRow = -2;  // never a tag

// Ids [begin, end) of bags of one feature, and its part.
struct Ids {
  int64_t begin, end;
  const Part* part;
  CachePlace place;  // sets == 0: not cached
};

template <class Id>
void find_ids(const FindSlots& a, const Ids& k, Bounds* bounds) {
  const Bags bags = a.bags;
  const Part f = *k.part;
  const Id* ids = static_cast<const Id*>(bags.ids);
  const int64_t padding = bags.padding_of(f);
  // Linear row of an id, or kNoRow for padding or a bad id, which is recorded.
  const auto row_of = [&](int64_t i) {
    const auto id = static_cast<int64_t>(ids[i]);
    const bool in_range = bags.in_range(id, f);
    if (__builtin_expect(!in_range, 0)) note_bad(bounds, i);
    return in_range && id != padding ? f.row_offset + f.row(id) : kNoRow;
  };
  if (k.place.sets == 0) {
    for (int64_t i = k.begin; i < k.end; ++i) row_of(i);
    for (int64_t i = k.begin; i < k.end; ++i) a.slots[i] = -1;
    return;
  }
  const auto read = [&](int64_t first, int64_t count, int64_t* rows) {
    for (int64_t j = 0; j < count; ++j) rows[j] = row_of(k.begin + first + j);
  };
  SlotFinder(a.cache, k.place).find(k.end - k.begin, read, a.slots + k.begin);
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
