// row_cache_plan: lists the table rows that a batch will read and write, so that they can be loaded in advance.
#include <tuple>

#include "core/boxing.h"
#include "core/cpu/scratch.h"
#include "embedding_bag/cpu/sort.h"
#include "row_cache/cpu/insert_and_evict.h"

namespace rec_kernels {
namespace {

// Lists the linear rows of ids that are not cached, for every part, and those of uncached tables.
void list_missing(const BagInput& in, const CacheView& cache, const int64_t* slots, std::vector<int64_t>* rows,
                  std::vector<int64_t>* uncached) {
  for (int64_t feature = 0; feature < in.bags.num_features; ++feature) {
    const int64_t begin = in.bags.offset(in.bags.first_bag(feature));
    const int64_t end = in.bags.offset(in.bags.first_bag(feature + 1));
    for (int64_t p = in.bags.first_part(feature); p < in.bags.first_part(feature + 1); ++p) {
      const Part& f = in.parts[p];
      const int64_t padding = in.bags.padding_of(f);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t id = in.bags.id(i);
        if (slots[i] >= 0 || !in.bags.counts(id, f, padding)) continue;
        rows->push_back(f.row_offset + f.row(id));
        if (cache.places[p].sets == 0) uncached->push_back(rows->back());
      }
    }
  }
}

// A sorted subset of the cache's sets with constant-time lookup: a bit per set of the cache, and a rank per 64 sets.
class SetSubset {
 public:
  SetSubset(std::vector<int64_t> sets, int64_t num_sets)
      : sets_(std::move(sets)), bits_(static_cast<size_t>(num_sets / 64 + 1)), before_(bits_.size()) {
    for (const int64_t set : sets_) bits_[static_cast<size_t>(set / 64)] |= uint64_t{1} << set % 64;
    for (size_t i = 1; i < bits_.size(); ++i) before_[i] = before_[i - 1] + __builtin_popcountll(bits_[i - 1]);
  }

  int64_t count() const { return static_cast<int64_t>(sets_.size()); }
  int64_t set(int64_t i) const { return sets_[static_cast<size_t>(i)]; }
  // The index i with set(i) == set, or -1.
  int64_t find(int64_t set) const {
    const auto word = static_cast<size_t>(set / 64);
    const uint64_t bit = uint64_t{1} << set % 64;
    return bits_[word] & bit ? before_[word] + __builtin_popcountll(bits_[word] & (bit - 1)) : -1;
  }

 private:
  std::vector<int64_t> sets_;
  std::vector<uint64_t> bits_;
  std::vector<int64_t> before_;
};

// Copies the state of the slots of some sets.
template <class T>
Scratch<T> copy_of(const Tensor& t, const SetSubset& sets, int64_t ways) {
  Scratch<T> copy(std::max<int64_t>(sets.count() * ways, 1));
  const T* from = t.const_data_ptr<T>();
  constexpr int64_t kGrain = 256;
  parallel_pieces(sets.count(), kGrain, workers_for(sets.count(), kGrain), [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; ++i) std::copy_n(from + sets.set(i) * ways, ways, copy.get() + i * ways);
  });
  return copy;
}

// Converts slots of ids to indices in such a copy, or -1.
void map_to_copy(const SetSubset& sets, int64_t ways, int64_t count, int64_t* slots) {
  constexpr int64_t kGrain = 1 << 14;
  parallel_pieces(count, kGrain, workers_for(count, kGrain), [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t found = slots[i] < 0 ? -1 : sets.find(slots[i] / ways);
      slots[i] = found < 0 ? -1 : found * ways + slots[i] % ways;
    }
  });
}

// Linear rows of cached tables that the insertion of the call's ids, and its update, would write.
std::vector<int64_t> list_written(const BagInput& in, const CacheView& view, const CacheArguments& cache,
                                  const Tensor& cache_stamps, const InsertionPolicy& policy, int64_t clock,
                                  int64_t seed, int64_t* slots) {
  const int64_t ways = view.ways;
  const bool halves = policy.lfu() && policy.decay_every > 0 && clock % policy.decay_every == 0;
  const CachedTables tables(in, view, nullptr, {}, clock);
  Memory memory{};
  memory.row_counts = policy.lfu() ? policy.row_counts->mutable_data_ptr<uint8_t>() : nullptr;
  memory.by_part = true;
  Insertion insertion(in, view, memory, tables, salt_of(seed, clock), clock, in.bags.num_parts);
  insertion.prepare(slots);
  // Copies only the sets that rows are inserted into: the others, which may be many more, do not change.
  const SetSubset sets(insertion.missing_sets(), cache.tags->numel() / ways);
  const Scratch<int64_t> tags = copy_of<int64_t>(*cache.tags, sets, ways);
  const Scratch<int64_t> stamps = copy_of<int64_t>(cache_stamps, sets, ways);
  const Scratch<uint8_t> dirty = copy_of<uint8_t>(*cache.dirty, sets, ways);
  const Scratch<uint8_t> counts = policy.lfu() ? copy_of<uint8_t>(*policy.counts, sets, ways) : Scratch<uint8_t>();
  for (int64_t slot = 0; halves && slot < sets.count() * ways; ++slot) counts[slot] = halved_count(counts[slot]);
  memory.tags = tags.get();
  memory.stamps = stamps.get();
  memory.dirty = dirty.get();
  memory.counts = counts.get();
  map_to_copy(sets, ways, in.bags.num_ids, slots);
  insertion.plan_only(memory, halves);
  insertion.run(slots);
  return insertion.written();
}

Tensor distinct(std::vector<int64_t> rows, const Tensor& like) {
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  Tensor out = new_tensor(like, {static_cast<int64_t>(rows.size())}, ScalarType::Long);
  std::copy(rows.begin(), rows.end(), out.mutable_data_ptr<int64_t>());
  return out;
}

std::tuple<Tensor, Tensor> plan(const Tensor& cache_tags, const Tensor& cache_marks, const Tensor& cache_dirty,
                                const Tensor& cache_stamps, const Tensor& cache_clock, const CacheBags& bags,
                                const OptionalTensor& seed, const std::string& policy_name,
                                const OptionalTensor& cache_counts, const OptionalTensor& row_counts,
                                int64_t decay_every, bool inserts) {
  const Tensor& values = bags.values;
  const CacheArguments arguments{nullptr, &cache_tags, &cache_marks, &cache_dirty};
  const BagInput in = read_bags(bags, nullptr, arguments, CacheUse::kFind);
  const CacheInput cache = read_cache(arguments, in, CacheUse::kFind);
  const InsertionPolicy policy{policy_name, cache_counts, row_counts, std::nullopt, decay_every};
  check_history(cache_clock, cache_stamps, policy, cache_tags.numel(), values);
  check_row_counts(policy, in.num_rows);
  check_slots(&cache_dirty, cache_tags.numel(), values, "cache_dirty", ScalarType::Byte);
  const UpdateRounding how = read_rounding(cache_tags, "stochastic", seed);
  const Scratch<int64_t> slots(std::max<int64_t>(in.bags.num_ids, 1));
  in.raise(find_slots(in, cache.view, slots.get()));

  std::vector<int64_t> rows, written;
  list_missing(in, cache.view, slots.get(), &rows, &written);
  if (inserts) {
    const int64_t key = how.seed ? *how.seed : 0;
    const std::vector<int64_t> more = list_written(in, cache.view, arguments, cache_stamps, policy,
                                                   advanced(cache_clock, "cache_clock"), key, slots.get());
    written.insert(written.end(), more.begin(), more.end());
  } else {
    written = rows;
  }
  rows.insert(rows.end(), written.begin(), written.end());
  return {distinct(std::move(rows), values), distinct(std::move(written), values)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { implement<&plan>(m, "row_cache_plan.layout"); }

}  // namespace rec_kernels
