// Lookups of rows of which some are in a row cache. Compiled once per instruction set: no torch header and no std
// template here.
//
// A few bags at a time: rows that are not cached are decoded into memory, so that they and the cached ones are rows of
// one table of floats, which is pooled as any other.
#include "cpu/bag_blocks.h"
#include "cpu/embedding_bag_cached.h"
#include "cpu/embedding_bag_composed.h"
#include "cpu/row_blocks.h"
#include "cpu/row_formats.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// Ids at once: as many decoded rows stay close to the core.
constexpr int64_t kIdsAtOnce = 512;

// The cached rows of a feature and, some whole rows away from them, memory for decoded ones: rows of one table, whose
// numbers count from whichever lies lower.
class RowsInReach {
 public:
  RowsInReach(const PoolArgs& a, const Feature& f)
      : table_(a.weights + f.weight_offset),
        f_(f),
        decode_(RowFormatKernels::table<CpuIsa::RK_ISA>.decode[static_cast<int>(f.format)]),
        cached_(reinterpret_cast<uintptr_t>(a.cache.rows) +
                static_cast<uintptr_t>(4 * a.cache.parts[&f - a.features].cache_row_offset)) {}

  // Makes room for so many decoded rows, in the place of those before.
  void reserve(int64_t rows) {
    const int64_t D = f_.embedding_dim, row = 4 * D;
    if (rows > reserved_) {
      release();
      memory_ = new float[static_cast<uint64_t>((rows + 1) * D)];
      reserved_ = rows;
    }
    const auto distance = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory_) - cached_);
    const int64_t first = distance >= 0 ? (distance + row - 1) / row : -(-distance / row);
    first_cached_ = first < 0 ? -first : 0;
    next_ = first_cached_ + first;
  }
  void release() { delete[] memory_; }

  int64_t number_of_slot(int64_t slot) const { return first_cached_ + slot; }
  // The number that a row of the table has once it is decoded, which is done.
  int64_t decode(int64_t row) {
    const uintptr_t to = start() + static_cast<uintptr_t>(next_ * f_.embedding_dim * 4);
    decode_(table_ + row * f_.row_bytes, f_.embedding_dim, reinterpret_cast<float*>(to));
    return next_++;
  }
  void prefetch(int64_t row) const { prefetch_bytes(table_ + row * f_.row_bytes, f_.row_bytes); }
  // Where row 0 is, or would be.
  uintptr_t start() const { return cached_ - static_cast<uintptr_t>(first_cached_ * f_.embedding_dim * 4); }

 private:
  const uint8_t* table_;
  const Feature& f_;
  RowFormatKernels::Decode decode_;
  uintptr_t cached_;
  float* memory_ = nullptr;
  int64_t reserved_ = 0, first_cached_ = 0, next_ = 0;
};

// The numbers of the rows of ids [start, stop); ids that do not count are left out.
void number_rows(const PoolArgs& a, const Feature& f, int64_t start, int64_t stop, RowsInReach* rows, int64_t* numbers,
                 Bounds* bounds) {
  const Bags& bags = a.bags;
  const int64_t *slots = a.cache.slots + start, count = stop - start;
  int64_t missing = 0;
  for (int64_t i = 0; i < count; ++i) missing += slots[i] < 0;
  if (missing) rows->reserve(missing);
  for (int64_t i = 0; i < count; ++i) numbers[i] = rows->number_of_slot(slots[i]);
  if (missing == 0) return;
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] >= 0) continue;
    const int64_t id = bags.id(start + i);
    const bool in_range = bags.in_range(id, f), counts = in_range && id != bags.padding_idx;
    if (!in_range) note_bad(bounds, 0, start + i);
    numbers[i] = counts ? f.row(id) : kLeftOut;
    if (counts) rows->prefetch(numbers[i]);
  }
  for (int64_t i = 0; i < count; ++i)
    if (slots[i] < 0 && numbers[i] >= 0) numbers[i] = rows->decode(numbers[i]);
}

// Whether none or all of some rows are cached.
struct Share {
  bool none, all;
};
Share share_of(const int64_t* slots, int64_t begin, int64_t end) {
  int64_t every = -1, some = 0;
  for (int64_t i = begin; i < end; ++i) {
    every &= slots[i];
    some |= slots[i];
  }
  return {every < 0, some >= 0};
}

// Bags of which every row is cached: lookups in a table of floats, by slot.
void pool_slots(const PoolArgs& a, const Feature& floats, uintptr_t rows, int64_t begin, int64_t end, Sums sums,
                Bounds* bounds) {
  PoolArgs slots = a;
  slots.weights = reinterpret_cast<const uint8_t*>(rows);
  slots.bags.ids = a.cache.slots;
  slots.bags.ids64 = true;
  slots.bags.check_ids = false;
  slots.bags.padding_idx = kLeftOut;
  pool_plain(slots, floats, begin, end, sums, bounds);
}

}  // namespace

void pool_cached(const PoolArgs& a, const Feature& f, int64_t begin, int64_t end, Sums sums, Bounds* bounds) {
  const Share cached = share_of(a.cache.slots, a.bags.offset(begin), a.bags.offset(end));
  if (cached.none) return pool_uncached(a, f, begin, end, sums, bounds);
  Feature floats = f;
  floats.format = RowFormat::kFp32;
  floats.weight_offset = 0;
  RowsInReach rows(a, f);
  if (cached.all) return pool_slots(a, floats, rows.start(), begin, end, sums, bounds);
  for_few_bags(a.bags, begin, end, kMapped / kIdsAtOnce, [&](int64_t from, int64_t to, int64_t* numbers) {
    number_rows(a, f, a.bags.offset(from), a.bags.offset(to), &rows, numbers, bounds);
    pool_numbered(a, numbers, from, to, [&](PoolArgs& numbered) {
      numbered.weights = reinterpret_cast<const uint8_t*>(rows.start());
      pool_plain(numbered, floats, 0, to - from, {sums.first + (from - begin) * sums.stride, sums.stride}, bounds);
    });
  });
  rows.release();
}

}  // namespace RK_ISA
}  // namespace rec_kernels
