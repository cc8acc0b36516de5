// Insertion into the row cache on the CPU: what docs/numerics.md calls so, set by set.
#include <algorithm>
#include <tuple>

#include "cpu/for_bags.h"
#include "cpu/row_cache_tables.h"

namespace rec_kernels {
namespace {

// What belongs to slots and rows, and the statistics of tables; null where the policy has none.
struct Memory {
  int64_t *tags, *stamps;
  uint8_t *dirty, *counts, *row_counts;
  int64_t* stats;
  bool by_part;  // statistics are of parts, not of tables
};

// An id whose row is in no slot.
struct Missing {
  int64_t set, row, part, position;
};

// A row that wants a slot of its set: Missing [first, last) name it.
struct Candidate {
  int64_t row, part, first, last;
  uint8_t count;
};

// Statistics of one worker: added up at the end.
class Counters {
 public:
  explicit Counters(int64_t tables) : counts_(static_cast<size_t>(tables * kCacheStats)) {}
  void add(int64_t table, CacheStat stat, int64_t n = 1) {
    counts_[static_cast<size_t>(table * kCacheStats + stat)] += n;
  }
  void add_to(int64_t* stats) const {
    for (size_t i = 0; i < counts_.size(); ++i) stats[i] += counts_[i];
  }

 private:
  std::vector<int64_t> counts_;
};

class Insertion {
 public:
  Insertion(const BagInput& in, const CacheView& cache, const Memory& memory, const CachedTables& tables, uint64_t salt,
            int64_t clock, int64_t num_tables)
      : in_(in), cache_(cache), memory_(memory), tables_(tables), salt_(salt), clock_(clock), num_tables_(num_tables) {}

  // `slots`: of the ids, as row_cache_lookup finds them; completed with those of the rows that come in.
  void run(int64_t* slots) {
    touch_and_collect(slots);
    std::sort(missing_.begin(), missing_.end(), [](const Missing& a, const Missing& b) {
      return std::tie(a.set, a.row, a.position) < std::tie(b.set, b.row, b.position);
    });
    std::vector<int64_t> starts;  // of the sets
    const auto count = static_cast<int64_t>(missing_.size());
    for (int64_t i = 0; i < count; ++i)
      if (i == 0 || at(i).set != at(i - 1).set) starts.push_back(i);
    const auto sets = static_cast<int64_t>(starts.size());
    starts.push_back(count);
    const int64_t workers = workers_for(sets, kSetsAtOnce);
    std::vector<Counters> counters(static_cast<size_t>(workers), Counters(num_tables_));
    parallel_pieces(sets, kSetsAtOnce, workers, [&](int64_t begin, int64_t end, int64_t worker) {
      std::vector<Candidate> candidates;
      for (int64_t i = begin; i < end; ++i) {
        read_candidates(starts[static_cast<size_t>(i)], starts[static_cast<size_t>(i + 1)], &candidates);
        take_in(candidates, slots, &counters[static_cast<size_t>(worker)]);
      }
    });
    add_up(counters);
  }

 private:
  static constexpr int64_t kSetsAtOnce = 32;

  const Missing& at(int64_t i) const { return missing_[static_cast<size_t>(i)]; }
  // Whose statistics are a part's.
  int64_t table_of(int64_t part) const { return memory_.by_part ? part : in_.features[part].table_id; }
  int64_t table_of_row(int64_t row) const { return table_of(tables_.part_of(row)); }
  uint8_t raised(uint8_t count, int64_t row) const { return raised_count(count, row, salt_); }

  void add_up(const std::vector<Counters>& counters) const {
    for (const Counters& c : counters)
      if (memory_.stats) c.add_to(memory_.stats);
  }

  // Marks the rows that are in slots, and lists the ids of those that are not.
  void touch_and_collect(const int64_t* slots) {
    const BagSplit split = split_bags(in_);
    std::vector<Counters> counters(static_cast<size_t>(split.workers), Counters(num_tables_));
    std::vector<std::vector<Missing>> missing(static_cast<size_t>(split.workers));
    parallel_pieces(in_.bags.num_bags, split.bags_per_piece, split.workers,
                    [&](int64_t begin, int64_t end, int64_t worker) {
                      while (begin < end) {
                        const int64_t feature = in_.bags.feature_of(begin);
                        const int64_t stop = std::min(end, in_.bags.first_bag(feature + 1));
                        read_feature(in_.bags.first_part(feature), in_.bags.offset(begin), in_.bags.offset(stop), slots,
                                     &missing[static_cast<size_t>(worker)], &counters[static_cast<size_t>(worker)]);
                        begin = stop;
                      }
                    });
    for (const auto& some : missing) missing_.insert(missing_.end(), some.begin(), some.end());
    add_up(counters);
  }

  // Ids [begin, end) of a feature whose part this is.
  void read_feature(int64_t part, int64_t begin, int64_t end, const int64_t* slots, std::vector<Missing>* missing,
                    Counters* counters) const {
    const CachePlace& place = cache_.places[part];
    if (place.sets == 0) return;
    const Feature& f = in_.features[part];
    int64_t hits = 0, lookups = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (slots[i] >= 0) {
        ++hits;
        touch(slots[i]);
        continue;
      }
      const int64_t id = in_.bags.id(i);
      if (!in_.bags.in_range(id, f) || id == in_.bags.padding_idx) continue;
      ++lookups;
      const int64_t row = f.row_offset + f.row(id);
      missing->push_back({place.set(row), row, part, i});
    }
    counters->add(table_of(part), kLookups, hits + lookups);
    counters->add(table_of(part), kHits, hits);
  }

  // Many ids may name a row, and many threads may see them: the first of all raises the count.
  void touch(int64_t slot) const {
    int64_t* stamp = memory_.stamps + slot;
    if (!memory_.counts) return __atomic_store_n(stamp, clock_, __ATOMIC_RELAXED);
    if (__atomic_load_n(stamp, __ATOMIC_RELAXED) == clock_) return;
    if (__atomic_exchange_n(stamp, clock_, __ATOMIC_RELAXED) == clock_) return;
    memory_.counts[slot] = raised(memory_.counts[slot], memory_.tags[slot]);
  }

  // Of one set, in the order in which they are served.
  void read_candidates(int64_t begin, int64_t end, std::vector<Candidate>* out) const {
    out->clear();
    for (int64_t i = begin; i < end; ++i) {
      if (i > begin && at(i).row == at(i - 1).row) {
        ++out->back().last;
        continue;
      }
      uint8_t count = 0;
      if (memory_.counts) count = memory_.row_counts[at(i).row] = raised(memory_.row_counts[at(i).row], at(i).row);
      out->push_back({at(i).row, at(i).part, i, i + 1, count});
    }
    if (memory_.counts)
      std::stable_sort(out->begin(), out->end(),
                       [](const Candidate& a, const Candidate& b) { return a.count > b.count; });
  }

  void take_in(const std::vector<Candidate>& candidates, int64_t* slots, Counters* counters) const {
    for (const Candidate& c : candidates) {
      const int64_t slot = slot_for(c);
      if (slot < 0) {
        counters->add(table_of_row(c.row), kLeftOut);
        continue;
      }
      if (memory_.tags[slot] >= 0) evict(slot, counters);
      tables_.decode(c.part, c.row, slot);
      memory_.tags[slot] = c.row;
      memory_.stamps[slot] = clock_;
      memory_.dirty[slot] = 0;
      if (memory_.counts) memory_.counts[slot] = c.count;
      counters->add(table_of_row(c.row), kInserted);
      for (int64_t i = c.first; i < c.last; ++i) slots[at(i).position] = slot;
    }
  }

  // An empty slot of the row's set, or that of the victim, or -1.
  int64_t slot_for(const Candidate& c) const {
    const int64_t first = at(c.first).set * cache_.ways;
    int64_t victim = -1;
    const auto priority = [&](int64_t slot) {
      return std::make_pair(memory_.counts ? memory_.counts[slot] : uint8_t{0}, memory_.stamps[slot]);
    };
    for (int64_t slot = first; slot < first + cache_.ways; ++slot) {
      if (memory_.tags[slot] < 0) return slot;
      if (memory_.stamps[slot] == clock_ || tables_.part_of(memory_.tags[slot]) < 0) continue;
      if (victim < 0 || priority(slot) < priority(victim)) victim = slot;
    }
    return victim >= 0 && memory_.counts && c.count <= memory_.counts[victim] ? -1 : victim;
  }

  void evict(int64_t slot, Counters* counters) const {
    const int64_t row = memory_.tags[slot], table = table_of_row(row);
    if (memory_.counts) memory_.row_counts[row] = memory_.counts[slot];
    counters->add(table, kEvicted);
    if (!memory_.dirty[slot]) return;
    tables_.encode(slot);
    counters->add(table, kWritten);
  }

  const BagInput& in_;
  const CacheView& cache_;
  Memory memory_;
  const CachedTables& tables_;
  uint64_t salt_;
  int64_t clock_, num_tables_;
  std::vector<Missing> missing_;
};

template <class T>
T* pointer(const OptionalTensor& t) {
  return t ? t->mutable_data_ptr<T>() : nullptr;
}

void halve(const OptionalTensor& counts) {
  uint8_t* c = pointer<uint8_t>(counts);
  const int64_t n = counts->numel();
  uint8_t halved[256];
  for (int i = 0; i < 256; ++i) halved[i] = halved_count(static_cast<uint8_t>(i));
  constexpr int64_t kBytes = 1 << 16;
  parallel_pieces(n, kBytes, workers_for(n, kBytes), [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; ++i) c[i] = halved[c[i]];
  });
}

// How many tables have statistics: enough for all parts.
int64_t check_tables(const BagInput& in, const CacheHistory& history, bool by_part) {
  if (history.lfu)
    check_value(history.row_counts->numel() >= in.num_rows, "row_counts must have one element per row (", in.num_rows,
                "), got ", history.row_counts->numel());
  int64_t tables = by_part ? in.num_parts : 0;
  for (int64_t p = 0; p < in.num_parts; ++p) tables = std::max(tables, in.features[p].table_id + 1);
  if (!history.stats) return tables;
  check_value(history.stats->size(0) >= tables, "cache_stats must have ", tables, " rows, one for each of ",
              by_part ? "the parts" : "table_ids", ", got ", history.stats->size(0));
  return tables;
}

Tensor insert(const Tensor& weights, const Tensor& cache_rows, const Tensor& cache_offsets, const Tensor& cache_tags,
              const Tensor& cache_dirty, const Tensor& cache_sets, const Tensor& cache_set_starts, int64_t cache_ways,
              const Tensor& cache_stamps, const Tensor& cache_clock, const Tensor& values, const Tensor& offsets,
              const OptionalTensor& weight_offsets, const OptionalTensor& row_offsets,
              const OptionalTensor& num_embeddings, const OptionalTensor& embedding_dims,
              const OptionalTensor& output_offsets, const OptionalTensor& mean, int64_t output_dim, int64_t num_rows,
              int64_t max_embedding_dim, const std::optional<std::vector<std::string>>& formats,
              const OptionalTensor& format_of, int64_t embedding_dim, const OptionalTensor& bag_starts,
              const OptionalTensor& frozen, const OptionalTensor& partition_starts, const OptionalTensor& divisors,
              const OptionalTensor& moduli, const OptionalTensor& id_limits, const OptionalTensor& combine,
              int64_t max_parts, std::optional<bool> multiplies, const std::string& pooling, int64_t padding_idx,
              const std::string& bounds_check, const std::string& rounding, const OptionalTensor& seed,
              const OptionalTensor& table_ids, const std::string& policy, const OptionalTensor& cache_counts,
              const OptionalTensor& row_counts, const OptionalTensor& cache_stats, int64_t decay_every) {
  const TableLayout layout{
      weight_offsets,   row_offsets,       num_embeddings, embedding_dims, output_offsets, mean,       output_dim,
      num_rows,         max_embedding_dim, formats,        format_of,      embedding_dim,  bag_starts, frozen,
      partition_starts, divisors,          moduli,         id_limits,      combine,        max_parts,  multiplies};
  const BagOptions options = parse_bag_options(pooling, padding_idx, bounds_check);
  const bool lfu = parse_policy(policy);
  BagInput in = read_bags(values, offsets, std::nullopt, layout, options, weights);
  const OptionalTensor rows = cache_rows, places = cache_offsets, tags = cache_tags, dirty = cache_dirty,
                       sets = cache_sets, starts = cache_set_starts, stamps = cache_stamps;
  const CacheArguments arguments{rows, places, tags, dirty, sets, starts, cache_ways};
  const CacheInput cache = read_cache(arguments, layout, in, values);
  const CacheHistory history{cache_clock, stamps, cache_counts, row_counts, cache_stats, lfu, decay_every};
  check_history(history, arguments, values);
  const UpdateRounding how = read_rounding(weights, layout, rounding, seed, table_ids);
  set_table_ids(how.table_ids, in);
  const int64_t tables = check_tables(in, history, !table_ids);
  Tensor slots = new_tensor(values, {in.bags.num_ids}, ScalarType::Long);
  in.raise(find_slots(in, cache.view, nullptr, slots.mutable_data_ptr<int64_t>()));

  const int64_t clock = ++*cache_clock.mutable_data_ptr<int64_t>();
  if (lfu && decay_every > 0 && clock % decay_every == 0) {
    halve(cache_counts);
    halve(row_counts);
  }
  const Memory memory{cache_tags.mutable_data_ptr<int64_t>(),
                      pointer<int64_t>(stamps),
                      cache.view.dirty,
                      pointer<uint8_t>(cache_counts),
                      pointer<uint8_t>(row_counts),
                      pointer<int64_t>(cache_stats),
                      !table_ids};
  const CachedTables behind(in, cache.view, static_cast<uint8_t*>(weights.mutable_data_ptr()), how, clock);
  const uint64_t salt = salt_of(how.seed ? *how.seed : 0, clock);
  Insertion(in, cache.view, memory, behind, salt, clock, tables).run(slots.mutable_data_ptr<int64_t>());
  return slots;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { m.impl("row_cache_insert_", TORCH_BOX(&insert)); }

}  // namespace rec_kernels
