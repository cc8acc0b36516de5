// Contract of the row cache, and the checks that all backends share. The cache holds rows of the encoded tables of
// embedding_bag in FP32 slots, where they are read and updated without rounding (docs/numerics.md, "Row cache").
//
// Slots. Set s has slots [s * cache_ways, (s + 1) * cache_ways). Tensors with one element per slot: cache_tags int64
// (linear row, or -1), cache_marks uint8 (lowest byte of the row's hash, for searching a set; written with the tag),
// cache_stamps int64 (clock of the last use), cache_dirty uint8 (updated since insertion), cache_counts uint8 (uses,
// for policy "lfu"). Other tensors: cache_clock int64, 0-dim; row_counts uint8 (uses of every linear row that is not
// cached, for "lfu"); cache_stats int64 [tables, 6], indexed by table_id: lookups, hits, inserted rows, evicted rows,
// evicted rows that were written back, rows that got no slot.
//
// Placement. The layout gives for each part: cache_sets, the number of sets that may hold its table's rows, 0 for a
// table that is not cached; cache_first_set, the first set; cache_row_offset. The row of slot s starts at element
// cache_row_offset + s * D of cache_rows, FP32. Only tables of the same width may share sets. Features of several parts
// are not cached. A call without the cache's tensors does not use the cache, whatever its layout.
//
// row_cache_lookup finds the slots of ids; row_cache_insert_ first inserts their rows and evicts others. Both return
// int64 [N], the slot of each id's row, or -1 if the row is not cached or the id is skipped. The embedding_bag ops read
// cached rows from these slots (cache_slots). Their update searches tags again, once per row, since later insertions
// may have moved rows. row_cache_flush_ encodes the dirty rows of some slots into their tables and leaves them dirty.
// The layout of ops that encode rows must have all cached tables: rows of other tables are never evicted or flushed.
//
// row_cache_plan (CPU only) returns the linear rows that an insertion and the following lookup and update will read in
// their tables, and the rows that they may write there: evicted rows that are dirty, or that an update of
// the previous batch may still make dirty, and rows that get no slot. Without `inserts`: the same for a lookup and
// update alone.
#pragma once

#include "embedding_bag/update.h"
#include "row_cache/places.h"

namespace rec_kernels {

// Unchecked cache arguments of an update; null: not given.
struct CacheArguments {
  const Tensor *rows, *tags, *marks, *dirty;
};

// Unchecked cache arguments of a lookup. The backward searches rows again by `tags` and `marks`.
struct CachedRows {
  const OptionalTensor &rows, &slots, &tags, &marks;

  CacheArguments with(const OptionalTensor& dirty) const {
    const auto pointer = [](const OptionalTensor& t) { return t ? &*t : nullptr; };
    return {pointer(rows), pointer(tags), pointer(marks), pointer(dirty)};
  }
};
template <>
struct ArgumentsOf<const CachedRows&> {
  using types = Types<const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&>;
};

// Unchecked bags and layout of the cache's own ops.
struct CacheBags {
  const Tensor &values, &offsets, &layout;
  const std::vector<int64_t>& layout_sizes;
  const OptionalTensor& bag_starts;
  const std::string& bounds_check;

  BagArguments without_weights() const {
    static const OptionalTensor none;
    static const std::optional<std::vector<int64_t>> no_groups;
    return {values, offsets, layout, layout_sizes, none, bag_starts, none, no_groups, bounds_check};
  }
};
template <>
struct ArgumentsOf<const CacheBags&> {
  using types = Types<const Tensor&, const Tensor&, const Tensor&, const std::vector<int64_t>&, const OptionalTensor&,
                      const std::string&>;
};

// Uses of a cache, which need different tensors: kFind tags and marks, kUpdate all, kFlush all but marks.
enum class CacheUse { kFind, kUpdate, kFlush };

// Unchecked policy of an insertion and its counts.
struct InsertionPolicy {
  const std::string& name;
  const OptionalTensor &counts, &row_counts, &stats;
  int64_t decay_every;

  bool lfu() const { return name == "lfu"; }  // else "lru": check_history() rejects other names
};
template <>
struct ArgumentsOf<const InsertionPolicy&> {
  using types = Types<const std::string&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, int64_t>;
};

// Limits of a call with a cache or an update: the sizes of its weights, cache and optimizer state.
inline LayoutLimits limits_of(int64_t num_parts, const Tensor& weights, const CacheArguments& cache,
                              const Update* update = nullptr) {
  LayoutLimits limits = limits_of(num_parts, weights);
  if (cache.tags) limits.cache_slots = cache.tags->numel();
  if (cache.rows) limits.cache_elements = cache.rows->numel();
  if (update) limits.state_elements = update->state_elements;
  if (update) limits.tables = update->num_rates;
  return limits;
}

template <class T>
T* optional_pointer(const OptionalTensor& t) {
  return t ? t->mutable_data_ptr<T>() : nullptr;
}

// Columns of cache_stats.
enum CacheStat { kLookups, kHits, kInserted, kEvicted, kWritten, kLeftOut, kCacheStats };

// Returns whether the call has a cache, after checking shapes, dtypes and devices.
RK_EXPORT bool check_cached_rows(const CachedRows& cache, const Tensor& values);
RK_EXPORT bool check_cache(const CacheArguments& cache, const Layout& layout, const Tensor& values, CacheUse use);
// Checks that a tensor has one element per slot.
void check_slots(const Tensor* t, int64_t slots, const Tensor& values, const char* name, ScalarType dtype);
RK_EXPORT void check_slots_of_ids(const Tensor& slots, const Tensor& values);
// Checks the tensors that only insertions use. `slots`: number of slots.
RK_EXPORT void check_history(const Tensor& clock, const Tensor& stamps, const InsertionPolicy& policy, int64_t slots,
                             const Tensor& values);
// Number of slots that a flush covers, starting at first_slot.
RK_EXPORT int64_t read_slots(const Tensor& cache_tags, int64_t first_slot, std::optional<int64_t> num_slots);
// Checks that row_counts covers all rows, for policy "lfu".
RK_EXPORT void check_row_counts(const InsertionPolicy& policy, int64_t rows);
RK_EXPORT void check_clock(const Tensor& clock, const Tensor& values);
// Checks the tensors of row_cache_stats.
RK_EXPORT void check_stats(const Tensor& cache_tags, const Tensor& cache_dirty);

}  // namespace rec_kernels
