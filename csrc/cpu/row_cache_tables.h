// The tables behind a row cache: rows leave them for slots, decoded, and come back encoded.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/row_cache.h"
#include "cpu/row_formats.h"

namespace rec_kernels {

class CachedTables {
 public:
  // `weights` are those of the tables, `clock` is the step that noise is of.
  CachedTables(const BagInput& in, const CacheView& cache, uint8_t* weights, const UpdateRounding& how, int64_t clock)
      : in_(in), cache_(cache), weights_(weights), formats_(kernels<RowFormatKernels>()) {
    encode_ = how.stochastic ? formats_.stochastic : formats_.nearest;
    rounding_ = {make_noise(how.seed ? *how.seed : 0, clock), how.stochastic};
    rounding_.noise.stream = kEvictionStream;
    for (int64_t p = 0; p < in.num_parts; ++p)
      if (cache.places[p].sets > 0 && in.features[p].num_embeddings > 0) parts_.push_back(p);
    // Of parts that read one table, the first comes last.
    std::sort(parts_.begin(), parts_.end(),
              [&](int64_t a, int64_t b) { return first_row(a) != first_row(b) ? first_row(a) < first_row(b) : a > b; });
  }

  // The first part whose table has the linear row, or -1.
  int64_t part_of(int64_t row) const {
    const auto after =
        std::upper_bound(parts_.begin(), parts_.end(), row, [&](int64_t r, int64_t p) { return r < first_row(p); });
    if (after == parts_.begin()) return -1;
    const int64_t p = *(after - 1);
    return row - first_row(p) < in_.features[p].num_embeddings ? p : -1;
  }
  // The same of a row in a slot: -1, too, where its table has no such slot. Tags are not ours alone to write.
  int64_t part_at(int64_t slot, int64_t row) const {
    const int64_t p = part_of(row);
    return p >= 0 && cache_.places[p].has(slot, cache_.ways) ? p : -1;
  }
  // The row in a slot back into its table, where there is such a table.
  void encode(int64_t slot) const {
    const int64_t row = cache_.tags[slot], p = part_at(slot, row);
    if (p < 0) return;
    const Feature& f = in_.features[p];
    const int64_t number = row - f.row_offset;
    RowRounding how = rounding_;
    how.noise.table = static_cast<uint32_t>(f.table_id);
    encode_[static_cast<int>(f.format)](slot_row(p, slot), 1, f.embedding_dim, how,
                                        {weights_ + f.weight_offset, 0, &number});
  }
  // A linear row of a part's table into a slot.
  void decode(int64_t p, int64_t row, int64_t slot) const {
    const Feature& f = in_.features[p];
    formats_.decode[static_cast<int>(f.format)](weights_ + f.weight_offset + (row - f.row_offset) * f.row_bytes,
                                                f.embedding_dim, slot_row(p, slot));
  }

 private:
  int64_t first_row(int64_t p) const { return in_.features[p].row_offset; }
  float* slot_row(int64_t p, int64_t slot) const {
    return cache_.rows + (cache_.places[p].offset + slot * in_.features[p].embedding_dim);
  }

  const BagInput& in_;
  const CacheView& cache_;
  uint8_t* weights_;
  const RowFormatKernels& formats_;
  const RowFormatKernels::EncodeRows* encode_;
  RowRounding rounding_;
  std::vector<int64_t> parts_;  // that are cached, by their rows
};

}  // namespace rec_kernels
