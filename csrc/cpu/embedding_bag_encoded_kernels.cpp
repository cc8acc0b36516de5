// Lookups of encoded rows: decoded in registers, 16 columns at a time, and added up there. Compiled once per
// instruction set: no torch header and no std template here.
//
// As for floats (embedding_bag_kernels.cpp), a bag's columns are pooled in blocks whose sums stay in registers, and
// rows are prefetched a fixed number of ids ahead.
#include "core/row_statistics.h"
#include "cpu/bag_blocks.h"
#include "cpu/embedding_bag_encoded.h"
#include "cpu/row_reader.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// Steps of 16 columns of a block: its sums take half of the registers, decoding needs the others.
constexpr int kBlockSteps = kLanes == 16 ? 8 : (kLanes == 8 ? 4 : 2);

// Bags [begin, end) of one feature, columns [column, column + kSteps * 16) of it.
struct Block {
  const Bags* bags;
  const Feature* feature;
  int64_t begin, end;  // bags of all F * B
  int64_t column;
  const uint8_t* rows;  // of the feature's table
  Sums sums;
  Bounds* bounds;
};

// Adds a row's columns from `column` on to the sums of a block, of which `columns` exist: fewer than kSteps * 16 when
// kPartial.
template <class Format, int kSteps, bool kPartial, bool kWeighted>
RK_HOST_DEVICE void add_row(const RowReader<Format>& reader, int64_t column, int64_t columns, float weight,
                            Columns* sum) {
  const FloatLanes w = FloatLanes{} + weight;
#pragma GCC unroll 8
  for (int s = 0; s < kSteps; ++s) {
    const int64_t c = column + s * kStep, left = columns - s * kStep;
    if (kPartial && left <= 0) continue;
    const Columns x =
        kPartial && left < kStep ? reader.template read<true>(c, left) : reader.template read<false>(c, kStep);
    for (int v = 0; v < kStepVecs; ++v)
      sum[s].v[v] = kWeighted ? LanesOf<FloatLanes>::fused(w, x.v[v], sum[s].v[v]) : sum[s].v[v] + x.v[v];
  }
}

template <int kSteps, bool kPartial>
RK_HOST_DEVICE void store_sums(const Columns* sum, int64_t columns, float* out) {
#pragma GCC unroll 8
  for (int s = 0; s < kSteps; ++s) {
    const int64_t left = columns - s * kStep;
    if (!kPartial || left >= kStep) store_as(out + s * kStep, sum[s]);
    else if (left > 0) memcpy(out + s * kStep, &sum[s], static_cast<size_t>(left) * sizeof(float));
  }
}

// What it is told about is copied: a store through a pointer could change the originals as far as a compiler knows.
template <class Format, int kSteps, bool kPartial, bool kWeighted>
void pool_block(const Block k) {
  const Bags bags = *k.bags;
  const Feature f = *k.feature;
  const int64_t columns = f.embedding_dim - k.column, row_bytes = f.row_bytes;
  const int64_t last_id = bags.offset(k.end), ahead = prefetch_distance(row_bytes);
  const auto rows = reinterpret_cast<uintptr_t>(k.rows);
  float* out = k.sums.first + k.column;
  int64_t start = bags.offset(k.begin);
  for (int64_t bag = k.begin; bag < k.end; ++bag, out += k.sums.stride) {
    const int64_t stop = bags.offset(bag + 1);
    Columns sum[kSteps];
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) sum[s] = Columns{};
    int64_t counted = stop - start;
    for (int64_t i = start; i < stop; ++i) {
      if (i + ahead < last_id) {
        const uintptr_t next = rows + static_cast<uintptr_t>(bags.id(i + ahead)) * static_cast<uintptr_t>(row_bytes);
        prefetch_bytes(reinterpret_cast<const void*>(next), row_bytes);
      }
      const int64_t id = bags.id(i);
      const bool in_range = bags.in_range(id, f);
      if (__builtin_expect(!in_range || id == bags.padding_idx, 0)) {
        if (!in_range) note_bad(k.bounds, k.column, i);
        --counted;
        continue;
      }
      const RowReader<Format> reader(k.rows + id * row_bytes, f.embedding_dim);
      const float weight = kWeighted ? bags.per_sample_weights[i] : 1.0f;
      add_row<Format, kSteps, kPartial, kWeighted>(reader, k.column, columns, weight, sum);
    }
    if (f.mean && counted > 1) {
      const FloatLanes n = FloatLanes{} + static_cast<float>(counted);
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s)
        for (int v = 0; v < kStepVecs; ++v) sum[s].v[v] = sum[s].v[v] / n;
    }
    store_sums<kSteps, kPartial>(sum, columns, out);
    start = stop;
  }
}

template <class Format, int kSteps>
void pool_steps(const Block& k, bool partial) {
  const bool weighted = k.bags->per_sample_weights != nullptr;
  if (partial) {
    if (weighted) pool_block<Format, kSteps, true, true>(k);
    else pool_block<Format, kSteps, true, false>(k);
  } else {
    if (weighted) pool_block<Format, kSteps, false, true>(k);
    else pool_block<Format, kSteps, false, false>(k);
  }
}

// In as few blocks as possible, the last one of the smallest width that covers what is left.
template <class Format, int kSteps = kBlockSteps>
void pool_columns(Block k) {
  const int64_t D = k.feature->embedding_dim;
  for (; D - k.column > kSteps / 2 * kStep; k.column += kSteps * kStep)
    pool_steps<Format, kSteps>(k, D - k.column < kSteps * kStep);
  if constexpr (kSteps > 1)
    if (k.column < D) pool_columns<Format, kSteps / 2>(k);
}

template <class Format>
float dot(const float* g, const uint8_t* row, int64_t D) {
  const RowReader<Format> reader(row, D);
  alignas(64) float partials[kRowPartials] = {};
  int64_t c = 0;
  for (; c + kStep <= D; c += kStep) {
    const Columns x = reader.template read<false>(c, kStep);
    for (int v = 0; v < kStepVecs; ++v) {
      float* p = partials + c % kRowPartials + v * kLanes;
      store_as(p, LanesOf<FloatLanes>::fused(load_as<FloatLanes>(g + c + v * kLanes), x.v[v], load_as<FloatLanes>(p)));
    }
  }
  if (c < D) {
    const Columns x = reader.template read<true>(c, D - c);
    float columns[kStep];
    memcpy(columns, &x, sizeof columns);
    for (int j = 0; c + j < D; ++j) {
      float* p = partials + (c + j) % kRowPartials;
      *p = fused_multiply_add(g[c + j], columns[j], *p);
    }
  }
  return reduce_partials(partials, D);
}

}  // namespace

void pool_encoded(const PoolArgs& a, const Feature& f, int64_t begin, int64_t end, Sums sums, Bounds* bounds) {
  const Block k{&a.bags, &f, begin, end, 0, a.weights + f.weight_offset, sums, bounds};
  with_bag_format(f.format, [&](auto format) { pool_columns<decltype(format)>(k); });
}

float dot_with_encoded(const float* g, const uint8_t* row, const Feature& f) {
  return with_bag_format(f.format, [&](auto format) { return dot<decltype(format)>(g, row, f.embedding_dim); });
}

}  // namespace RK_ISA
}  // namespace rec_kernels
