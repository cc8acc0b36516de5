// The row cache on the CPU: lookups, flushing, statistics. Insertion is in insert_and_evict.cpp.
#include "row_cache/cpu/row_cache.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/boxing.h"
#include "embedding_bag/cpu/sort.h"
#include "embedding_bag/cpu/split_bags.h"
#include "row_cache/cpu/tables.h"

namespace rec_kernels {

Bounds find_slots(const BagInput& in, const CacheView& cache, int64_t* slots) {
  // Ids outside of all bags have no slot. Offsets are clamped here and checked below.
  const auto bound = [&](int64_t bag) {
    return in.bags.num_bags ? std::clamp<int64_t>(in.bags.offset(bag), 0, in.bags.num_ids) : 0;
  };
  std::fill(slots, slots + bound(0), -1);
  std::fill(slots + bound(in.bags.num_bags), slots + in.bags.num_ids, -1);
  const FindSlots args{in.bags, in.parts.get(), cache, slots};
  const auto find = kernels<RowCacheKernels>().find;
  return for_bags(in, [&](int64_t begin, int64_t end, Bounds* found) { find(args, begin, end, found); });
}

namespace {

// Slots per piece of work.
constexpr int64_t kSlotsPerPiece = 1024;

Tensor lookup(const Tensor& cache_tags, const Tensor& cache_marks, const CacheBags& bags) {
  const CacheArguments arguments{nullptr, &cache_tags, &cache_marks, nullptr};
  const BagInput in = read_bags(bags, nullptr, arguments, CacheUse::kFind);
  const CacheInput cache = read_cache(arguments, in, CacheUse::kFind);
  Tensor slots = new_tensor(bags.values, {in.bags.num_ids}, ScalarType::Long);
  in.raise(find_slots(in, cache.view, slots.mutable_data_ptr<int64_t>()));
  return slots;
}

void flush(const Tensor& weights, const Tensor& cache_rows, const Tensor& cache_tags, const Tensor& cache_dirty,
           const Tensor& cache_clock, const Tensor& layout, const std::vector<int64_t>& layout_sizes,
           const std::string& rounding, const OptionalTensor& seed, int64_t first_slot,
           std::optional<int64_t> num_slots) {
  const Tensor values = new_zeros(cache_tags, {0}, ScalarType::Long);
  const Tensor offsets = new_zeros(cache_tags, {1}, ScalarType::Long);
  const CacheArguments arguments{&cache_rows, &cache_tags, nullptr, &cache_dirty};
  const BagInput in =
      read_bags({values, offsets, layout, layout_sizes, std::nullopt, "none"}, &weights, arguments, CacheUse::kFlush);
  const CacheInput cache = read_cache(arguments, in, CacheUse::kFlush);
  const UpdateRounding how = read_rounding(values, rounding, seed);
  check_clock(cache_clock, values);
  const CachedTables tables(in, cache.view, static_cast<uint8_t*>(weights.mutable_data_ptr()), how,
                            *cache_clock.const_data_ptr<int64_t>());
  const int64_t slots = read_slots(cache_tags, first_slot, num_slots);
  parallel_pieces(slots, kSlotsPerPiece, workers_for(slots, kSlotsPerPiece), [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t slot = first_slot + begin; slot < first_slot + end; ++slot)
      if (cache.view.tags[slot] >= 0 && cache.view.dirty[slot]) tables.encode(slot);
  });
}

// Arbitrary, possibly overlapping ranges of linear rows, split into disjoint pieces so that each row is searched once.
class Ranges {
 public:
  explicit Ranges(const Layout& layout) : parts_(layout.parts) {
    for (int64_t t = 0; t < layout.num_parts; ++t) {
      if (rows(t) <= 0) continue;
      cuts_.push_back(first(t));
      if (has_end(t)) cuts_.push_back(first(t) + rows(t));
    }
    std::sort(cuts_.begin(), cuts_.end());
    cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());
  }

  int64_t num_pieces() const { return static_cast<int64_t>(cuts_.size()) + 1; }
  // Number of cuts at or before a row. Branch-free, since rows in random order would be mispredicted.
  int64_t piece_of(int64_t row) const {
    const int64_t* from = cuts_.data();
    int64_t left = static_cast<int64_t>(cuts_.size());
    for (; left > 1; left -= left / 2) from += left / 2 * (from[left / 2 - 1] <= row);
    return from - cuts_.data() + (left && *from <= row);
  }
  // Range t consists of pieces [begin(t), end(t)).
  int64_t begin(int64_t t) const { return rows(t) <= 0 ? 0 : piece_of(first(t)); }
  int64_t end(int64_t t) const { return rows(t) <= 0 ? 0 : has_end(t) ? piece_of(first(t) + rows(t)) : num_pieces(); }

 private:
  int64_t first(int64_t t) const { return parts_[t].row_offset; }
  int64_t rows(int64_t t) const { return parts_[t].num_embeddings; }
  bool has_end(int64_t t) const { return first(t) < 0 || rows(t) <= INT64_MAX - first(t); }

  const TablePart* parts_;
  std::vector<int64_t> cuts_;
};

Tensor stats(const Tensor& cache_tags, const Tensor& cache_dirty, const Tensor& layout,
             const std::vector<int64_t>& layout_sizes) {
  check_stats(cache_tags, cache_dirty);
  const Layout tables = read_layout(layout, layout_sizes, cache_tags);
  const int64_t parts = tables.num_parts, slots = cache_tags.numel(), *tags = cache_tags.const_data_ptr<int64_t>();
  const uint8_t* dirty = cache_dirty.const_data_ptr<uint8_t>();
  Tensor out = new_zeros(cache_tags, {parts, 2}, ScalarType::Long);
  const Ranges ranges(tables);
  const int64_t workers = workers_for(slots, kSlotsPerPiece), size = 2 * ranges.num_pieces();
  std::vector<int64_t> found(workers * size);  // [worker, piece, 2]: slots, dirty slots
  parallel_pieces(slots, kSlotsPerPiece, workers, [&](int64_t begin, int64_t end, int64_t worker) {
    int64_t* counts = found.data() + worker * size;
    for (int64_t slot = begin; slot < end; ++slot) {
      if (tags[slot] < 0) continue;
      const int64_t piece = ranges.piece_of(tags[slot]);
      ++counts[2 * piece];
      counts[2 * piece + 1] += dirty[slot] != 0;
    }
  });
  std::vector<int64_t> before(size + 2);  // prefix sums over pieces
  for (int64_t i = 0; i < size; ++i) {
    before[i + 2] = before[i];
    for (int64_t worker = 0; worker < workers; ++worker) before[i + 2] += found[worker * size + i];
  }
  int64_t* counts = out.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < 2 * parts; ++i)
    counts[i] = before[2 * ranges.end(i / 2) + i % 2] - before[2 * ranges.begin(i / 2) + i % 2];
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) {
  implement<&lookup>(m, "row_cache_lookup.layout");
  implement<&flush>(m, "row_cache_flush_.layout");
  implement<&stats>(m, "row_cache_stats.layout");
}

}  // namespace rec_kernels
