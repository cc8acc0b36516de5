// Input and output of embedding_bag's kernels: plain structs, filled by the drivers.
#pragma once

#include "embedding_bag/table_layout.h"

namespace rec_kernels {

// The first element of a `status`, and BadPosition::position, when nothing is wrong.
constexpr int64_t kNoBadPosition = INT64_MAX;

// Occurrences of a row are summed in chunks of this many; part of the numerics, not a tuning knob.
constexpr int64_t kChunk = 64;

// A table as a feature reads it. A feature of several parts has one of these for each, one after the other.
struct Part {
  int64_t weight_offset;  // in bytes
  int64_t row_offset;
  int64_t num_embeddings;
  int64_t embedding_dim;
  int64_t output_offset;
  TableShard shard;   // of stochastic rounding's noise; its table is that of statistics, too
  int64_t row_bytes;  // on the CPU; CUDA kernels know their format
  RowFormat format;
  bool mean;
  bool frozen;          // its ids give the table no gradient
  int64_t id_limit;     // ids are in [0, id_limit)
  int64_t padding_idx;  // on the CPU, the id that is left out, where some feature has one
  int64_t number;       // of the feature, whose bags these are
  bool partitioned;
  Partition partition;  // unless !partitioned: an id is its row
  Combine combine;      // with the feature's other parts

  // A linear row's number in the whole table.
  RK_HOST_DEVICE int64_t whole_row(int64_t linear) const { return linear - row_offset + shard.first_row; }
  RK_HOST_DEVICE int64_t row(int64_t id) const { return partitioned ? partition.row(id) : id; }

  // Makes a part from a record that fault_of() has passed; `alone`: the only part of its feature.
  RK_HOST_DEVICE static Part of(const TablePart& p, bool alone) {
    Part f{};
    f.weight_offset = p.weight_offset;
    f.row_offset = p.row_offset;
    f.num_embeddings = p.num_embeddings;
    f.embedding_dim = p.embedding_dim;
    f.output_offset = p.column;
    f.shard = shard_of(p);
    f.format = static_cast<RowFormat>(p.format);
    f.row_bytes = rec_kernels::row_bytes(f.format, p.embedding_dim);
    f.mean = p.mean != 0;
    f.frozen = p.frozen != 0;
    f.id_limit = p.id_limit;
    f.padding_idx = p.padding_idx;
    if (p.takes_every_id()) {  // its ids are rows by then, and padding is the number behind them
      f.padding_idx = p.modulus;
      f.id_limit = p.modulus + (p.id_limit == kEveryOtherId);
    }
    f.number = p.feature;
    f.partitioned = p.divisor != 1 || p.id_limit > p.modulus;
    if (f.partitioned) f.partition = Partition::of(p.divisor, p.modulus, p.id_limit);
    f.combine = alone ? Combine::kConcat : static_cast<Combine>(p.combine);
    return f;
  }
};

// Jagged input: ids and offsets of either integer width.
struct Bags {
  const void* ids;
  const void* offsets;
  const float* per_sample_weights;  // or null
  int64_t num_ids;
  int64_t num_offsets;  // stored; the offset after the last stored one is num_ids, as torch has it
  int64_t num_bags;     // F * B, or the last of `starts`
  int64_t num_features;
  int64_t batch;          // B; unused with `starts` and no `groups`
  const int64_t* starts;  // [F + 1]: feature f has bags [starts[f], starts[f + 1]), each with a row of the output of
                          // its own; or null: every feature has B, and a row of the output is all features' b-th bags
  const int64_t* groups;  // [F], with `starts`: the group of a feature whose bags samples share, and -1: b-th bags are
                          // row b, as without `starts`; or null
  void* shared_rows;  // with `groups`: SharedRows, which has the rows of bags of features in groups; as wide as those
                      // of the output
  const TablePart* parts;  // the records; null: every feature has one part
  int64_t num_parts;
  bool pads;            // on the CPU: each feature leaves out its padding_idx
  int64_t padding_idx;  // without `pads`, the id that every feature leaves out; -1: none
  bool own_rows;        // every bag has a row of the output to itself: there are `starts`, and no `groups`
  bool ids64;
  bool offsets64;
  bool check_ids;

  // Always inlined: an out-of-line copy would be shared by every instruction set (core/host_device.h).
  RK_HOST_DEVICE int64_t offset(int64_t i) const {
    if (__builtin_expect(i >= num_offsets, 0)) return num_ids;
    return offsets64 ? static_cast<const int64_t*>(offsets)[i] : static_cast<const int32_t*>(offsets)[i];
  }
  RK_HOST_DEVICE int64_t id(int64_t i) const {
    return ids64 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
  }
  // Compared unsigned, so that a negative id is out of range too.
  RK_HOST_DEVICE bool in_range(int64_t id, const Part& f) const {
    return !check_ids || static_cast<uint64_t>(id) < static_cast<uint64_t>(f.id_limit);
  }
  // Feature f has the parts from first_part(f) up to first_part(f + 1).
  RK_HOST_DEVICE int64_t first_part(int64_t feature) const {
    if (!parts) return feature;
    return feature < num_features ? parts[feature].part_start : num_parts;
  }
  // The id that a part's feature leaves out; padding_idx itself in CUDA kernels, for which ids are masked.
  RK_HOST_DEVICE int64_t padding_of(const Part& f) const {
    return __builtin_expect(pads, 0) ? f.padding_idx : padding_idx;
  }
  // True if the id is looked up, and has a gradient; `padding` is left out.
  RK_HOST_DEVICE bool counts(int64_t id, const Part& f, int64_t padding) const {
    return in_range(id, f) && id != padding;
  }
  RK_HOST_DEVICE int64_t first_bag(int64_t feature) const { return starts ? starts[feature] : feature * batch; }
  RK_HOST_DEVICE int64_t feature_of(int64_t bag) const {
    if (!starts) return bag / batch;
    int64_t low = 0, high = num_features;  // the last feature that starts at or before the bag
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (starts[middle] <= bag ? low : high) = middle;
    }
    return low;
  }
  // Rows of the output.
  RK_HOST_DEVICE int64_t output_rows() const { return own_rows ? num_bags : batch; }
  // Row of a feature's bag in the output.
  RK_HOST_DEVICE int64_t output_row(int64_t bag, int64_t feature) const {
    if (!starts) return bag - feature * batch;
    return groups ? bag - starts[feature] : bag;
  }
  // Rows that hold it: `own`, of the output or its gradient, or the shared rows in place of them.
  template <class T>
  RK_HOST_DEVICE T* rows_of(int64_t feature, T* own) const {
    return groups && groups[feature] >= 0 ? static_cast<T*>(shared_rows) : own;
  }
  // This row, of `width` elements.
  template <class T>
  RK_HOST_DEVICE T* row_of(int64_t bag, int64_t feature, T* own, int64_t width) const {
    return rows_of(feature, own) + output_row(bag, feature) * width;
  }
  // True if every offset of bags [begin, end) is the one before it plus 1 (kByOne), or no smaller.
  template <bool kByOne>
  RK_HOST_DEVICE bool offsets_rise(int64_t begin, int64_t end) const {
    if (begin == end) return true;
    const int64_t stored = end < num_offsets ? end : num_offsets - 1;  // the last one of them that is in memory
    const bool rise = offsets64 ? rises<kByOne>(static_cast<const int64_t*>(offsets), begin, stored)
                                : rises<kByOne>(static_cast<const int32_t*>(offsets), begin, stored);
    if (stored == end || !rise) return rise;
    return kByOne ? num_ids - offset(stored) == 1 : num_ids >= offset(stored);
  }
  // True if each of bags [begin, end) has one id, which is among the ids.
  RK_HOST_DEVICE bool have_one_id(int64_t begin, int64_t end) const {
    const int64_t first = offset(begin), last = offset(end);
    const bool inside = 0 <= first && first <= last && last <= num_ids;
    return inside && last - first == end - begin && offsets_rise<true>(begin, end);
  }
  // Checks the offsets of bags [begin, end): -1 - i for the first bad offsets[i], or kNoBadPosition.
  RK_HOST_DEVICE int64_t bad_offset(int64_t begin, int64_t end) const {
    int64_t previous = offset(begin);
    if (previous < 0 || previous > num_ids) return -1 - begin;
    if (offset(end) <= num_ids && offsets_rise<false>(begin, end)) return kNoBadPosition;
    for (int64_t i = begin + 1; i <= end; ++i) {
      const int64_t next = offset(i);
      if (next < previous || next > num_ids) return -1 - i;
      previous = next;
    }
    return kNoBadPosition;
  }

 private:
  // Branch-free, so that compilers look at several at once; unsigned, because bad offsets may be anything.
  template <bool kByOne, class Offset>
  RK_HOST_DEVICE static bool rises(const Offset* offsets, int64_t begin, int64_t end) {
    uint64_t bad = 0;
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t length = static_cast<uint64_t>(offsets[i + 1]) - static_cast<uint64_t>(offsets[i]);
      bad |= kByOne ? length ^ 1 : uint64_t{offsets[i + 1] < offsets[i]};
    }
    return bad == 0;
  }
};

// Rows that are read from a cache: that of id i starts at rows[cache_row_offset of its part + slots[i] * D].
struct CachedPool {
  const float* rows;
  const int64_t* slots;  // -1: the row is in none of them; null: there is no cache
  int64_t num_elements;  // of rows
};

// A lookup as the kernels of every backend read it. Each adds the parts as it keeps them.
struct Lookup {
  const uint8_t* weights;
  Bags bags;
  uint8_t* output;
  RowFormat output_format;  // kFp32, kFp16 or kBf16: of its elements
  int64_t output_dim;
  CachedPool cache;

  RK_HOST_DEVICE int64_t output_bytes() const { return output_format == RowFormat::kFp32 ? 4 : 2; }
};

}  // namespace rec_kernels
