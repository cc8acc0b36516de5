// Forward of embedding_bag. Compiled once per instruction set: no torch header and no std template here.
//
// A bag's columns are pooled in blocks of up to eight registers: accumulators stay in registers over the whole bag,
// rows are prefetched a fixed number of ids ahead (also across bags), and a row is read exactly once.
#include "core/row_statistics.h"
#include "cpu/bag_blocks.h"
#include "cpu/embedding_bag_cached.h"
#include "cpu/embedding_bag_composed.h"
#include "cpu/embedding_bag_encoded.h"
#include "cpu/row_blocks.h"
#include "cpu/row_formats.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// Bags [begin, end) of one feature, columns [column, column + NV * W) of it.
struct Block {
  const Bags* bags;
  const Feature* feature;
  int64_t begin, end;  // bags of all F * B
  int64_t column;
  int tail;              // lanes of the last register when it is partial
  const float* weights;  // of the feature's table
  Sums sums;
  Bounds* bounds;
};

// What a kernel is told about is copied: a store through a pointer could change the originals as far as a compiler
// knows.
template <class Id, int NV, bool kTail, bool kWeighted>
void pool_block(const Block k) {
  const Bags bags = *k.bags;
  const Feature f = *k.feature;
  const Id* ids = static_cast<const Id*>(bags.ids);
  const int64_t D = f.embedding_dim, last = bags.offset(k.end);
  const int64_t ahead = prefetch_distance(D * 4), padding = bags.padding_idx;
  const uint64_t limit = bags.check_ids ? static_cast<uint64_t>(f.id_limit) : UINT64_MAX;
  const uintptr_t rows = reinterpret_cast<uintptr_t>(k.weights + k.column);
  const float* columns = k.weights + k.column;
  float* out = k.sums.first + k.column;
  int64_t start = bags.offset(k.begin);
  for (int64_t bag = k.begin; bag < k.end; ++bag, out += k.sums.stride) {
    const int64_t stop = bags.offset(bag + 1);
    Vec sum[NV];
    for (int v = 0; v < NV; ++v) sum[v] = Vec::broadcast(0.0f);
    int64_t counted = stop - start;
    for (int64_t i = start; i < stop; ++i) {
      if (i + ahead < last) {
        const uintptr_t next = rows + static_cast<uintptr_t>(static_cast<int64_t>(ids[i + ahead])) * D * 4;
        for (int line = 0; line < NV * W; line += 16) prefetch_line(reinterpret_cast<const float*>(next) + line);
      }
      const int64_t id = static_cast<int64_t>(ids[i]);
      // Compared unsigned, so that a negative id is out of range too.
      if (__builtin_expect(static_cast<uint64_t>(id) >= limit || id == padding, 0)) {
        if (static_cast<uint64_t>(id) >= limit) note_bad(k.bounds, k.column, i);
        --counted;
        continue;
      }
      const float* row = columns + id * D;
      if (kWeighted) {
        const Vec weight = Vec::broadcast(bags.per_sample_weights[i]);
        for (int v = 0; v < NV - 1; ++v) sum[v] = fused_multiply_add(weight, Vec::load(row + v * W), sum[v]);
        sum[NV - 1] = fused_multiply_add(weight, load_columns<kTail>(row + (NV - 1) * W, k.tail), sum[NV - 1]);
      } else {
        for (int v = 0; v < NV - 1; ++v) sum[v] = sum[v] + Vec::load(row + v * W);
        sum[NV - 1] = sum[NV - 1] + load_columns<kTail>(row + (NV - 1) * W, k.tail);
      }
    }
    if (f.mean && counted > 1) {
      const Vec n = Vec::broadcast(static_cast<float>(counted));
      for (int v = 0; v < NV; ++v) sum[v] = sum[v] / n;
    }
    store_columns<NV, kTail>(sum, out, k.tail);
    start = stop;
  }
}

// Bags of one id each, without a weight: rows are copied.
template <class Id, int NV, bool kTail>
void copy_block(const Block k) {
  const Feature f = *k.feature;
  const int64_t D = f.embedding_dim, count = k.end - k.begin, first = k.bags->offset(k.begin);
  const Id* ids = static_cast<const Id*>(k.bags->ids) + first;
  const int64_t ahead = prefetch_distance(D * 4), padding = k.bags->padding_idx;
  const uint64_t limit = k.bags->check_ids ? static_cast<uint64_t>(f.id_limit) : UINT64_MAX;
  const float* columns = k.weights + k.column;
  const uintptr_t rows = reinterpret_cast<uintptr_t>(columns);
  float* out = k.sums.first + k.column;
  for (int64_t i = 0; i < count; ++i, out += k.sums.stride) {
    if (i + ahead < count) {
      const uintptr_t next = rows + static_cast<uintptr_t>(static_cast<int64_t>(ids[i + ahead])) * D * 4;
      for (int line = 0; line < NV * W; line += 16) prefetch_line(reinterpret_cast<const float*>(next) + line);
    }
    const int64_t id = static_cast<int64_t>(ids[i]);
    Vec row[NV];
    for (int v = 0; v < NV; ++v) row[v] = Vec::broadcast(0.0f);
    if (__builtin_expect(static_cast<uint64_t>(id) < limit && id != padding, 1)) {
      const float* from = columns + id * D;
      // Added to zero as any sum is: -0 becomes +0.
      for (int v = 0; v < NV - 1; ++v) row[v] = row[v] + Vec::load(from + v * W);
      row[NV - 1] = row[NV - 1] + load_columns<kTail>(from + (NV - 1) * W, k.tail);
    } else if (static_cast<uint64_t>(id) >= limit) {
      note_bad(k.bounds, k.column, first + i);
    }
    store_columns<NV, kTail>(row, out, k.tail);
  }
}

// for_blocks: pools the bags of `whole`, block by block of columns.
struct PoolColumns {
  const Block& whole;
  bool one_id_each;

  template <int NV, bool kTail>
  void block(int64_t column, int tail) const {
    Block k = whole;
    k.column = column;
    k.tail = tail;
    if (k.bags->ids64) pool_ids<int64_t, NV, kTail>(k);
    else pool_ids<int32_t, NV, kTail>(k);
  }

 private:
  template <class Id, int NV, bool kTail>
  void pool_ids(const Block& k) const {
    if (k.bags->per_sample_weights) pool_block<Id, NV, kTail, true>(k);
    else if (one_id_each) copy_block<Id, NV, kTail>(k);
    else pool_block<Id, NV, kTail, false>(k);
  }
};

}  // namespace

void pool_plain(const PoolArgs& a, const Feature& f, int64_t begin, int64_t end, Sums sums, Bounds* bounds) {
  if (f.format != RowFormat::kFp32) return pool_encoded(a, f, begin, end, sums, bounds);
  const auto* weights = reinterpret_cast<const float*>(a.weights + f.weight_offset);
  for_blocks(f.embedding_dim, PoolColumns{{&a.bags, &f, begin, end, 0, 0, weights, sums, bounds},
                                          a.bags.offsets_rise<true>(begin, end)});
}

void pool_uncached(const PoolArgs& a, const Feature& f, int64_t begin, int64_t end, Sums sums, Bounds* bounds) {
  if (f.partitioned) pool_partitioned(a, f, begin, end, sums, bounds);
  else pool_plain(a, f, begin, end, sums, bounds);
}

namespace {

// Bags [begin, end), with offsets known to be good, of a feature's parts [0, parts) that have columns together.
void pool_feature(const PoolArgs& a, const Feature* f, int64_t parts, int64_t begin, int64_t end, Sums sums,
                  Bounds* bounds) {
  if (parts > 1) return pool_composed(a, f, parts, begin, end, sums, bounds);
  if (a.cache.slots) return pool_cached(a, *f, begin, end, sums, bounds);
  pool_uncached(a, *f, begin, end, sums, bounds);
}

// Floats that wait to be rounded to the elements of the output.
constexpr int64_t kWaiting = 2048;

// The same where the output, from `out` on with `stride` bytes a bag, is of half precision: sums of a few bags at a
// time, then rounded.
void pool_rounded(const PoolArgs& a, const Feature* f, int64_t parts, int64_t begin, int64_t end, uint8_t* out,
                  int64_t stride, Bounds* bounds) {
  const int64_t D = f->embedding_dim, bags_at_once = D < kWaiting ? kWaiting / D : 1;
  const auto encode = RowFormatKernels::table<CpuIsa::RK_ISA>.nearest[static_cast<int>(a.output_format)];
  float waiting[kWaiting];
  float* sums = D <= kWaiting ? waiting : new float[static_cast<size_t>(D)];
  for (int64_t first = begin; first < end; first += bags_at_once) {
    const int64_t last = first + bags_at_once < end ? first + bags_at_once : end;
    pool_feature(a, f, parts, first, last, {sums, D}, bounds);
    for (int64_t i = 0; i < last - first; ++i, out += stride) encode(sums + i * D, 1, D, {}, {out, 0, nullptr});
  }
  if (sums != waiting) delete[] sums;
}

void pool(const PoolArgs& a, int64_t begin, int64_t end, Bounds* bounds) {
  if (!offsets_good(a.bags, begin, end, bounds)) return;
  const int64_t element = a.output_format == RowFormat::kFp32 ? 4 : 2, stride = a.output_dim * element;
  PoolArgs uncached = a;  // of features of several parts, whose slots nobody has checked
  uncached.cache.slots = nullptr;
  by_feature(
      a.bags, a.features, begin, end, [&](const Feature* parts, int64_t count, int64_t from, int64_t to, int64_t row) {
        const PoolArgs& its = count == 1 ? a : uncached;
        auto* rows = static_cast<uint8_t*>(a.output) + row * stride;
        const int64_t combined = parts->combine == Combine::kConcat ? 1 : count;  // into the same columns
        Bounds repeated;  // of ids that the first part has noted
        for (int64_t p = 0; p < count; p += combined) {
          auto* out = rows + parts[p].output_offset * element;
          Bounds* found = p == 0 ? bounds : &repeated;
          if (element == 4)
            pool_feature(its, parts + p, combined, from, to, {reinterpret_cast<float*>(out), a.output_dim}, found);
          else pool_rounded(its, parts + p, combined, from, to, out, stride, found);
        }
        const Feature& last = parts[count - 1];
        const int64_t used = last.output_offset + last.embedding_dim;
        const int64_t behind = a.bags.have_own_rows() ? (a.output_dim - used) * element : 0;
        for (int64_t bag = from; behind && bag < to; ++bag, rows += stride)
          memset(rows + used * element, 0, static_cast<size_t>(behind));
      });
}

float dot_with_row(const float* g, const uint8_t* row, const Feature& f) {
  if (f.format != RowFormat::kFp32) return dot_with_encoded(g, row, f);
  return row_dot(g, reinterpret_cast<const float*>(row), f.embedding_dim);
}

// Of one sample's gradient with what an id's parts give.
float dot_with_parts(const PoolArgs& a, const Feature* parts, int64_t count, const float* grad, int64_t id,
                     const ComposedRow& composed) {
  if (composed.scratch) return row_dot(grad + parts->output_offset, composed.read(a.weights, id), parts->embedding_dim);
  float sum = 0.0f;
  for (const Feature* f = parts; f < parts + count; ++f) {
    const uint8_t* row = a.weights + f->weight_offset + f->row(id) * f->row_bytes;
    const float dot = dot_with_row(grad + f->output_offset, row, *f);
    sum = f == parts ? dot : sum + dot;
  }
  return sum;
}

void weight_gradient_feature(const PoolArgs& a, const Feature* parts, int64_t count, int64_t begin, int64_t end,
                             const float* grad, float* out, Bounds* bounds) {
  const bool composes = count > 1 && parts->combine != Combine::kConcat;
  const ComposedRow composed{parts, count,
                             composes ? new float[static_cast<uint64_t>(2 * parts->embedding_dim)] : nullptr};
  for (int64_t bag = begin; bag < end; ++bag, grad += a.output_dim) {
    const int64_t start = a.bags.offset(bag), stop = a.bags.offset(bag + 1);
    int64_t counted = 0;
    for (int64_t i = start; i < stop; ++i) {
      const int64_t id = a.bags.id(i);
      const bool in_range = a.bags.in_range(id, *parts), counts = in_range && id != a.bags.padding_idx;
      if (!in_range && i < bounds->position) bounds->position = i;
      counted += counts;
      if (!counts) out[i] = 0.0f;
      else if (const float* row = count == 1 ? cached_row(a, *parts, i) : nullptr)
        out[i] = row_dot(grad + parts->output_offset, row, parts->embedding_dim);
      else out[i] = dot_with_parts(a, parts, count, grad, id, composed);
    }
    if (!parts->mean || counted < 2) continue;
    const float each = 1.0f / static_cast<float>(counted);
    for (int64_t i = start; i < stop; ++i) out[i] *= each;
  }
  delete[] composed.scratch;
}

void weight_gradient(const PoolArgs& a, const float* grad, float* out, int64_t begin, int64_t end, Bounds* bounds) {
  if (!offsets_good(a.bags, begin, end, bounds)) return;
  by_feature(a.bags, a.features, begin, end,
             [&](const Feature* parts, int64_t count, int64_t from, int64_t to, int64_t row) {
               weight_gradient_feature(a, parts, count, from, to, grad + row * a.output_dim, out, bounds);
             });
}

}  // namespace
}  // namespace RK_ISA

template <>
const EmbeddingBagKernels EmbeddingBagKernels::table<CpuIsa::RK_ISA> = {RK_ISA::pool, RK_ISA::weight_gradient};

}  // namespace rec_kernels
