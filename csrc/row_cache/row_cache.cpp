#include "row_cache/row_cache.h"

#include "core/schema.h"

namespace rec_kernels {
namespace {

void check_rows(const Tensor* rows, const Tensor& values) {
  check_value(rows != nullptr, "cache_rows is missing: the other arguments of a cache mean nothing without it");
  check(*rows, "cache_rows").rank(1).dtype(ScalarType::Float).contiguous().on_device_of(values, "values");
}

}  // namespace

void check_slots(const Tensor* t, int64_t slots, const Tensor& values, const char* name, ScalarType dtype) {
  check_value(t != nullptr, name, " is missing: a cache has an element of it for every slot");
  check(*t, name).shape({slots}).dtype(dtype).contiguous().on_device_of(values, "values");
}

void check_slots_of_ids(const Tensor& slots, const Tensor& values) {
  check(slots, "cache_slots")
      .shape({values.numel()})
      .dtype(ScalarType::Long)
      .contiguous()
      .on_device_of(values, "values");
}

bool check_cached_rows(const CachedRows& cache, const Tensor& values) {
  if (!cache.rows && !cache.slots) return false;
  check_rows(cache.rows ? &*cache.rows : nullptr, values);
  check_value(cache.slots.has_value(), "cache_slots is missing: row_cache_insert_ and row_cache_lookup make it");
  check_slots_of_ids(*cache.slots, values);
  return true;
}

bool check_cache(const CacheArguments& cache, const Layout& layout, const Tensor& values, CacheUse use) {
  if (!cache.rows && !cache.tags && !cache.marks && !cache.dirty) return false;
  const int64_t ways = layout.sizes.cache_ways;
  check_value(ways >= 1, "layout has no row cache: its cache_ways is 0, so cache_tags and the like must not be given");
  check_value(cache.tags != nullptr, "cache_tags is missing: a cache has an element of it for every slot");
  check(*cache.tags, "cache_tags").rank(1);
  const int64_t slots = cache.tags->numel();
  check_value(slots % ways == 0, "cache_tags must have a multiple of cache_ways = ", ways, " elements, got ", slots);
  check_slots(cache.tags, slots, values, "cache_tags", ScalarType::Long);
  if (use != CacheUse::kFlush) check_slots(cache.marks, slots, values, "cache_marks", ScalarType::Byte);
  if (use == CacheUse::kFind) return true;
  check_rows(cache.rows, values);
  check_slots(cache.dirty, slots, values, "cache_dirty", ScalarType::Byte);
  return true;
}

void check_history(const Tensor& clock, const Tensor& stamps, const InsertionPolicy& policy, int64_t slots,
                   const Tensor& values) {
  const bool lfu = parse_choice(policy.name, "policy", "lru", "lfu");
  check_slots(&stamps, slots, values, "cache_stamps", ScalarType::Long);
  check_clock(clock, values);
  check_value(policy.counts.has_value() == lfu && policy.row_counts.has_value() == lfu,
              "cache_counts and row_counts must ", lfu ? "" : "not ", "be given for policy \"", policy.name, "\"");
  check_value(policy.decay_every >= 0, "decay_every = ", policy.decay_every, " must not be negative");
  if (lfu) {
    check_slots(&*policy.counts, slots, values, "cache_counts", ScalarType::Byte);
    check(*policy.row_counts, "row_counts").rank(1);
    check_slots(&*policy.row_counts, policy.row_counts->numel(), values, "row_counts", ScalarType::Byte);
  }
  if (!policy.stats) return;
  check(*policy.stats, "cache_stats")
      .rank(2)
      .shape({policy.stats->size(0), kCacheStats})
      .dtype(ScalarType::Long)
      .contiguous()
      .on_device_of(values, "values");
}

void check_clock(const Tensor& clock, const Tensor& values) {
  check(clock, "cache_clock").rank(0).dtype(ScalarType::Long).on_device_of(values, "values");
}

int64_t read_slots(const Tensor& cache_tags, int64_t first_slot, std::optional<int64_t> num_slots) {
  const int64_t all = cache_tags.numel();
  check_value(first_slot >= 0 && first_slot <= all, "first_slot = ", first_slot, " must be in [0, ", all, "]");
  const int64_t slots = num_slots.value_or(all - first_slot);
  check_value(slots >= 0 && slots <= all - first_slot, "num_slots = ", slots, " must be in [0, ", all - first_slot,
              "], the slots from first_slot on");
  return slots;
}

void check_row_counts(const InsertionPolicy& policy, int64_t rows) {
  const int64_t have = policy.lfu() ? policy.row_counts->numel() : rows;
  check_value(have >= rows, "row_counts must have one element per row (", rows, "), got ", have);
}

void check_stats(const Tensor& cache_tags, const Tensor& cache_dirty) {
  check(cache_tags, "cache_tags").rank(1).dtype(ScalarType::Long).contiguous();
  check(cache_dirty, "cache_dirty")
      .shape({cache_tags.numel()})
      .dtype(ScalarType::Byte)
      .contiguous()
      .on_device_of(cache_tags, "cache_tags");
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  const std::string layout = "Tensor layout, int[] layout_sizes";
  const std::string bags =
      "Tensor values, Tensor offsets, " + layout + ", Tensor? bag_starts=None, str bounds_check=\"error\"";
  const std::string rounding = ", str rounding=\"stochastic\", Tensor? seed=None";
  define(m, "row_cache_lookup.layout(Tensor cache_tags, Tensor cache_marks, " + bags + ") -> Tensor slots");
  define(m,
         "row_cache_insert_.layout(Tensor(a!) weights, Tensor(b!) cache_rows, Tensor(c!) cache_tags, Tensor(d!) "
         "cache_marks, Tensor(e!) cache_dirty, Tensor(f!) cache_stamps, Tensor(g!) cache_clock, " +
             bags + rounding +
             ", str policy=\"lru\", Tensor(h!)? cache_counts=None, Tensor(i!)? row_counts=None, Tensor(j!)? "
             "cache_stats=None, int decay_every=0) -> Tensor slots");
  define(m,
         "row_cache_plan.layout(Tensor cache_tags, Tensor cache_marks, Tensor cache_dirty, Tensor cache_stamps, Tensor "
         "cache_clock, " +
             bags +
             ", Tensor? seed=None, str policy=\"lru\", Tensor? cache_counts=None, Tensor? row_counts=None, int "
             "decay_every=0, bool inserts=True) -> (Tensor rows, Tensor written)");
  define(m,
         "row_cache_flush_.layout(Tensor(a!) weights, Tensor cache_rows, Tensor cache_tags, Tensor cache_dirty, Tensor "
         "cache_clock, " +
             layout + rounding + ", int first_slot=0, int? num_slots=None) -> ()");
  define(m, "row_cache_stats.layout(Tensor cache_tags, Tensor cache_dirty, " + layout + ") -> Tensor");
}

}  // namespace rec_kernels
