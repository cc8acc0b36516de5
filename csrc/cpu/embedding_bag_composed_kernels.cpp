// Lookups of partitioned features. Compiled once per instruction set: no torch header and no std template here.
//
// Ids are mapped to rows a thousand or so at a time, so that the divisions are not in the way of the rows' loads. One
// part alone is then looked up as any table. Rows of several parts meet in registers: an id's row is never in memory.
#include "cpu/bag_blocks.h"
#include "cpu/embedding_bag_composed.h"
#include "cpu/row_blocks.h"
#include "cpu/row_formats.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// Whether every id counts.
template <class Id>
bool all_count(const Id* ids, int64_t count, uint64_t limit, int64_t padding) {
  uint64_t bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<int64_t>(ids[i]);
    bad |= static_cast<uint64_t>(static_cast<uint64_t>(id) >= limit) | static_cast<uint64_t>(id == padding);
  }
  return bad == 0;
}

// Without branches, so that compilers map several ids at once.
template <bool kDivides, bool kWraps, class Id>
void map_narrow(const Id* ids, int64_t count, const Partition p, int64_t* rows) {
  for (int64_t i = 0; i < count; ++i) {
    const auto n = static_cast<uint32_t>(ids[i]), quotient = kDivides ? p.divisor.divide_narrow(n) : n;
    rows[i] = kWraps ? p.modulus.remainder_narrow(quotient) : quotient;
  }
}

template <class Id>
void map_all(const Id* ids, int64_t count, const Feature& f, int64_t* rows) {
  const Partition& p = f.partition;
  if (!f.partitioned || !p.narrow) {
    for (int64_t i = 0; i < count; ++i) rows[i] = f.row(static_cast<int64_t>(ids[i]));
  } else if (p.divides && p.wraps) {
    map_narrow<true, true>(ids, count, p, rows);
  } else if (p.divides) {
    map_narrow<true, false>(ids, count, p, rows);
  } else {
    map_narrow<false, true>(ids, count, p, rows);
  }
}

template <class Id>
void map_ids(const Bags& bags, const Feature& f, const Id* all, int64_t start, int64_t stop, int64_t* rows,
             Bounds* bounds) {
  const Id* ids = all + start;
  const uint64_t limit = bags.check_ids ? static_cast<uint64_t>(f.id_limit) : UINT64_MAX;
  if (__builtin_expect(all_count(ids, stop - start, limit, bags.padding_idx), 1))
    return map_all(ids, stop - start, f, rows);
  for (int64_t i = 0; i < stop - start; ++i) {
    const auto id = static_cast<int64_t>(ids[i]);
    const bool in_range = bags.in_range(id, f);
    rows[i] = in_range && id != bags.padding_idx ? f.row(id) : kLeftOut;
    if (!in_range) note_bad(bounds, 0, start + i);
  }
}

// rows[i - start]: where id i is found in the part's table.
void map_to_part(const Bags& bags, const Feature& f, int64_t start, int64_t stop, int64_t* rows, Bounds* bounds) {
  if (bags.ids64) map_ids(bags, f, static_cast<const int64_t*>(bags.ids), start, stop, rows, bounds);
  else map_ids(bags, f, static_cast<const int32_t*>(bags.ids), start, stop, rows, bounds);
}

// The rows of the ids of some bags in a part's table, from a column on.
struct PartRows {
  const float* table;
  const int64_t* rows;  // of ids from the first of these bags on
  bool far;             // no cache holds the table
};

// Bags [begin, end) of one feature, whose parts' tables are floats.
struct Composed {
  Bags bags;
  int64_t begin, end;
  int64_t D;
  PartRows parts[kMaxParts];
  int64_t count;  // of parts
  bool multiplies, mean;
  bool one_id_each;  // in every bag, without a weight
  Sums sums;
};

// Columns [column, column + NV * W) of ids' rows. kParts: how many parts there are, or 0.
template <int NV, bool kTail, int kParts, bool kMultiply>
class ComposedBlock {
 public:
  ComposedBlock(const Composed& k, int64_t column, int tail)
      : parts_(kParts > 0 ? kParts : k.count), D_(k.D), ahead_(prefetch_distance(k.D * 4)), tail_(tail) {
    for (int64_t p = 0; p < parts_; ++p) part_[p] = {k.parts[p].table + column, k.parts[p].rows, k.parts[p].far};
  }

  // The id's row, while that of a later id is on its way; false: the id is left out.
  RK_HOST_DEVICE bool read(int64_t i, int64_t count, Vec* x) const {
    if (i + ahead_ < count)
      for (int64_t p = 0; p < parts_; ++p)
        if (part_[p].far) prefetch(part_[p], i + ahead_);
    if (__builtin_expect(part_[0].rows[i] == kLeftOut, 0)) return false;
    load_row<NV, kTail>(row(part_[0], i), tail_, x);
    for (int64_t p = 1; p < parts_; ++p) {
      Vec y[NV];
      load_row<NV, kTail>(row(part_[p], i), tail_, y);
      for (int v = 0; v < NV; ++v) x[v] = kMultiply ? x[v] * y[v] : x[v] + y[v];
    }
    return true;
  }

 private:
  RK_HOST_DEVICE const float* row(const PartRows& part, int64_t i) const { return part.table + part.rows[i] * D_; }
  RK_HOST_DEVICE void prefetch(const PartRows& part, int64_t i) const {
    const uintptr_t row = reinterpret_cast<uintptr_t>(part.table) + static_cast<uintptr_t>(part.rows[i]) * D_ * 4;
    for (int line = 0; line < NV * W; line += 16) prefetch_line(reinterpret_cast<const float*>(row) + line);
  }

  int64_t parts_, D_, ahead_;
  int tail_;
  PartRows part_[kMaxParts];
};

template <int NV, bool kTail, int kParts, bool kMultiply>
void compose_block(const Composed& k, int64_t column, int tail) {
  // Copies, which a store to the output cannot change.
  const Bags bags = k.bags;
  const ComposedBlock<NV, kTail, kParts, kMultiply> block(k, column, tail);
  const int64_t first = bags.offset(k.begin), count = bags.offset(k.end) - first, end = k.end, stride = k.sums.stride;
  const float* factors = bags.per_sample_weights ? bags.per_sample_weights + first : nullptr;
  const bool mean = k.mean;
  float* out = k.sums.first + column;
  int64_t i = 0;
  for (int64_t bag = k.begin; bag < end; ++bag, out += stride) {
    const int64_t stop = bags.offset(bag + 1) - first;
    int64_t counted = stop - i;
    Vec x[NV], sum[NV];
    for (int v = 0; v < NV; ++v) sum[v] = Vec::broadcast(0.0f);
    for (; i < stop; ++i) {
      if (!block.read(i, count, x)) {
        --counted;
        continue;
      }
      // A factor of 1 changes no bit of a sum.
      const Vec factor = Vec::broadcast(factors ? factors[i] : 1.0f);
      for (int v = 0; v < NV; ++v) sum[v] = fused_multiply_add(factor, x[v], sum[v]);
    }
    if (mean && counted > 1)
      for (int v = 0; v < NV; ++v) sum[v] = sum[v] / Vec::broadcast(static_cast<float>(counted));
    store_columns<NV, kTail>(sum, out, tail);
  }
}

// Bags of one id each, without a weight.
template <int NV, bool kTail, int kParts, bool kMultiply>
void compose_each(const Composed& k, int64_t column, int tail) {
  const ComposedBlock<NV, kTail, kParts, kMultiply> block(k, column, tail);
  const int64_t count = k.end - k.begin, stride = k.sums.stride;
  float* out = k.sums.first + column;
  for (int64_t i = 0; i < count; ++i, out += stride) {
    Vec x[NV], sum[NV];
    for (int v = 0; v < NV; ++v) sum[v] = Vec::broadcast(0.0f);
    if (block.read(i, count, x))
      for (int v = 0; v < NV; ++v) sum[v] = sum[v] + x[v];
    store_columns<NV, kTail>(sum, out, tail);
  }
}

struct ComposeColumns {
  const Composed& k;

  template <int NV, bool kTail>
  void block(int64_t column, int tail) const {
    if (k.multiplies) combine<NV, kTail, true>(column, tail);
    else combine<NV, kTail, false>(column, tail);
  }

 private:
  template <int NV, bool kTail, bool kMultiply>
  void combine(int64_t column, int tail) const {
    if (k.count != 2) compose_block<NV, kTail, 0, kMultiply>(k, column, tail);
    else if (k.one_id_each) compose_each<NV, kTail, 2, kMultiply>(k, column, tail);
    else compose_block<NV, kTail, 2, kMultiply>(k, column, tail);
  }
};

void pool_composed_floats(const PoolArgs& a, const Feature* parts, int64_t count, int64_t begin, int64_t end, Sums sums,
                          Bounds* bounds) {
  for_few_bags(a.bags, begin, end, count, [&](int64_t from, int64_t to, int64_t* rows) {
    const int64_t start = a.bags.offset(from), stop = a.bags.offset(to);
    Composed k{};
    k.bags = a.bags;
    k.begin = from;
    k.end = to;
    k.D = parts->embedding_dim;
    k.count = count;
    k.multiplies = parts->combine == Combine::kMult;
    k.mean = parts->mean;
    k.one_id_each = !a.bags.per_sample_weights && a.bags.offsets_rise<true>(from, to);
    k.sums = {sums.first + (from - begin) * sums.stride, sums.stride};
    Bounds repeated;  // of ids that the first part has noted
    for (int64_t p = 0; p < count; ++p, rows += stop - start) {
      k.parts[p] = {reinterpret_cast<const float*>(a.weights + parts[p].weight_offset), rows, is_far(parts[p])};
      map_to_part(a.bags, parts[p], start, stop, rows, p == 0 ? bounds : &repeated);
    }
    for_blocks(k.D, ComposeColumns{k});
  });
}

// The rows of an id on their way.
void prefetch_parts(const PoolArgs& a, const Feature* parts, int64_t count, int64_t id) {
  if (!a.bags.in_range(id, *parts) || id < 0) return;
  for (const Feature* f = parts; f < parts + count; ++f)
    prefetch_bytes(a.weights + f->weight_offset + f->row(id) * f->row_bytes, f->row_bytes);
}

void pool_composed_encoded(const PoolArgs& a, const Feature* parts, int64_t count, int64_t begin, int64_t end,
                           Sums sums, Bounds* bounds) {
  const int64_t D = parts->embedding_dim, last = a.bags.offset(end);
  const int64_t ahead = prefetch_distance(parts->row_bytes * count);
  const float* factors = a.bags.per_sample_weights;
  auto* scratch = new float[static_cast<uint64_t>(2 * D)];
  const ComposedRow row{parts, count, scratch};
  float* out = sums.first;
  for (int64_t bag = begin; bag < end; ++bag, out += sums.stride) {
    const int64_t start = a.bags.offset(bag), stop = a.bags.offset(bag + 1);
    int64_t counted = stop - start;
    for (int64_t c = 0; c < D; ++c) out[c] = 0.0f;
    for (int64_t i = start; i < stop; ++i) {
      if (i + ahead < last) prefetch_parts(a, parts, count, a.bags.id(i + ahead));
      const int64_t id = a.bags.id(i);
      const bool in_range = a.bags.in_range(id, *parts);
      if (__builtin_expect(!in_range || id == a.bags.padding_idx, 0)) {
        if (!in_range) note_bad(bounds, 0, i);
        --counted;
        continue;
      }
      add_scaled(factors ? factors[i] : 1.0f, row.read(a.weights, id), D, out);
    }
    const auto n = static_cast<float>(counted);
    for (int64_t c = 0; parts->mean && counted > 1 && c < D; ++c) out[c] = out[c] / n;
  }
  delete[] scratch;
}

// out = x * y, or x + y
void combine_rows(Combine how, const float* y, int64_t D, const float* x, float* out) {
  for_vectors(D, [&](int64_t c, int n) {
    const Vec a = load_vector(x + c, n), b = load_vector(y + c, n);
    store_vector(how == Combine::kMult ? a * b : a + b, out + c, n);
  });
}

}  // namespace

void pool_partitioned(const PoolArgs& a, const Feature& f, int64_t begin, int64_t end, Sums sums, Bounds* bounds) {
  for_few_bags(a.bags, begin, end, 1, [&](int64_t from, int64_t to, int64_t* rows) {
    const int64_t start = a.bags.offset(from), stop = a.bags.offset(to);
    map_to_part(a.bags, f, start, stop, rows, bounds);
    pool_numbered(a, rows, from, to, [&](const PoolArgs& numbered) {
      pool_plain(numbered, f, 0, to - from, {sums.first + (from - begin) * sums.stride, sums.stride}, bounds);
    });
  });
}

void pool_composed(const PoolArgs& a, const Feature* parts, int64_t count, int64_t begin, int64_t end, Sums sums,
                   Bounds* bounds) {
  if (parts->format == RowFormat::kFp32) pool_composed_floats(a, parts, count, begin, end, sums, bounds);
  else pool_composed_encoded(a, parts, count, begin, end, sums, bounds);
}

const float* row_of_part(const Feature& f, const uint8_t* weights, int64_t id, float* scratch) {
  const uint8_t* row = weights + f.weight_offset + f.row(id) * f.row_bytes;
  if (f.format == RowFormat::kFp32) return reinterpret_cast<const float*>(row);
  RowFormatKernels::table<CpuIsa::RK_ISA>.decode[static_cast<int>(f.format)](row, f.embedding_dim, scratch);
  return scratch;
}

const float* ComposedRow::read(const uint8_t* weights, int64_t id) const {
  const int64_t D = parts->embedding_dim;
  const float* x = row_of_part(parts[0], weights, id, scratch);
  for (int64_t p = 1; p < count; ++p) {
    combine_rows(parts->combine, row_of_part(parts[p], weights, id, scratch + D), D, x, scratch);
    x = scratch;
  }
  return x;
}

void multiply_by_others(const Feature* parts, int64_t count, const Feature* own, const uint8_t* weights, int64_t id,
                        const float* g, float* scratch, float* out) {
  for (const Feature* f = parts; f < parts + count; ++f) {
    if (f == own) continue;
    combine_rows(Combine::kMult, row_of_part(*f, weights, id, scratch), f->embedding_dim, g, out);
    g = out;
  }
}

}  // namespace RK_ISA
}  // namespace rec_kernels
