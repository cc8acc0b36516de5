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

// Pools bags of `parts` parts of a feature that share their columns.
void pool_feature(const PoolArgs& a, const Part* f, int64_t parts, const PooledBags& k) {
  if (parts > 1) return pool_composed(a, f, parts, k);
  if (a.cache.slots && pool_cached(a, *f, k)) return;
  if (f->partitioned) return pool_partitioned(a, *f, k);
  pool_table(k, *f, a.weights + f->weight_offset, RowIndices::of_ids(a.bags, *f));
}

// pool_feature() for a half-precision output at `out`, `stride` bytes per bag: sums batches of bags in FP32, then
// rounds them.
void pool_rounded(const PoolArgs& a, const Part* f, int64_t parts, PooledBags k, uint8_t* out, int64_t stride) {
  const int64_t D = f->embedding_dim, bags_per_batch = D < kSumBuffer ? kSumBuffer / D : 1, end = k.end;
  const auto encode = RowFormatKernels::table<CpuIsa::RK_ISA>.nearest[static_cast<int>(a.output_format)];
  float buffer[kSumBuffer];
  k.sums = {D <= kSumBuffer ? buffer : a.wide_sum, D};
  for (; k.begin < end; k.begin = k.end) {
    k.end = k.begin + bags_per_batch < end ? k.begin + bags_per_batch : end;
    pool_feature(a, f, parts, k);
    for (int64_t i = 0; i < k.end - k.begin; ++i, out += stride)
      encode(k.sums.first + i * D, 1, D, {}, {out, 0, nullptr});
  }
}

void pool(const PoolArgs& a, int64_t begin, int64_t end, Bounds* bounds) {
  const int64_t element = a.output_bytes(), stride = a.output_dim * element;
  PoolArgs uncached = a;  // for features of several parts, whose slots are not checked
  uncached.cache.slots = nullptr;
  by_feature(a.bags, a.parts, begin, end, [&](const Part* parts, int64_t count, int64_t from, int64_t to) {
    const bool one_id = a.bags.have_one_id(from, to);
    if (!one_id && !offsets_good(a.bags, from, to, bounds)) return;
    const PoolArgs& args = count == 1 ? a : uncached;
    auto* rows = a.bags.row_of(from, parts->feature, a.output, stride);
    const int64_t combined = parts->combine == Combine::kConcat ? 1 : count;  // parts per set of columns
    Bounds ignored;                                                           // bad ids are reported by the first part
    for (int64_t p = 0; p < count; p += combined) {
      auto* out = rows + parts[p].output_offset * element;
      const Sums sums{reinterpret_cast<float*>(out), a.output_dim};
      const PooledBags k{&a.bags, from, to, parts->mean, one_id, sums, p == 0 ? bounds : &ignored};
      if (element == 4) pool_feature(args, parts + p, combined, k);
      else pool_rounded(args, parts + p, combined, k, out, stride);
    }
    const Part& last = parts[count - 1];
    const int64_t used = last.output_offset + last.embedding_dim;
    const int64_t unused = a.bags.own_rows ? (a.output_dim - used) * element : 0;
    for (int64_t bag = from; unused && bag < to; ++bag, rows += stride)
      memset(rows + used * element, 0, static_cast<size_t>(unused));
  });
}

float dot_with_row(const float* g, const uint8_t* row, const Part& f) {
  if (f.format != RowFormat::kFp32) return dot_with_encoded(g, row, f);
  return row_dot(g, reinterpret_cast<const float*>(row), f.embedding_dim);
}

// Dot product of a bag's gradient and the combined row of an id.
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

// Prefetches an id's row in each part.
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
    const float* rows = a.bags.row_of(from, parts->feature, grad, a.output_dim);
    weight_gradient_feature(a, parts, count, from, to, rows, out, bounds);
  });
}

}  // namespace
}  // namespace RK_ISA

template <>
const EmbeddingBagKernels EmbeddingBagKernels::table<CpuIsa::RK_ISA> = {RK_ISA::pool, RK_ISA::weight_gradient};

}  // namespace rec_kernels
