// Lookups of partitioned features. Compiled once per instruction set: no torch header and no std template here.
//
// Ids are mapped to rows in batches of about a thousand, so that divisions do not delay the loads of rows. One part
// alone is then looked up like any table. Rows of several parts are combined in registers and never stored.
#include "embedding_bag/cpu/pool_composed.h"
#include "embedding_bag/cpu/pool_table.h"
#include "rows/cpu/row_formats.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// True if every id contributes.
template <class Id>
bool all_count(const Id* ids, int64_t count, uint64_t limit, int64_t padding) {
  uint64_t bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<int64_t>(ids[i]);
    bad |= static_cast<uint64_t>(static_cast<uint64_t>(id) >= limit) | static_cast<uint64_t>(id == padding);
  }
  return bad == 0;
}

// Branch-free for vectorization.
template <bool kDivides, bool kWraps, class Id>
void map_narrow(const Id* ids, int64_t count, const Partition p, int64_t* rows) {
  for (int64_t i = 0; i < count; ++i) {
    const auto n = static_cast<uint32_t>(ids[i]), quotient = kDivides ? p.divisor.divide_narrow(n) : n;
    rows[i] = kWraps ? p.modulus.remainder_narrow(quotient) : quotient;
  }
}

template <class Id>
void map_all(const Id* ids, int64_t count, const Part& f, int64_t* rows) {
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
void map_ids(const Bags& bags, const Part& f, const Id* all, int64_t start, int64_t stop, int64_t* rows,
             Bounds* bounds) {
  const Id* ids = all + start;
  const uint64_t limit = bags.check_ids ? static_cast<uint64_t>(f.id_limit) : UINT64_MAX;
  const int64_t padding = bags.padding_of(f);
  if (__builtin_expect(all_count(ids, stop - start, limit, padding), 1)) return map_all(ids, stop - start, f, rows);
  for (int64_t i = 0; i < stop - start; ++i) {
    const auto id = static_cast<int64_t>(ids[i]);
    const bool in_range = bags.in_range(id, f);
    rows[i] = in_range && id != padding ? f.row(id) : kSkippedRow;
    if (!in_range) note_bad(bounds, start + i);
  }
}

// rows[i - start] = the row of ids[i] in the part's table.
void map_to_part(const Bags& bags, const Part& f, int64_t start, int64_t stop, int64_t* rows, Bounds* bounds) {
  if (bags.ids64) map_ids(bags, f, static_cast<const int64_t*>(bags.ids), start, stop, rows, bounds);
  else map_ids(bags, f, static_cast<const int32_t*>(bags.ids), start, stop, rows, bounds);
}

// Maps all ids of some bags to rows of a part's table.
PartRows rows_of_part(const PooledBags& k, const Part& f, const uint8_t* weights, int64_t* rows, Bounds* bounds) {
  const int64_t start = k.first_id();
  map_to_part(*k.bags, f, start, start + k.num_ids(), rows, bounds);
  return {weights + f.weight_offset, rows, exceeds_cache(f)};
}

// Body of for_blocks: pools one block of columns of float rows.
struct ComposeFloats {
  const PooledBags& k;
  const Composition& parts;
  bool multiplies, one_id;

  template <int NV, bool kTail>
  void block(int64_t column, int tail) const {
    const FloatBlock<NV, kTail> block{column, tail};
    if (multiplies) combine<true>(block);
    else combine<false>(block);
  }

 private:
  template <bool kMultiply, class Block>
  void combine(const Block& block) const {
    if (parts.count != 2) pool_block<BagKind::kAny>(k, ComposedRows<Block, 0, kMultiply>(block, parts));
    else if (one_id) pool_block<BagKind::kOneId>(k, ComposedRows<Block, 2, kMultiply>(block, parts));
    else pool_block<BagKind::kAny>(k, ComposedRows<Block, 2, kMultiply>(block, parts));
  }
};

// Fewer than kMostSteps, to limit the code size of seven formats.
constexpr int kComposedSteps = kMostSteps < 4 ? kMostSteps : 4;

template <class Format>
void compose_encoded(const PooledBags& k, const Composition& parts, int64_t D, bool multiplies) {
  using Block = EncodedBlock<Format, kComposedSteps, true>;
  for (int64_t column = 0; column < D; column += kComposedSteps * kStep) {
    const Block block{column, D - column, D};
    if (multiplies) pool_block<BagKind::kAny>(k, ComposedRows<Block, 0, true>(block, parts));
    else pool_block<BagKind::kAny>(k, ComposedRows<Block, 0, false>(block, parts));
  }
}

// out = x * y, or x + y
void combine_rows(Combine how, const float* y, int64_t D, const float* x, float* out) {
  for_vectors(D, [&](int64_t c, int n) {
    const Vec a = load_vector(x + c, n), b = load_vector(y + c, n);
    store_vector(how == Combine::kMult ? a * b : a + b, out + c, n);
  });
}

}  // namespace

void pool_partitioned(const PoolArgs& a, const Part& f, const PooledBags& k) {
  for_bag_batches<int64_t>(k, kBatchRows, 1, [&](const PooledBags& batch, int64_t* rows) {
    const PartRows part = rows_of_part(batch, f, a.weights, rows, k.bounds);
    pool_table(batch, f, part.rows, RowIndices::computed(batch, part.indices));
  });
}

void pool_composed(const PoolArgs& a, const Part* parts, int64_t count, const PooledBags& k) {
  const bool multiplies = parts->combine == Combine::kMult;
  for_bag_batches<int64_t>(k, kBatchRows / count, count, [&](const PooledBags& batch, int64_t* rows) {
    Composition c{{}, count, batch.first_id(), parts->row_bytes};
    Bounds ignored;  // bad ids are already reported by the first part
    for (int64_t p = 0; p < count; ++p)
      c.parts[p] = rows_of_part(batch, parts[p], a.weights, rows + p * batch.num_ids(), p == 0 ? k.bounds : &ignored);
    const int64_t D = parts->embedding_dim;
    if (parts->format == RowFormat::kFp32)
      for_blocks(D, ComposeFloats{batch, c, multiplies, kind_of(batch) == BagKind::kOneId});
    else
      with_bag_format(parts->format, [&](auto format) { compose_encoded<decltype(format)>(batch, c, D, multiplies); });
  });
}

const float* row_of_part(const Part& f, const uint8_t* weights, int64_t id, float* scratch) {
  const uint8_t* row = weights + f.weight_offset + f.row(id) * f.row_bytes;
  if (f.format == RowFormat::kFp32) return reinterpret_cast<const float*>(row);
  RowFormatKernels::table<CpuIsa::RK_ISA>.decode[static_cast<int>(f.format)](row, 1, f.embedding_dim, scratch);
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

void multiply_by_others(const Part* parts, int64_t count, const Part* own, const uint8_t* weights, int64_t id,
                        const float* g, float* scratch, float* out) {
  for (const Part* f = parts; f < parts + count; ++f) {
    if (f == own) continue;
    combine_rows(Combine::kMult, row_of_part(*f, weights, id, scratch), f->embedding_dim, g, out);
    g = out;
  }
}

}  // namespace RK_ISA
}  // namespace rec_kernels
