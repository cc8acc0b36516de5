// The layout of an embedding_bag call: the location of each feature's rows and the options of its lookup.
//
// A feature has one part, the table that its ids index, or several (docs/ops.md, "Parts"). `layout` is an int64
// matrix with one record per part, sorted by feature, on the device of the ids; `layout_sizes` is a short list of the
// sizes that the host needs. rec_kernels.table_layout (rec_kernels/ops/table_layout.py) makes both, validates every
// field and reports precise errors. The kernels only check what memory safety needs, with fault_of(). A record that
// fails makes the call raise (on a GPU: set `status`), and no memory outside the given tensors is accessed.
#pragma once

#include "core/division.h"
#include "core/philox.h"
#include "rows/formats/format_list.h"

namespace rec_kernels {

// Maps ids to rows of a table: row = (id / divisor) % modulus.
struct Partition {
  Divisor divisor, modulus;
  bool divides, wraps;  // false if the division or the remainder is the identity for all ids of the feature
  bool narrow;          // ids are below 2^31

  RK_HOST_DEVICE static Partition of(int64_t divisor, int64_t modulus, int64_t id_limit) {
    return {Divisor::of(divisor), Divisor::of(modulus), divisor != 1, quotients(id_limit, divisor) > modulus,
            id_limit <= INT64_C(1) << 31};
  }
  // Number of distinct values of id / divisor for ids in [0, id_limit).
  RK_HOST_DEVICE static int64_t quotients(int64_t id_limit, int64_t divisor) {
    return id_limit / divisor + (id_limit % divisor != 0);
  }
  RK_HOST_DEVICE int64_t row(int64_t id) const {
    if (narrow) {
      const auto n = static_cast<uint32_t>(id), quotient = divides ? divisor.divide_narrow(n) : n;
      return wraps ? modulus.remainder_narrow(quotient) : quotient;
    }
    const int64_t quotient = divides ? divisor.divide(id) : id;
    return wraps ? modulus.remainder(quotient) : quotient;
  }
};

// Combines the rows of a feature's parts per id: concatenated columns, the sum, or the product.
enum class Combine { kConcat, kAdd, kMult };

// Maximum number of parts of a feature.
constexpr int64_t kMaxParts = 4;

// Values of TablePart::id_limit for a hashed feature, which accepts every integer as an id, including negative ones.
constexpr int64_t kEveryId = -1;
constexpr int64_t kEveryOtherId = -2;  // every integer but padding_idx, which may be any integer

// A row of `layout`; the enum Column of rec_kernels/ops/table_layout.py lists the fields in the same order.
struct TablePart {
  int64_t weight_offset;   // in bytes: where the table starts in `weights`
  int64_t row_offset;      // linear row of the table's row 0: its index in optimizer state and its key in row caches
  int64_t num_embeddings;  // rows of this shard
  int64_t table_rows;      // rows of the unsharded table
  int64_t embedding_dim;
  int64_t column;                   // first output column
  int64_t part_column;              // first column relative to the feature's first column, for calls with bag_starts
  int64_t table_id;                 // selects the noise of stochastic rounding
  int64_t state_offset;             // start of the table in per-element optimizer state
  int64_t feature;                  // index of the feature that the part belongs to
  int64_t part_start;               // record i: first part of *feature i*; num_parts if i >= num_features
  int64_t id_limit;                 // ids of the feature are in [0, id_limit), or kEveryId, kEveryOtherId
  int64_t padding_idx;              // id that is skipped and gets no gradient; -1: none
  int64_t divisor, modulus;         // row = id / divisor % modulus; the remainder of a negative id is in [0, modulus)
  int64_t combine;                  // Combine: with the feature's other parts
  int64_t format;                   // RowFormat
  int64_t first_row, first_column;  // position of the shard in the unsharded table, whose noise it uses
  int64_t mean;                     // 1: mean pooling
  int64_t frozen;                   // 1: the table gets no gradient from this feature
  int64_t multiplied;               // 1: some feature multiplies rows of the table
  int64_t cache_sets;               // sets of the row cache that may hold the table's rows; 0: the table is not cached
  int64_t cache_first_set;
  int64_t cache_row_offset;  // position of slot 0 in cache_rows if all slots had the table's width
  int64_t by_row;            // record i: index of the i-th part in order of linear rows, empty tables first

  RK_HOST_DEVICE bool takes_every_id() const { return id_limit < 0; }
  RK_HOST_DEVICE bool is_padding(int64_t id) const { return id == padding_idx && id_limit != kEveryId; }
  // Replaces an id of a hashed feature by its row, or by `padding` for padding_idx.
  RK_HOST_DEVICE int64_t hashed_row(int64_t id, const Divisor& by_modulus, int64_t padding) const {
    return is_padding(id) ? padding : by_modulus.floor_remainder(id);
  }
};
constexpr int64_t kLayoutColumns = 26;
static_assert(sizeof(TablePart) == kLayoutColumns * sizeof(int64_t), "a record is a row of the matrix");

// `layout_sizes`; the enum Size of rec_kernels/ops/table_layout.py lists the fields in the same order.
struct LayoutSizes {
  int64_t num_features;
  int64_t output_dim;         // output columns
  int64_t widest_feature;     // output columns of calls with bag_starts: at least the widest feature
  int64_t num_rows;           // upper bound of linear rows, exclusive
  int64_t max_embedding_dim;  // upper bound of part widths
  int64_t most_parts;         // upper bound of parts per feature
  int64_t cache_ways;         // ways of the row cache; 0: no cache
  int64_t formats;            // bit mask of 1 << RowFormat
  int64_t flags;              // bit mask of LayoutFlag
};
constexpr int64_t kLayoutSizes = 9;
static_assert(sizeof(LayoutSizes) == kLayoutSizes * sizeof(int64_t), "a list of numbers");
// Maximum associativity of a row cache.
constexpr int64_t kMaxWays = 1024;
enum LayoutFlag : int64_t {
  kAnyMean = 1,     // some feature uses mean pooling
  kMultiplies = 2,  // some feature multiplies the rows of its parts
  kBytes = 4,       // `weights` is uint8 (encoded rows), not float32
  kMapsIds = 8,     // some feature maps ids to rows by a divisor or modulus
  kPads = 16,       // some feature has a padding_idx: CUDA kernels read a copy of the ids with padding masked
  kHashes = 32,     // some feature accepts every integer: kernels read a copy of the ids with its ids replaced by rows
};

// Reasons why a record is invalid.
enum class LayoutFault {
  kNone,
  kFeature,
  kWidth,
  kFormat,
  kRows,
  kWeights,
  kColumns,
  kIds,
  kParts,
  kTableId,
  kShard,
  kState,
  kCache,
  kOverlap,
};

// Sizes of the tensors of a call, which its records must stay within.
struct LayoutLimits {
  int64_t num_parts;
  int64_t weight_bytes;
  int64_t state_elements;        // size of per-element optimizer state; -1: none
  int64_t cache_slots;           // -1: no cache
  int64_t cache_elements;        // size of cache_rows; -1: not given
  int64_t tables = kMaxTableId;  // upper bound of table_id, exclusive
};

inline namespace RK_ISA {

// Shard that selects the noise of a record's rows. The record has passed fault_of().
RK_HOST_DEVICE TableShard shard_of(const TablePart& p) {
  return {static_cast<uint32_t>(p.table_id), static_cast<uint32_t>(p.first_column / 4), p.first_row};
}

// True if 0 <= value <= limit.
RK_HOST_DEVICE bool within_limit(int64_t value, int64_t limit) { return value >= 0 && value <= limit; }

// True if [first, first + count) is within [0, whole).
RK_HOST_DEVICE bool is_within(int64_t first, int64_t count, int64_t whole) {
  return count >= 0 && within_limit(first, whole) && count <= whole - first;
}

// First part of a feature, or num_parts after the last feature.
RK_HOST_DEVICE int64_t part_start(const TablePart* parts, int64_t feature, const LayoutSizes& sizes,
                                  int64_t num_parts) {
  return feature < sizes.num_features ? parts[feature].part_start : num_parts;
}

// True if feature f has 1 to most_parts parts, which follow those of the previous feature.
RK_HOST_DEVICE bool has_parts(const TablePart* parts, int64_t f, const LayoutSizes& sizes, int64_t num_parts) {
  const int64_t start = parts[f].part_start, end = part_start(parts, f + 1, sizes, num_parts);
  return (f > 0 || start == 0) && start >= 0 && start < end && end <= num_parts && end - start <= sizes.most_parts;
}

// True if parts[i] is within the range of its feature's parts, and feature i, if it exists, has parts.
RK_HOST_DEVICE bool is_in_order(const TablePart* parts, int64_t i, const LayoutSizes& sizes, int64_t num_parts) {
  if (i < sizes.num_features && !has_parts(parts, i, sizes, num_parts)) return false;
  const int64_t f = parts[i].feature;
  if (f < 0 || f >= sizes.num_features || !has_parts(parts, f, sizes, num_parts)) return false;
  return parts[f].part_start <= i && i < part_start(parts, f + 1, sizes, num_parts);
}

// True if the columns of part i follow those of the previous part, or equal them where parts are added or multiplied.
RK_HOST_DEVICE bool are_next_columns(const TablePart* parts, int64_t i, const LayoutSizes& sizes, int64_t num_parts) {
  const TablePart& p = parts[i];
  int64_t column = 0, part_column = 0;
  if (i > 0) {
    const TablePart& before = parts[i - 1];
    const bool same = before.feature == p.feature, fits = within_limit(before.embedding_dim, sizes.max_embedding_dim);
    if (!fits || !is_within(before.column, before.embedding_dim, sizes.output_dim) ||
        !is_within(before.part_column, before.embedding_dim, sizes.widest_feature))
      return false;
    const bool shared = same && p.combine != static_cast<int64_t>(Combine::kConcat);
    column = before.column + (shared ? 0 : before.embedding_dim);
    if (same) part_column = before.part_column + (shared ? 0 : before.embedding_dim);
  }
  return p.column == column && p.part_column == part_column && is_within(column, p.embedding_dim, sizes.output_dim) &&
         is_within(part_column, p.embedding_dim, sizes.widest_feature) &&
         (i + 1 < num_parts || column + p.embedding_dim == sizes.output_dim);
}

// True if a part has the options of its feature's first part, and the same shape if they are added or multiplied.
RK_HOST_DEVICE bool agrees_with_first(const TablePart& p, const TablePart& first, bool single_part) {
  const bool feature = p.id_limit == first.id_limit && p.padding_idx == first.padding_idx &&
                       p.combine == first.combine && p.mean == first.mean && p.frozen == first.frozen;
  const bool one = single_part || p.combine == static_cast<int64_t>(Combine::kConcat) ||
                   (p.embedding_dim == first.embedding_dim && p.format == first.format);
  return feature && one && p.combine >= 0 && p.combine <= 2;
}

// True if two parts read the same whole table.
RK_HOST_DEVICE bool share_table(const TablePart& a, const TablePart& b) {
  return a.row_offset == b.row_offset && a.num_embeddings == b.num_embeddings && a.embedding_dim == b.embedding_dim &&
         a.weight_offset == b.weight_offset && a.format == b.format && a.table_id == b.table_id &&
         a.state_offset == b.state_offset && a.multiplied == b.multiplied && a.cache_sets == b.cache_sets &&
         a.cache_first_set == b.cache_first_set && a.cache_row_offset == b.cache_row_offset &&
         a.first_row == b.first_row && a.first_column == b.first_column;
}

// True if by_row[i] is valid: parts are sorted by rows, and two tables are identical or disjoint.
RK_HOST_DEVICE bool follows_in_rows(const TablePart* parts, int64_t i, int64_t num_parts) {
  const int64_t here = parts[i].by_row;
  if (here < 0 || here >= num_parts) return false;
  if (i == 0) return true;
  const int64_t before = parts[i - 1].by_row;
  if (before < 0 || before >= num_parts) return false;
  const TablePart &a = parts[before], &b = parts[here];
  const bool full = b.num_embeddings > 0;
  if ((a.num_embeddings > 0) != full) return full;
  if (a.row_offset == b.row_offset) return before < here && (!full || share_table(a, b));
  return a.row_offset >= 0 && a.row_offset < b.row_offset && (!full || a.num_embeddings <= b.row_offset - a.row_offset);
}

// True if an earlier part of the same feature reads the same table, which would split the gradient of a row.
RK_HOST_DEVICE bool repeats_table(const TablePart* parts, int64_t i) {
  bool repeats = false;
  for (int64_t j = parts[parts[i].feature].part_start; j < i; ++j)
    repeats |= parts[j].row_offset == parts[i].row_offset && parts[j].num_embeddings > 0;
  return repeats && parts[i].num_embeddings > 0;
}

// True if every id maps to a row of the table, and `flags` announce the mapping.
RK_HOST_DEVICE bool leads_to_rows(const TablePart& p, bool single_part, int64_t flags) {
  if (p.divisor < 1 || p.modulus < 1) return false;
  const bool pads = p.padding_idx != -1 || p.id_limit == kEveryOtherId;
  if (pads && !(flags & kPads)) return false;
  const bool is_plain = p.divisor == 1 && p.modulus >= p.id_limit && !p.takes_every_id();
  if (!is_plain && !(flags & kMapsIds)) return false;
  if (p.takes_every_id())
    return single_part && flags & kHashes && p.divisor == 1 && p.modulus <= p.num_embeddings &&
           (p.id_limit == kEveryOtherId || (p.id_limit == kEveryId && !pads));
  const int64_t quotients = Partition::quotients(p.id_limit, p.divisor);
  return (quotients < p.modulus ? quotients : p.modulus) <= p.num_embeddings;
}

RK_HOST_DEVICE LayoutFault cache_fault_of(const TablePart& p, bool single_part, const LayoutSizes& sizes,
                                          const LayoutLimits& limits) {
  if (limits.cache_slots < 0 || p.cache_sets == 0) return LayoutFault::kNone;
  const int64_t sets = limits.cache_slots / sizes.cache_ways;
  if (!single_part || !is_within(p.cache_first_set, p.cache_sets, sets)) return LayoutFault::kCache;
  if (limits.cache_elements < 0) return LayoutFault::kNone;
  // Up to 2^63 / 8 slots of up to 2^31 columns: the products need more than 64 bits.
  const __int128 slot = p.cache_first_set * sizes.cache_ways, slots = p.cache_sets * sizes.cache_ways;
  const __int128 begin = p.cache_row_offset + slot * p.embedding_dim, end = begin + slots * p.embedding_dim;
  return begin >= 0 && end <= limits.cache_elements ? LayoutFault::kNone : LayoutFault::kCache;
}

// Returns the reason why record i would be unsafe for a kernel. The kernels rely on records that pass.
RK_HOST_DEVICE LayoutFault fault_of(const TablePart* parts, int64_t i, const LayoutSizes& sizes,
                                    const LayoutLimits& limits) {
  const TablePart& p = parts[i];
  if (!is_in_order(parts, i, sizes, limits.num_parts)) return LayoutFault::kFeature;
  if (p.embedding_dim < 1 || p.embedding_dim > sizes.max_embedding_dim) return LayoutFault::kWidth;
  if (p.format < 0 || p.format >= kNumRowFormats || !(sizes.formats >> p.format & 1) ||
      (!(sizes.flags & kBytes) && p.format != 0))
    return LayoutFault::kFormat;
  const auto format = static_cast<RowFormat>(p.format);
  if (!is_within(p.row_offset, p.num_embeddings, sizes.num_rows)) return LayoutFault::kRows;
  if (!within_limit(p.weight_offset, limits.weight_bytes) ||
      p.num_embeddings > (limits.weight_bytes - p.weight_offset) / row_bytes(format, p.embedding_dim) ||
      (format == RowFormat::kFp32 && p.weight_offset % 4 != 0))
    return LayoutFault::kWeights;
  if (!are_next_columns(parts, i, sizes, limits.num_parts)) return LayoutFault::kColumns;
  const int64_t first = parts[p.feature].part_start;
  const bool last = i + 1 == limits.num_parts || parts[i + 1].feature != p.feature;
  const bool single_part = first == i && last;
  if (!leads_to_rows(p, single_part, sizes.flags)) return LayoutFault::kIds;
  if (!agrees_with_first(p, parts[first], single_part) || (p.mean != 0 && !(sizes.flags & kAnyMean)) ||
      (!single_part && p.combine == static_cast<int64_t>(Combine::kMult) &&
       (!(sizes.flags & kMultiplies) || (p.num_embeddings > 0 && p.multiplied != 1))) ||
      p.multiplied < 0 || p.multiplied > ((sizes.flags & kMultiplies) != 0))
    return LayoutFault::kParts;
  if (p.table_id < 0 || p.table_id >= limits.tables) return LayoutFault::kTableId;
  if (!is_within(p.first_row, p.num_embeddings, p.table_rows) || p.table_rows > kMaxNoisyRows || p.first_column < 0 ||
      p.first_column > INT32_MAX || p.first_column % 4 != 0)
    return LayoutFault::kShard;
  if (limits.state_elements >= 0 && (!within_limit(p.state_offset, limits.state_elements) ||
                                     p.num_embeddings > (limits.state_elements - p.state_offset) / p.embedding_dim))
    return LayoutFault::kState;
  if (!follows_in_rows(parts, i, limits.num_parts) || repeats_table(parts, i)) return LayoutFault::kOverlap;
  return cache_fault_of(p, single_part, sizes, limits);
}

}  // namespace RK_ISA
}  // namespace rec_kernels
