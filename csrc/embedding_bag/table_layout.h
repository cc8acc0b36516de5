// The layout of an embedding_bag call: where each feature's rows lie, and what becomes of them.
//
// A feature has one part, the table that its ids are rows of, or several (docs/ops.md, "Partitions"). `layout` is an
// int64 matrix with a record for each part, the parts of a feature side by side, in the order of features, on the
// device of the ids; `layout_sizes` is a short list of what the host must know of all records. Both are made by
// rec_kernels.table_layout (rec_kernels/ops/table_layout.py), which checks everything and names what is wrong. The
// kernels check only what their safety needs, with fault_of(): a record that does not pass has the call refused (on a
// GPU: noted in the status), and no memory outside the given tensors is read or written.
#pragma once

#include "core/division.h"
#include "core/philox.h"
#include "rows/formats/format_list.h"

namespace rec_kernels {

// Maps ids to rows of a table: row = (id / divisor) % modulus.
struct Partition {
  Divisor divisor, modulus;
  bool divides, wraps;  // false where the step changes nothing for any id of the feature
  bool narrow;          // ids are below 2^31

  RK_HOST_DEVICE static Partition of(int64_t divisor, int64_t modulus, int64_t id_limit) {
    return {Divisor::of(divisor), Divisor::of(modulus), divisor != 1, quotients(id_limit, divisor) > modulus,
            id_limit <= INT64_C(1) << 31};
  }
  // Number of different id / divisor for ids in [0, id_limit).
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

// Combination of a feature's parts, id by id: columns side by side, or one row, their sum or product.
enum class Combine { kConcat, kAdd, kMult };

// The most parts that a feature has.
constexpr int64_t kMaxParts = 4;

// TablePart::id_limit of a hashed feature, of which every integer is an id, negative ones, too.
constexpr int64_t kEveryId = -1;
constexpr int64_t kEveryOtherId = -2;  // padding_idx, which may be any integer, is left out

// A row of `layout`. Enum Column of rec_kernels/ops/table_layout.py has the names in the same order.
struct TablePart {
  int64_t weight_offset;   // in bytes: where the table starts in `weights`
  int64_t row_offset;      // the linear row of its row 0: its place in optimizer state, and what caches know it by
  int64_t num_embeddings;  // rows that are here
  int64_t table_rows;      // rows of the whole table, of which these may be a shard
  int64_t embedding_dim;
  int64_t column;        // of the output, where its columns start
  int64_t part_column;   // the same, counted from the first column of its feature: of calls with bag_starts
  int64_t table_id;      // of stochastic rounding's noise
  int64_t state_offset;  // where the table starts in optimizer state for every element
  int64_t feature;       // whose part it is
  int64_t part_start;    // of the feature with the number of this *row*, the first part; num_parts behind the features
  int64_t id_limit;      // ids of the feature are in [0, id_limit), or kEveryId, kEveryOtherId
  int64_t padding_idx;   // the id that is left out of its bags, and has no gradient; -1: none
  int64_t divisor, modulus;         // row = id / divisor % modulus, in [0, modulus) of a negative id, too
  int64_t combine;                  // Combine: with the feature's other parts
  int64_t format;                   // RowFormat
  int64_t first_row, first_column;  // of a shard in the whole table: noise is that of the whole table
  int64_t mean;                     // 1: bags are averaged
  int64_t frozen;                   // 1: ids give the table no gradient
  int64_t multiplied;               // 1: some feature multiplies rows of the table
  int64_t cache_sets;               // of the row cache that rows of the table may be in; 0: the table is not cached
  int64_t cache_first_set;
  int64_t cache_row_offset;  // where slot 0 would be in cache_rows, were all slots of the table's width
  int64_t by_row;            // of row i: the part that is number i by its linear rows; parts of empty tables come first

  RK_HOST_DEVICE bool takes_every_id() const { return id_limit < 0; }
  RK_HOST_DEVICE bool leaves_out(int64_t id) const { return id == padding_idx && id_limit != kEveryId; }
  // The number that kernels read in the place of an id, where every integer is one: its row, or `left_out`.
  RK_HOST_DEVICE int64_t number_of(int64_t id, const Divisor& by_modulus, int64_t left_out) const {
    return leaves_out(id) ? left_out : by_modulus.floor_remainder(id);
  }
};
constexpr int64_t kLayoutColumns = 26;
static_assert(sizeof(TablePart) == kLayoutColumns * sizeof(int64_t), "a record is a row of the matrix");

// `layout_sizes`, in this order; enum Size of rec_kernels/ops/table_layout.py.
struct LayoutSizes {
  int64_t num_features;
  int64_t output_dim;         // columns of the output
  int64_t widest_feature;     // columns of the output of calls with bag_starts: of the widest feature, or more
  int64_t num_rows;           // above every linear row
  int64_t max_embedding_dim;  // no part is wider
  int64_t most_parts;         // no feature has more
  int64_t cache_ways;         // of the row cache; 0: there is none
  int64_t formats;            // bit 1 << RowFormat for each format of the tables
  int64_t flags;              // LayoutFlag
};
constexpr int64_t kLayoutSizes = 9;
static_assert(sizeof(LayoutSizes) == kLayoutSizes * sizeof(int64_t), "a list of numbers");
// The most ways of a set of a row cache.
constexpr int64_t kMaxWays = 1024;
enum LayoutFlag : int64_t {
  kAnyMean = 1,     // a feature's bags are averaged
  kMultiplies = 2,  // a feature multiplies rows of its parts
  kBytes = 4,       // `weights` is uint8: rows of formats; else float32
  kMapsIds = 8,     // some id is not its row: it is divided, or wraps around
  kPads = 16,       // some feature has a padding_idx: CUDA kernels read a copy of the ids, with those masked
  kHashes = 32,  // of some feature every integer is an id: kernels read a copy of the ids, with its rows in their place
};

// Faults of a record.
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

// Limits that a call's records must keep.
struct LayoutLimits {
  int64_t num_parts;
  int64_t weight_bytes;
  int64_t state_elements;        // of optimizer state for every element; -1: there is none
  int64_t cache_slots;           // -1: there is no cache
  int64_t cache_elements;        // of cache_rows; -1: they are not given
  int64_t tables = kMaxTableId;  // above every table_id
};

inline namespace RK_ISA {

// Shard whose noise the rows of a record have; fault_of() has passed the record.
RK_HOST_DEVICE TableShard shard_of(const TablePart& p) {
  return {static_cast<uint32_t>(p.table_id), static_cast<uint32_t>(p.first_column / 4), p.first_row};
}

RK_HOST_DEVICE bool is_fraction(int64_t part, int64_t whole) { return part >= 0 && part <= whole; }

// True if [first, first + count) lies in [0, whole).
RK_HOST_DEVICE bool lies_in(int64_t first, int64_t count, int64_t whole) {
  return count >= 0 && is_fraction(first, whole) && count <= whole - first;
}

// Start of a feature's parts; behind the last feature, the end of all parts.
RK_HOST_DEVICE int64_t part_start(const TablePart* parts, int64_t feature, const LayoutSizes& sizes,
                                  int64_t num_parts) {
  return feature < sizes.num_features ? parts[feature].part_start : num_parts;
}

// True if feature f has one to most_parts parts, behind those of the features before.
RK_HOST_DEVICE bool has_parts(const TablePart* parts, int64_t f, const LayoutSizes& sizes, int64_t num_parts) {
  const int64_t start = parts[f].part_start, end = part_start(parts, f + 1, sizes, num_parts);
  return (f > 0 || start == 0) && start >= 0 && start < end && end <= num_parts && end - start <= sizes.most_parts;
}

// True if parts[i] is among the parts of its feature, and feature number i, if there is one, has parts.
RK_HOST_DEVICE bool is_in_order(const TablePart* parts, int64_t i, const LayoutSizes& sizes, int64_t num_parts) {
  if (i < sizes.num_features && !has_parts(parts, i, sizes, num_parts)) return false;
  const int64_t f = parts[i].feature;
  if (f < 0 || f >= sizes.num_features || !has_parts(parts, f, sizes, num_parts)) return false;
  return parts[f].part_start <= i && i < part_start(parts, f + 1, sizes, num_parts);
}

// True if columns follow those of the part before, which shares them where rows are added or multiplied.
RK_HOST_DEVICE bool are_next_columns(const TablePart* parts, int64_t i, const LayoutSizes& sizes, int64_t num_parts) {
  const TablePart& p = parts[i];
  int64_t column = 0, part_column = 0;
  if (i > 0) {
    const TablePart& before = parts[i - 1];
    const bool same = before.feature == p.feature, fits = is_fraction(before.embedding_dim, sizes.max_embedding_dim);
    if (!fits || !lies_in(before.column, before.embedding_dim, sizes.output_dim) ||
        !lies_in(before.part_column, before.embedding_dim, sizes.widest_feature))
      return false;
    const bool shared = same && p.combine != static_cast<int64_t>(Combine::kConcat);
    column = before.column + (shared ? 0 : before.embedding_dim);
    if (same) part_column = before.part_column + (shared ? 0 : before.embedding_dim);
  }
  return p.column == column && p.part_column == part_column && lies_in(column, p.embedding_dim, sizes.output_dim) &&
         lies_in(part_column, p.embedding_dim, sizes.widest_feature) &&
         (i + 1 < num_parts || column + p.embedding_dim == sizes.output_dim);
}

// True if all parts of a feature agree in its options, and rows that become one agree in shape.
RK_HOST_DEVICE bool agrees_with_first(const TablePart& p, const TablePart& first, bool alone) {
  const bool feature = p.id_limit == first.id_limit && p.padding_idx == first.padding_idx &&
                       p.combine == first.combine && p.mean == first.mean && p.frozen == first.frozen;
  const bool one = alone || p.combine == static_cast<int64_t>(Combine::kConcat) ||
                   (p.embedding_dim == first.embedding_dim && p.format == first.format);
  return feature && one && p.combine >= 0 && p.combine <= 2;
}

// True if two parts read one table, all of it.
RK_HOST_DEVICE bool share_table(const TablePart& a, const TablePart& b) {
  return a.row_offset == b.row_offset && a.num_embeddings == b.num_embeddings && a.embedding_dim == b.embedding_dim &&
         a.weight_offset == b.weight_offset && a.format == b.format && a.table_id == b.table_id &&
         a.state_offset == b.state_offset && a.multiplied == b.multiplied && a.cache_sets == b.cache_sets &&
         a.cache_first_set == b.cache_first_set && a.cache_row_offset == b.cache_row_offset &&
         a.first_row == b.first_row && a.first_column == b.first_column;
}

// True if number i by rows is a part of its own, whose rows are all or none of those before: a row has one width.
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

// True if an earlier part of part i's feature reads rows of the same table: each would have its own part of a gradient.
RK_HOST_DEVICE bool repeats_table(const TablePart* parts, int64_t i) {
  bool repeats = false;
  for (int64_t j = parts[parts[i].feature].part_start; j < i; ++j)
    repeats |= parts[j].row_offset == parts[i].row_offset && parts[j].num_embeddings > 0;
  return repeats && parts[i].num_embeddings > 0;
}

// True if every id has a row of the table, and `flags` know how it is found.
RK_HOST_DEVICE bool leads_to_rows(const TablePart& p, bool alone, int64_t flags) {
  if (p.divisor < 1 || p.modulus < 1) return false;
  const bool pads = p.padding_idx != -1 || p.id_limit == kEveryOtherId;
  if (pads && !(flags & kPads)) return false;
  const bool is_plain = p.divisor == 1 && p.modulus >= p.id_limit && !p.takes_every_id();
  if (!is_plain && !(flags & kMapsIds)) return false;
  if (p.takes_every_id())
    return alone && flags & kHashes && p.divisor == 1 && p.modulus <= p.num_embeddings &&
           (p.id_limit == kEveryOtherId || (p.id_limit == kEveryId && !pads));
  const int64_t quotients = Partition::quotients(p.id_limit, p.divisor);
  return (quotients < p.modulus ? quotients : p.modulus) <= p.num_embeddings;
}

RK_HOST_DEVICE LayoutFault cache_fault_of(const TablePart& p, bool alone, const LayoutSizes& sizes,
                                          const LayoutLimits& limits) {
  if (limits.cache_slots < 0 || p.cache_sets == 0) return LayoutFault::kNone;
  const int64_t sets = limits.cache_slots / sizes.cache_ways;
  if (!alone || !lies_in(p.cache_first_set, p.cache_sets, sets)) return LayoutFault::kCache;
  if (limits.cache_elements < 0) return LayoutFault::kNone;
  // Slots are at most 2^63 / 8 and wide 2^31: the products need more than 64 bits.
  const __int128 slot = p.cache_first_set * sizes.cache_ways, slots = p.cache_sets * sizes.cache_ways;
  const __int128 begin = p.cache_row_offset + slot * p.embedding_dim, end = begin + slots * p.embedding_dim;
  return begin >= 0 && end <= limits.cache_elements ? LayoutFault::kNone : LayoutFault::kCache;
}

// Finds what makes record i unsafe for a kernel; the kernels trust what passes here.
RK_HOST_DEVICE LayoutFault fault_of(const TablePart* parts, int64_t i, const LayoutSizes& sizes,
                                    const LayoutLimits& limits) {
  const TablePart& p = parts[i];
  if (!is_in_order(parts, i, sizes, limits.num_parts)) return LayoutFault::kFeature;
  if (p.embedding_dim < 1 || p.embedding_dim > sizes.max_embedding_dim) return LayoutFault::kWidth;
  if (p.format < 0 || p.format >= kNumRowFormats || !(sizes.formats >> p.format & 1) ||
      (!(sizes.flags & kBytes) && p.format != 0))
    return LayoutFault::kFormat;
  const auto format = static_cast<RowFormat>(p.format);
  if (!lies_in(p.row_offset, p.num_embeddings, sizes.num_rows)) return LayoutFault::kRows;
  if (!is_fraction(p.weight_offset, limits.weight_bytes) ||
      p.num_embeddings > (limits.weight_bytes - p.weight_offset) / row_bytes(format, p.embedding_dim) ||
      (format == RowFormat::kFp32 && p.weight_offset % 4 != 0))
    return LayoutFault::kWeights;
  if (!are_next_columns(parts, i, sizes, limits.num_parts)) return LayoutFault::kColumns;
  const int64_t first = parts[p.feature].part_start;
  const bool last = i + 1 == limits.num_parts || parts[i + 1].feature != p.feature;
  const bool alone = first == i && last;
  if (!leads_to_rows(p, alone, sizes.flags)) return LayoutFault::kIds;
  if (!agrees_with_first(p, parts[first], alone) || (p.mean != 0 && !(sizes.flags & kAnyMean)) ||
      (!alone && p.combine == static_cast<int64_t>(Combine::kMult) &&
       (!(sizes.flags & kMultiplies) || (p.num_embeddings > 0 && p.multiplied != 1))) ||
      p.multiplied < 0 || p.multiplied > ((sizes.flags & kMultiplies) != 0))
    return LayoutFault::kParts;
  if (p.table_id < 0 || p.table_id >= limits.tables) return LayoutFault::kTableId;
  if (!lies_in(p.first_row, p.num_embeddings, p.table_rows) || p.table_rows > kMaxNoisyRows || p.first_column < 0 ||
      p.first_column > INT32_MAX || p.first_column % 4 != 0)
    return LayoutFault::kShard;
  if (limits.state_elements >= 0 && (!is_fraction(p.state_offset, limits.state_elements) ||
                                     p.num_embeddings > (limits.state_elements - p.state_offset) / p.embedding_dim))
    return LayoutFault::kState;
  if (!follows_in_rows(parts, i, limits.num_parts) || repeats_table(parts, i)) return LayoutFault::kOverlap;
  return cache_fault_of(p, alone, sizes, limits);
}

}  // namespace RK_ISA
}  // namespace rec_kernels
