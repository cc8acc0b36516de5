// row_cache_insert_ on the CPU (docs/numerics.md, "Row cache").
#include "row_cache/cpu/insert_and_evict.h"

#include <algorithm>

#include "core/boxing.h"
#include "embedding_bag/cpu/sort.h"
#include "embedding_bag/cpu/split_bags.h"

namespace rec_kernels {
namespace {

void halve(const OptionalTensor& counts) {
  uint8_t* c = optional_pointer<uint8_t>(counts);
  const int64_t n = counts->numel();
  uint8_t halved[256];
  for (int i = 0; i < 256; ++i) halved[i] = halved_count(static_cast<uint8_t>(i));
  constexpr int64_t kBytes = 1 << 16;
  parallel_pieces(n, kBytes, workers_for(n, kBytes), [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; ++i) c[i] = halved[c[i]];
  });
}

// Checks that row_counts and cache_stats are large enough; returns the number of tables.
int64_t check_tables(const BagInput& in, const InsertionPolicy& policy) {
  check_row_counts(policy, in.num_rows);
  int64_t num_tables = 0;
  for (int64_t p = 0; p < in.bags.num_parts; ++p)
    num_tables = std::max(num_tables, int64_t{in.parts[p].shard.table} + 1);
  if (!policy.stats) return num_tables;
  check_value(policy.stats->size(0) >= num_tables, "cache_stats must have ", num_tables,
              " rows, one for each table_id, got ", policy.stats->size(0));
  return num_tables;
}

Tensor insert(const Tensor& weights, const Tensor& cache_rows, const Tensor& cache_tags, const Tensor& cache_marks,
              const Tensor& cache_dirty, const Tensor& cache_stamps, const Tensor& cache_clock, const CacheBags& bags,
              const std::string& rounding, const OptionalTensor& seed, const InsertionPolicy& policy) {
  const Tensor& values = bags.values;
  const CacheArguments arguments{&cache_rows, &cache_tags, &cache_marks, &cache_dirty};
  const BagInput in = read_bags(bags, &weights, arguments, CacheUse::kUpdate);
  const CacheInput cache = read_cache(arguments, in);
  check_history(cache_clock, cache_stamps, policy, cache_tags.numel(), values);
  const UpdateRounding how = read_rounding(values, rounding, seed);
  const int64_t num_tables = check_tables(in, policy);
  Tensor slots = new_tensor(values, {in.bags.num_ids}, ScalarType::Long);
  in.raise(find_slots(in, cache.view, slots.mutable_data_ptr<int64_t>()));

  const int64_t clock = advanced(cache_clock, "cache_clock");
  const Memory memory{cache_tags.mutable_data_ptr<int64_t>(),   cache_stamps.mutable_data_ptr<int64_t>(),
                      cache_marks.mutable_data_ptr<uint8_t>(),  cache.view.dirty,
                      optional_pointer<uint8_t>(policy.counts), optional_pointer<uint8_t>(policy.row_counts),
                      optional_pointer<int64_t>(policy.stats),  false};
  const CachedTables tables(in, cache.view, static_cast<uint8_t*>(weights.mutable_data_ptr()), how, clock);
  Insertion insertion(in, cache.view, memory, tables, salt_of(how.seed ? *how.seed : 0, clock), clock, num_tables);
  insertion.prepare(slots.const_data_ptr<int64_t>());

  // No error can occur after this point.
  *cache_clock.mutable_data_ptr<int64_t>() = clock;
  if (policy.lfu() && policy.decay_every > 0 && clock % policy.decay_every == 0) {
    halve(policy.counts);
    halve(policy.row_counts);
  }
  insertion.run(slots.mutable_data_ptr<int64_t>());
  return slots;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { implement<&insert>(m, "row_cache_insert_.layout"); }

}  // namespace rec_kernels
