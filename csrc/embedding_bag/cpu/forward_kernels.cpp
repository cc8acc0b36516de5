// Forward of embedding_bag, and the gradient of per_sample_weights. Compiled once per instruction set: no torch header
// and no std template here.
#include "embedding_bag/cpu/pool_cached.h"
#include "embedding_bag/cpu/pool_composed.h"
#include "embedding_bag/cpu/pool_encoded.h"
#include "embedding_bag/cpu/pool_table.h"
#include "rows/cpu/row_formats.h"
#include "rows/cpu/statistics.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// Pools bags of a feature's parts [0, parts), which share their columns.
void pool_feature(const PoolArgs& a, const Part* f, int64_t parts, const PooledBags& k) {
  if (parts > 1) return pool_composed(a, f, parts, k);
  if (a.cache.slots && pool_cached(a, *f, k)) return;
  if (f->partitioned) return pool_partitioned(a, *f, k);
  pool_table(k, *f, a.weights + f->weight_offset, RowNumbers::of_ids(a.bags, *f));
}

// pool_feature where the output, from `out` on with `stride` bytes a bag, is of half precision: sums of a few bags at a
// time, then rounded.
void pool_rounded(const PoolArgs& a, const Part* f, int64_t parts, PooledBags k, uint8_t* out, int64_t stride) {
  const int64_t D = f->embedding_dim, bags_at_once = D < kWaiting ? kWaiting / D : 1, end = k.end;
  const auto encode = RowFormatKernels::table<CpuIsa::RK_ISA>.nearest[static_cast<int>(a.output_format)];
  float waiting[kWaiting];
  k.sums = {D <= kWaiting ? waiting : a.wide_sum, D};
  for (; k.begin < end; k.begin = k.end) {
    k.end = k.begin + bags_at_once < end ? k.begin + bags_at_once : end;
    pool_feature(a, f, parts, k);
    for (int64_t i = 0; i < k.end - k.begin; ++i, out += stride)
      encode(k.sums.first + i * D, 1, D, {}, {out, 0, nullptr});
  }
}

void pool(const PoolArgs& a, int64_t begin, int64_t end, Bounds* bounds) {
  const int64_t element = a.output_bytes(), stride = a.output_dim * element;
  PoolArgs uncached = a;  // of features of several parts, whose slots nobody has checked
  uncached.cache.slots = nullptr;
  by_feature(a.bags, a.parts, begin, end, [&](const Part* parts, int64_t count, int64_t from, int64_t to) {
    const bool one_id = a.bags.have_one_id(from, to);
    if (!one_id && !offsets_good(a.bags, from, to, bounds)) return;
    const PoolArgs& its = count == 1 ? a : uncached;
    auto* rows = a.bags.row_of(from, parts->number, a.output, stride);
    const int64_t combined = parts->combine == Combine::kConcat ? 1 : count;  // into the same columns
    Bounds repeated;                                                          // of ids that the first part has noted
    for (int64_t p = 0; p < count; p += combined) {
      auto* out = rows + parts[p].output_offset * element;
      const Sums sums{reinterpret_cast<float*>(out), a.output_dim};
      const PooledBags k{&a.bags, from, to, parts->mean, one_id, sums, p == 0 ? bounds : &repeated};
      if (element == 4) pool_feature(its, parts + p, combined, k);
      else pool_rounded(its, parts + p, combined, k, out, stride);
    }
    const Part& last = parts[count - 1];
    const int64_t used = last.output_offset + last.embedding_dim;
    const int64_t behind = a.bags.own_rows ? (a.output_dim - used) * element : 0;
    for (int64_t bag = from; behind && bag < to; ++bag, rows += stride)
      memset(rows + used * element, 0, static_cast<size_t>(behind));
  });
}

float dot_with_row(const float* g, const uint8_t* row, const Part& f) {
  if (f.format != RowFormat::kFp32) return dot_with_encoded(g, row, f);
  return row_dot(g, reinterpret_cast<const float*>(row), f.embedding_dim);
}

// Dot product of one sample's gradient and the row that an id's parts make.
float dot_with_parts(const PoolArgs& a, const Part* parts, int64_t count, const float* grad, int64_t id,
                     const ComposedRow& composed) {
  if (composed.scratch) return row_dot(grad + parts->output_offset, composed.read(a.weights, id), parts->embedding_dim);
  float sum = 0.0f;
  for (const Part* f = parts; f < parts + count; ++f) {
    const uint8_t* row = a.weights + f->weight_offset + f->row(id) * f->row_bytes;
    const float dot = dot_with_row(grad + f->output_offset, row, *f);
    sum = f == parts ? dot : sum + dot;
  }
  return sum;
}

// Asks for the rows of an id's parts.
void prefetch_parts(const PoolArgs& a, const Part* parts, int64_t count, int64_t id) {
  if (!a.bags.in_range(id, *parts)) return;
  for (const Part* f = parts; f < parts + count; ++f)
    prefetch_bytes(a.weights + f->weight_offset + f->row(id) * f->row_bytes, f->row_bytes);
}

void weight_gradient_feature(const PoolArgs& a, const Part* parts, int64_t count, int64_t begin, int64_t end,
                             const float* grad, float* out, Bounds* bounds) {
  const bool composes = count > 1 && parts->combine != Combine::kConcat;
  const ComposedRow composed{parts, count,
                             composes ? new float[static_cast<uint64_t>(2 * parts->embedding_dim)] : nullptr};
  const int64_t padding = a.bags.padding_of(*parts), last = a.bags.offset(end);
  const int64_t ahead = prefetch_distance(parts->row_bytes);
  for (int64_t bag = begin; bag < end; ++bag, grad += a.output_dim) {
    const int64_t start = a.bags.offset(bag), stop = a.bags.offset(bag + 1);
    int64_t counted = 0;
    for (int64_t i = start; i < stop; ++i) {
      if (i + ahead < last) prefetch_parts(a, parts, count, a.bags.id(i + ahead));
      const int64_t id = a.bags.id(i);
      const bool in_range = a.bags.in_range(id, *parts), counts = in_range && id != padding;
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
  by_feature(a.bags, a.parts, begin, end, [&](const Part* parts, int64_t count, int64_t from, int64_t to) {
    const float* rows = a.bags.row_of(from, parts->number, grad, a.output_dim);
    weight_gradient_feature(a, parts, count, from, to, rows, out, bounds);
  });
}

}  // namespace
}  // namespace RK_ISA

template <>
const EmbeddingBagKernels EmbeddingBagKernels::table<CpuIsa::RK_ISA> = {RK_ISA::pool, RK_ISA::weight_gradient};

}  // namespace rec_kernels
