// Lookups of encoded rows. Compiled once per instruction set: no torch header and no std template here.
#include "embedding_bag/cpu/pool_encoded.h"
#include "rows/cpu/statistics.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// Arguments of a lookup in an encoded table.
struct Encoded {
  const PooledBags& k;
  int64_t D;
  const uint8_t* rows;
  int64_t row_bytes;
  const RowIndices& indices;
};

template <class Block>
void pool_columns(const Encoded& e, const Block& block) {
  const TableRows<Block, 0> source(block, e.rows, e.row_bytes, e.indices);
  if (e.k.bags->per_sample_weights) pool_block<BagKind::kWeighted>(e.k, source);
  else pool_block<BagKind::kPlain>(e.k, source);
}

// Uses as few blocks as possible; the last one has the smallest width that covers the remaining columns.
template <class Format, int kSteps = kMostSteps>
void pool_steps(const Encoded& e, int64_t column) {
  for (; e.D - column > kSteps / 2 * kStep; column += kSteps * kStep) {
    const int64_t left = e.D - column;
    if (left < kSteps * kStep) pool_columns(e, EncodedBlock<Format, kSteps, true>{column, left, e.D});
    else pool_columns(e, EncodedBlock<Format, kSteps, false>{column, left, e.D});
  }
  if constexpr (kSteps > 1)
    if (column < e.D) pool_steps<Format, kSteps / 2>(e, column);
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

void pool_encoded(const PooledBags& k, const Part& f, const uint8_t* rows, const RowIndices& indices) {
  const Encoded e{k, f.embedding_dim, rows, f.row_bytes, indices};
  with_bag_format(f.format, [&](auto format) { pool_steps<decltype(format)>(e, 0); });
}

float dot_with_encoded(const float* g, const uint8_t* row, const Part& f) {
  return with_bag_format(f.format, [&](auto format) { return dot<decltype(format)>(g, row, f.embedding_dim); });
}

}  // namespace RK_ISA
}  // namespace rec_kernels
