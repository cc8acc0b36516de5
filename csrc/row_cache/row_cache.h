// A row cache over the encoded tables of embedding_bag: some rows lie in FP32 in slots, where they are read and updated
// without rounding (docs/numerics.md, "Row cache"). The contract that every backend keeps, and the checks they share.
//
// Slots. Set s has the slots s * cache_ways up to (s + 1) * cache_ways - 1. Tensors with an element for each slot:
// cache_tags int64 (the linear row in the slot, or -1), cache_marks uint8 (the lowest byte of its hash, by which a set
// is searched; insertion writes it with the tag), cache_stamps int64 (the clock when it was used last), cache_dirty
// uint8 (changed since it came in), cache_counts uint8 (uses, for policy "lfu"). Further: cache_clock, a number, int64;
// row_counts uint8 (uses of every linear row that is not in a slot, for "lfu"); cache_stats int64 [tables, 6], indexed
// by table_id: ids looked up, those of them whose row was in a slot, rows taken in, rows
// evicted, dirty rows of them that were encoded, rows that found no slot.
//
// Places. The layout says, for each part: cache_sets, how many sets its table's rows are spread over, 0 for a table
// that is not cached; cache_first_set, the first of them; cache_row_offset. The row of slot s starts at element
// cache_row_offset + s * D of cache_rows, FP32. Tables of one width may share sets, others must not. The parts of a
// feature that has several are not cached. A layout with places and a call without the cache's tensors: no cache.
//
// row_cache_lookup says where the rows of ids are; row_cache_insert_ takes rows in first, and evicts others; both
// return int64 [N], the slot of each id's row, -1 where it is in none or the id does not count. The embedding_bag ops
// read such rows from their slots (cache_slots). Their update finds rows by tag, once for each row, because others may
// have come in since. row_cache_flush_ encodes dirty rows of some slots into their tables and leaves them dirty. Ops
// that encode rows are to be told of all cached tables: rows of others are never evicted or flushed.
//
// row_cache_plan says, on the CPU, which linear rows an insertion and the lookup and update after it will read in their
// tables, and which of them they may write there: those that leave, and those that are in no slot. Without `inserts`:
// the same of a lookup and an update alone.
#pragma once

#include "embedding_bag/update.h"
#include "row_cache/places.h"

namespace rec_kernels {

// An update's cache arguments, as they arrive; null: not given.
struct CacheArguments {
  const Tensor *rows, *tags, *marks, *dirty;
};

// A lookup's cache arguments, as they arrive. A backward finds rows again by `tags` and `marks`.
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

// The bags and the layout of the cache's own ops, as they arrive.
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

// Uses of a cache: rows are found, which takes no rows and offsets; found and updated; encoded, which takes no marks.
enum class CacheUse { kFind, kUpdate, kFlush };

// Policy of an insertion and its counts, as they arrive.
struct InsertionPolicy {
  const std::string& name;
  const OptionalTensor &counts, &row_counts, &stats;
  int64_t decay_every;

  bool lfu() const { return name == "lfu"; }  // else "lru", or check_history() throws
};
template <>
struct ArgumentsOf<const InsertionPolicy&> {
  using types = Types<const std::string&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, int64_t>;
};

// Limits that a call's layout must keep: the memory of its weights, of its cache and of the update's state, where it
// has these.
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

// True if there is a cache; then shapes, dtypes and devices are checked.
RK_EXPORT bool check_cached_rows(const CachedRows& cache, const Tensor& values);
RK_EXPORT bool check_cache(const CacheArguments& cache, const Layout& layout, const Tensor& values, CacheUse use);
// Checks that a tensor has an element for every slot.
void check_slots(const Tensor* t, int64_t slots, const Tensor& values, const char* name, ScalarType dtype);
RK_EXPORT void check_slots_of_ids(const Tensor& slots, const Tensor& values);
// The tensors that only insertions take; there are `slots` slots.
RK_EXPORT void check_history(const Tensor& clock, const Tensor& stamps, const InsertionPolicy& policy, int64_t slots,
                             const Tensor& values);
// Number of slots that a flush covers from first_slot on.
RK_EXPORT int64_t read_slots(const Tensor& cache_tags, int64_t first_slot, std::optional<int64_t> num_slots);
// Checks that every row has a count, if rows have counts.
RK_EXPORT void check_row_counts(const InsertionPolicy& policy, int64_t rows);
RK_EXPORT void check_clock(const Tensor& clock, const Tensor& values);
// The tensors of row_cache_stats.
RK_EXPORT void check_stats(const Tensor& cache_tags, const Tensor& cache_dirty);

}  // namespace rec_kernels
