// The tables of a row cache: decodes their rows into slots and encodes slots back into them.
#pragma once

#include <algorithm>
#include <vector>

#include "core/prefetch.h"
#include "row_cache/cpu/row_cache.h"
#include "rows/cpu/row_formats.h"

namespace rec_kernels {

class CachedTables {
 public:
  // `clock` is the step of the rounding noise.
  CachedTables(const BagInput& in, const CacheView& cache, uint8_t* weights, const UpdateRounding& how, int64_t clock)
      : in_(in), cache_(cache), weights_(weights), formats_(kernels<RowFormatKernels>()) {
    encode_ = how.stochastic ? formats_.stochastic : formats_.nearest;
    rounding_ = {make_noise(how.seed ? *how.seed : 0, clock), how.stochastic};
    rounding_.noise.stream = kEvictionStream;
    for (int64_t p = 0; p < in.bags.num_parts; ++p)
      if (cache.places[p].sets > 0 && in.parts[p].num_embeddings > 0) parts_.push_back(p);
    // Parts of the same table are sorted in descending order, so that the first one is last.
    std::sort(parts_.begin(), parts_.end(),
              [&](int64_t a, int64_t b) { return first_row(a) != first_row(b) ? first_row(a) < first_row(b) : a > b; });
    for (const int64_t p : parts_) {
      const CachePlace& place = cache.places[p];
      const int64_t first = first_row(p), end = first + in.parts[p].num_embeddings;
      if (!rows_.empty() && rows_.back().end >= first && rows_.back().first_set == place.first &&
          rows_.back().sets == place.sets)
        rows_.back().end = end;
      else rows_.push_back({first, end, place.sets, place.first});
    }
  }

  // The first part whose table has the linear row, or -1.
  int64_t part_of(int64_t row) const {
    const auto after =
        std::upper_bound(parts_.begin(), parts_.end(), row, [&](int64_t r, int64_t p) { return r < first_row(p); });
    if (after == parts_.begin()) return -1;
    const int64_t p = *(after - 1);
    return row - first_row(p) < in_.parts[p].num_embeddings ? p : -1;
  }
  // part_of() for the row in a slot; also -1 if that part cannot use the slot. Callers may write arbitrary tags.
  int64_t part_at(int64_t slot, int64_t row) const {
    const int64_t p = part_of(row);
    return p >= 0 && cache_.places[p].has(slot, cache_.ways) ? p : -1;
  }
  // Linear rows [first, end) of adjacent tables that share their sets.
  struct Rows {
    int64_t first, end, sets, first_set;
    bool contains(int64_t row) const { return first <= row && row < end; }
  };
  // The Rows that contain a row of a cached part.
  const Rows& rows_of(int64_t row) const {
    const auto after =
        std::upper_bound(rows_.begin(), rows_.end(), row, [](int64_t r, const Rows& rows) { return r < rows.first; });
    return *(after - 1);
  }

  // Writes the row in a slot back to its table, if it belongs to one.
  void encode(int64_t slot) const {
    const int64_t row = cache_.tags[slot], p = part_at(slot, row);
    if (p >= 0) encode(p, row, slot);
  }
  // Writes a slot back to the table of a part, as the given linear row.
  void encode(int64_t p, int64_t row, int64_t slot) const {
    const Part& f = in_.parts[p];
    const int64_t table_row = row - f.row_offset;
    RowRounding how = rounding_;
    how.noise.shard = f.shard;
    encode_[static_cast<int>(f.format)](slot_row(p, slot), 1, f.embedding_dim, how,
                                        {weights_ + f.weight_offset, 0, &table_row});
  }
  // Reads a linear row of a part's table into a slot.
  void decode(int64_t p, int64_t row, int64_t slot) const {
    const Part& f = in_.parts[p];
    formats_.decode[static_cast<int>(f.format)](table_row(f, row), 1, f.embedding_dim, slot_row(p, slot));
  }
  void prefetch_row(int64_t p, int64_t row) const {
    const Part& f = in_.parts[p];
    prefetch_bytes(table_row(f, row), f.row_bytes);
  }
  void prefetch_slot(int64_t p, int64_t slot) const {
    prefetch_bytes(slot_row(p, slot), in_.parts[p].embedding_dim * 4);
  }

 private:
  int64_t first_row(int64_t p) const { return in_.parts[p].row_offset; }
  const uint8_t* table_row(const Part& f, int64_t row) const {
    return weights_ + f.weight_offset + (row - f.row_offset) * f.row_bytes;
  }
  float* slot_row(int64_t p, int64_t slot) const {
    return cache_.rows + (cache_.places[p].offset + slot * in_.parts[p].embedding_dim);
  }

  const BagInput& in_;
  const CacheView& cache_;
  uint8_t* weights_;
  const RowFormatKernels& formats_;
  const RowFormatKernels::EncodeRows* encode_;
  RowRounding rounding_;
  std::vector<int64_t> parts_;  // cached parts, sorted by rows
  std::vector<Rows> rows_;
};

}  // namespace rec_kernels
