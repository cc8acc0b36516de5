// Plain structs that the drivers fill and the kernels of embedding_bag read.
#pragma once

#include "embedding_bag/table_layout.h"

namespace rec_kernels {

// First element of `status`, and BadPosition::position, when no input is bad.
constexpr int64_t kNoBadPosition = INT64_MAX;

// Chunk size for summing the occurrences of a row. It defines the numerics and must not be tuned.
constexpr int64_t kChunk = 64;

// A table as one feature reads it. The parts of a composed feature are consecutive.
struct Part {
  int64_t weight_offset;  // in bytes
  int64_t row_offset;
  int64_t num_embeddings;
  int64_t embedding_dim;
  int64_t output_offset;
  TableShard shard;   // selects the stochastic rounding noise; its table also indexes the statistics
  int64_t row_bytes;  // CPU only: CUDA kernels are compiled per format
  RowFormat format;
  bool mean;
  bool frozen;          // the table gets no gradient from this feature
  int64_t id_limit;     // ids are in [0, id_limit)
  int64_t padding_idx;  // CPU only, with Bags::pads: the id to skip
  int64_t feature;      // index of the feature whose bags are looked up
  bool partitioned;
  Partition partition;  // unused if !partitioned, where an id is its own row
  Combine combine;      // with the feature's other parts

  // Converts a linear row to the row index in the unsharded table.
  RK_HOST_DEVICE int64_t whole_row(int64_t linear) const { return linear - row_offset + shard.first_row; }
  RK_HOST_DEVICE int64_t row(int64_t id) const { return partitioned ? partition.row(id) : id; }

  // Builds a part from a record that passed fault_of(). `single_part`: the feature has no other part.
  RK_HOST_DEVICE static Part of(const TablePart& p, bool single_part) {
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
    if (p.takes_every_id()) {  // ids have already been replaced by rows, and padding by `modulus`
      f.padding_idx = p.modulus;
      f.id_limit = p.modulus + (p.id_limit == kEveryOtherId);
    }
    f.feature = p.feature;
    f.partitioned = p.divisor != 1 || p.id_limit > p.modulus;
    if (f.partitioned) f.partition = Partition::of(p.divisor, p.modulus, p.id_limit);
    f.combine = single_part ? Combine::kConcat : static_cast<Combine>(p.combine);
    return f;
  }
};

// Jagged input: ids and offsets of either integer width.
struct Bags {
  const void* ids;
  const void* offsets;
  const float* per_sample_weights;  // or null
  int64_t num_ids;
  int64_t num_offsets;  // number of stored offsets; the offset after the last one is num_ids, as in torch
  int64_t num_bags;     // F * B, or the last element of `starts`
  int64_t num_features;
  int64_t batch;          // B; unused with `starts` but no `groups`
  const int64_t* starts;  // [F + 1]: feature f has bags [starts[f], starts[f + 1]), one output row per bag. Null: every
                          // feature has B bags, and output row b holds the b-th bag of every feature
  const int64_t* groups;  // [F], with `starts`: the deduplication group of each feature, or -1 for a feature that is
                          // not deduplicated and whose b-th bag is in row b. Null: no feature is deduplicated
  void* shared_rows;  // with `groups`: the rows of SharedRows, as wide as the output, for bags of features in groups
  const TablePart* parts;  // the layout's records; null: every feature has one part
  int64_t num_parts;
  bool pads;            // CPU only: every part has its own padding_idx
  int64_t padding_idx;  // without `pads`, the id that every feature skips; -1: none
  bool own_rows;        // every bag has an output row of its own: `starts` without `groups`
  bool ids64;
  bool offsets64;
  bool check_ids;

  // Always inlined: the linker would share an out-of-line copy among instruction sets (core/host_device.h).
  RK_HOST_DEVICE int64_t offset(int64_t i) const {
    if (__builtin_expect(i >= num_offsets, 0)) return num_ids;
    return offsets64 ? static_cast<const int64_t*>(offsets)[i] : static_cast<const int32_t*>(offsets)[i];
  }
  RK_HOST_DEVICE int64_t id(int64_t i) const {
    return ids64 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
  }
  // The unsigned comparison also rejects negative ids.
  RK_HOST_DEVICE bool in_range(int64_t id, const Part& f) const {
    return !check_ids || static_cast<uint64_t>(id) < static_cast<uint64_t>(f.id_limit);
  }
  // Feature f has parts [first_part(f), first_part(f + 1)).
  RK_HOST_DEVICE int64_t first_part(int64_t feature) const {
    if (!parts) return feature;
    return feature < num_features ? parts[feature].part_start : num_parts;
  }
  // The padding id of a part. CUDA kernels read masked ids and use the common padding_idx.
  RK_HOST_DEVICE int64_t padding_of(const Part& f) const {
    return __builtin_expect(pads, 0) ? f.padding_idx : padding_idx;
  }
  // True if the id contributes to its bag: it is in range and is not `padding`.
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
  // Number of output rows.
  RK_HOST_DEVICE int64_t output_rows() const { return own_rows ? num_bags : batch; }
  // Output row of a feature's bag.
  RK_HOST_DEVICE int64_t output_row(int64_t bag, int64_t feature) const {
    if (!starts) return bag - feature * batch;
    return groups ? bag - starts[feature] : bag;
  }
  // Buffer with a feature's rows: `own` (the output or its gradient), or the shared rows for a feature in a group.
  template <class T>
  RK_HOST_DEVICE T* rows_of(int64_t feature, T* own) const {
    return groups && groups[feature] >= 0 ? static_cast<T*>(shared_rows) : own;
  }
  // The row of a bag, in rows of `width` elements.
  template <class T>
  RK_HOST_DEVICE T* row_of(int64_t bag, int64_t feature, T* own, int64_t width) const {
    return rows_of(feature, own) + output_row(bag, feature) * width;
  }
  // True if the offsets of bags [begin, end) increase by exactly 1 (kByOne), or never decrease.
  template <bool kByOne>
  RK_HOST_DEVICE bool offsets_rise(int64_t begin, int64_t end) const {
    if (begin == end) return true;
    const int64_t stored = end < num_offsets ? end : num_offsets - 1;  // the last stored offset of these bags
    const bool rise = offsets64 ? rises<kByOne>(static_cast<const int64_t*>(offsets), begin, stored)
                                : rises<kByOne>(static_cast<const int32_t*>(offsets), begin, stored);
    if (stored == end || !rise) return rise;
    return kByOne ? num_ids - offset(stored) == 1 : num_ids >= offset(stored);
  }
  // True if each of bags [begin, end) has exactly one id and all offsets are in range.
  RK_HOST_DEVICE bool have_one_id(int64_t begin, int64_t end) const {
    const int64_t first = offset(begin), last = offset(end);
    const bool inside = 0 <= first && first <= last && last <= num_ids;
    return inside && last - first == end - begin && offsets_rise<true>(begin, end);
  }
  // Returns -1 - i for the first bad offsets[i] of bags [begin, end), or kNoBadPosition.
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
  // Branch-free for vectorization; unsigned, since the difference of bad offsets may overflow.
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

// Row cache of a lookup: the row of ids[i] starts at rows[cache_row_offset of its part + slots[i] * D].
struct CachedPool {
  const float* rows;
  const int64_t* slots;  // slot per id, -1 for a row that is not cached; null: no cache
  int64_t num_elements;  // size of `rows`
};

// Arguments of a lookup that the CPU and CUDA kernels share. Each backend adds its own representation of parts.
struct Lookup {
  const uint8_t* weights;
  Bags bags;
  uint8_t* output;
  RowFormat output_format;  // element type: kFp32, kFp16 or kBf16
  int64_t output_dim;
  CachedPool cache;

  RK_HOST_DEVICE int64_t output_bytes() const { return output_format == RowFormat::kFp32 ? 4 : 2; }
};

}  // namespace rec_kernels
