// Backward of embedding_bag. Compiled once per instruction set: no torch header and no std template here.
//
// Occurrences arrive sorted by row. A row's terms are summed in registers, column block by column block, into a scratch
// row that stays in the first-level cache; then the target (gradient or optimizer) reads it once. Rows to come are
// decoded a few runs ahead so that their memory is on its way.
#include "core/row_statistics.h"
#include "cpu/embedding_bag_backward.h"
#include "optimizers/rowwise_adagrad.h"
#include "optimizers/sgd.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

constexpr int W = Vec::kWidth;
constexpr int kBlockVecs = 8;
constexpr int kBlock = kBlockVecs * W;
// Runs between a row's prefetch and its update; a power of two.
constexpr int64_t kAhead = 8;

// The terms of one sum: rows of floats, each with a coefficient when `weighted`.
struct Terms {
  const float* rows[kChunk];
  float coefficients[kChunk];
  int64_t count;
  bool weighted;
};

template <bool kPartial>
Vec load_columns(const float* p, int tail) {
  return kPartial ? Vec::load_partial(p, tail) : Vec::load(p);
}

// sum[] = the terms' columns [column, column + NV * W), added up in ascending order from the first term.
template <int NV, bool kTail, bool kWeighted>
RK_HOST_DEVICE void sum_block(const Terms& t, int64_t column, int tail, Vec* sum) {
  constexpr int L = NV - 1;  // the register that may be partial
  const float* row = t.rows[0] + column;
  for (int v = 0; v < L; ++v) sum[v] = Vec::load(row + v * W);
  sum[L] = load_columns<kTail>(row + L * W, tail);
  if (kWeighted)
    for (int v = 0; v < NV; ++v) sum[v] = Vec::broadcast(t.coefficients[0]) * sum[v];
  for (int64_t i = 1; i < t.count; ++i) {
    row = t.rows[i] + column;
    if (kWeighted) {
      const Vec c = Vec::broadcast(t.coefficients[i]);
      for (int v = 0; v < L; ++v) sum[v] = fused_multiply_add(c, Vec::load(row + v * W), sum[v]);
      sum[L] = fused_multiply_add(c, load_columns<kTail>(row + L * W, tail), sum[L]);
    } else {
      for (int v = 0; v < L; ++v) sum[v] = sum[v] + Vec::load(row + v * W);
      sum[L] = sum[L] + load_columns<kTail>(row + L * W, tail);
    }
  }
}

template <int NV, bool kTail>
RK_HOST_DEVICE void sum_columns(const Terms& t, int64_t column, int tail, Vec* sum) {
  if (t.weighted) sum_block<NV, kTail, true>(t, column, tail, sum);
  else sum_block<NV, kTail, false>(t, column, tail, sum);
}

// each.block<NV, kTail>(column, tail) for the column blocks of a row.
template <class Each>
RK_HOST_DEVICE void for_blocks(int64_t D, const Each& each) {
  for (int64_t column = 0; column < D; column += kBlock) {
    const int64_t here = D - column < kBlock ? D - column : kBlock;
    const int tail = static_cast<int>(here % W);
    switch (2 * ((here + W - 1) / W) + (tail != 0)) {
      case 2:
        each.template block<1, false>(column, tail);
        break;
      case 3:
        each.template block<1, true>(column, tail);
        break;
      case 4:
        each.template block<2, false>(column, tail);
        break;
      case 5:
        each.template block<2, true>(column, tail);
        break;
      case 6:
        each.template block<3, false>(column, tail);
        break;
      case 7:
        each.template block<3, true>(column, tail);
        break;
      case 8:
        each.template block<4, false>(column, tail);
        break;
      case 9:
        each.template block<4, true>(column, tail);
        break;
      case 10:
        each.template block<5, false>(column, tail);
        break;
      case 11:
        each.template block<5, true>(column, tail);
        break;
      case 12:
        each.template block<6, false>(column, tail);
        break;
      case 13:
        each.template block<6, true>(column, tail);
        break;
      case 14:
        each.template block<7, false>(column, tail);
        break;
      case 15:
        each.template block<7, true>(column, tail);
        break;
      case 16:
        each.template block<8, false>(column, tail);
        break;
      default:
        each.template block<8, true>(column, tail);
        break;
    }
  }
}

template <int NV, bool kTail>
RK_HOST_DEVICE void store_columns(const Vec* v, float* out, int tail) {
  for (int i = 0; i < NV - 1; ++i) v[i].store(out + i * W);
  if (kTail) v[NV - 1].store_partial(out + (NV - 1) * W, tail);
  else v[NV - 1].store(out + (NV - 1) * W);
}

template <int NV, bool kTail>
RK_HOST_DEVICE void load_row(const float* from, int tail, Vec* v) {
  for (int i = 0; i < NV - 1; ++i) v[i] = Vec::load(from + i * W);
  v[NV - 1] = load_columns<kTail>(from + (NV - 1) * W, tail);
}

// A run with its table looked up.
struct Decoded {
  const Feature* feature;
  int64_t first_bag;  // of the feature
  int64_t linear_row;
  int64_t weight;  // index of the row's first weight
};

int64_t payload_of(const RunArgs& a, int64_t entry) {
  return static_cast<int64_t>(a.sorted[entry] & ((uint64_t{1} << a.payload_bits) - 1));
}

uint32_t bag_of(const RunArgs& a, int64_t payload) {
  return a.bag_of ? a.bag_of[payload] : static_cast<uint32_t>(payload);
}

Decoded decode(const RunArgs& a, int64_t start) {
  const uint32_t bag = bag_of(a, payload_of(a, start)), feature = bag / static_cast<uint32_t>(a.batch);
  const Feature& f = a.features[feature];
  const int64_t linear = static_cast<int64_t>(a.sorted[start] >> a.payload_bits);
  return {&f, feature * a.batch, linear, f.weight_offset + (linear - f.row_offset) * f.embedding_dim};
}

// Occurrences [first, first + count) of the sorted list, count <= kChunk.
void terms_of_occurrences(const RunArgs& a, const Decoded& run, int64_t first, int64_t count, Terms* t) {
  t->count = count;
  t->weighted = a.coefficients != nullptr;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t payload = payload_of(a, first + i);
    const uint32_t bag = bag_of(a, payload);
    const Feature* f = run.feature;
    int64_t sample = bag - run.first_bag;
    if (static_cast<uint64_t>(sample) >= static_cast<uint64_t>(a.batch)) {  // another feature of a shared table
      f = a.features + bag / static_cast<uint32_t>(a.batch);
      sample = bag % static_cast<uint32_t>(a.batch);
    }
    t->rows[i] = a.grad + sample * a.output_dim + f->output_offset;
    if (t->weighted) t->coefficients[i] = a.coefficients[payload];
  }
}

void terms_of_partials(const float* partials, int64_t count, int64_t D, Terms* t) {
  t->count = count;
  t->weighted = false;
  for (int64_t i = 0; i < count; ++i) t->rows[i] = partials + i * D;
}

// for_blocks: sums the terms into out[0..D).
struct SumInto {
  const Terms* terms;
  float* out;

  template <int NV, bool kTail>
  RK_HOST_DEVICE void block(int64_t column, int tail) const {
    Vec sum[NV];
    sum_columns<NV, kTail>(*terms, column, tail, sum);
    store_columns<NV, kTail>(sum, out + column, tail);
  }
};

void sum_chunks(const RunArgs& a, const ChunkSum* chunks, int64_t begin, int64_t end) {
  Terms terms;
  for (int64_t i = begin; i < end; ++i) {
    const ChunkSum& c = chunks[i];
    if (c.partials) terms_of_partials(c.partials, c.count, c.embedding_dim, &terms);
    else terms_of_occurrences(a, decode(a, c.first), c.first, c.count, &terms);
    for_blocks(c.embedding_dim, SumInto{&terms, c.out});
  }
}

// A target is what becomes of a row's gradient. open(run, number, mean of g^2) starts a row; put<NV, kTail>(...) takes
// its columns block by block.
struct DenseTarget {
  static constexpr bool kNeedsMeanSquare = false;
  float* gradient;

  void prefetch(const Decoded&) const {}
  float* open(const Decoded& run, int64_t, float) const { return gradient + run.weight; }
  template <int NV, bool kTail>
  RK_HOST_DEVICE static void put(float* row, int64_t column, const Vec* g, int tail) {
    store_columns<NV, kTail>(g, row + column, tail);
  }
};

struct SparseTarget {
  static constexpr bool kNeedsMeanSquare = false;
  const RowTarget* target;
  const Feature* features;

  void prefetch(const Decoded&) const {}
  float* open(const Decoded& run, int64_t number, float) const {
    target->rows[number] = run.linear_row - run.feature->row_offset;
    return target->weights + target->grad_start[run.feature - features] + number * run.feature->embedding_dim;
  }
  template <int NV, bool kTail>
  RK_HOST_DEVICE static void put(float* row, int64_t column, const Vec* g, int tail) {
    store_columns<NV, kTail>(g, row + column, tail);
  }
};

template <class Optimizer>
struct UpdateTarget {
  static constexpr bool kNeedsMeanSquare = Optimizer::kNeedsMeanSquare;
  Optimizer optimizer;
  float* weights;
  const float* sum;

  struct Row {
    float* weights;
    float factor;
  };
  void prefetch(const Decoded& run) const {
    prefetch_bytes(weights + run.weight, run.feature->embedding_dim * 4);
    if (kNeedsMeanSquare) prefetch_line(sum + run.linear_row);
  }
  RK_HOST_DEVICE Row open(const Decoded& run, int64_t, float mean_square) const {
    return {weights + run.weight, optimizer.prepare(run.linear_row, mean_square)};
  }
  template <int NV, bool kTail>
  RK_HOST_DEVICE static void put(const Row& row, int64_t column, const Vec* g, int tail) {
    Vec w[NV];
    load_row<NV, kTail>(row.weights + column, tail, w);
    const Vec factor = Vec::broadcast(row.factor);
    for (int v = 0; v < NV; ++v) w[v] = Optimizer::update(w[v], g[v], factor);
    store_columns<NV, kTail>(w, row.weights + column, tail);
  }
};

// for_blocks of a row that fits in the registers: sum, statistic and target without touching memory between.
template <class Target>
struct FinishNarrow {
  const Target& target;
  const Terms& terms;
  const Decoded& run;
  int64_t number;
  float inverse_scale;

  template <int NV, bool kTail>
  RK_HOST_DEVICE void block(int64_t column, int tail) const {
    const int64_t D = run.feature->embedding_dim;
    Vec g[NV];
    sum_columns<NV, kTail>(terms, column, tail, g);
    if (inverse_scale != 1.0f)
      for (int v = 0; v < NV; ++v) g[v] = g[v] * Vec::broadcast(inverse_scale);
    // Zero times an infinite coefficient has made the absent lanes NaN.
    if (kTail && Target::kNeedsMeanSquare) g[NV - 1] = g[NV - 1].first(tail);
    const float mean_square = Target::kNeedsMeanSquare ? square_sum<NV>(g, D) / static_cast<float>(D) : 0.0f;
    Target::template put<NV, kTail>(target.open(run, number, mean_square), column, g, tail);
  }
};

// for_blocks of a wide row: from the scratch row, summed before, to the target.
template <class Target, class Row>
struct PutFrom {
  const float* scratch;
  const Row& row;

  template <int NV, bool kTail>
  RK_HOST_DEVICE void block(int64_t column, int tail) const {
    Vec g[NV];
    load_row<NV, kTail>(scratch + column, tail, g);
    Target::template put<NV, kTail>(row, column, g, tail);
  }
};

template <class Target>
void finish_wide(const Target& target, const Terms& terms, const Decoded& run, int64_t number, float inverse_scale,
                 float* scratch) {
  const int64_t D = run.feature->embedding_dim;
  for_blocks(D, SumInto{&terms, scratch});
  if (inverse_scale != 1.0f)
    for (int64_t c = 0; c < D; ++c) scratch[c] *= inverse_scale;
  const float mean_square = Target::kNeedsMeanSquare ? row_dot(scratch, scratch, D) / static_cast<float>(D) : 0.0f;
  const auto row = target.open(run, number, mean_square);
  for_blocks(D, PutFrom<Target, decltype(row)>{scratch, row});
}

// Runs [begin, end) in order. Rows to come are decoded and prefetched kAhead runs before their turn.
template <class Target>
void finish_runs(const RunArgs& a, const Target& target, float* scratch, int64_t begin, int64_t end) {
  Decoded coming[kAhead];
  const auto announce = [&](int64_t r) {
    const int64_t start = a.starts[r];
    const Decoded d = coming[r % kAhead] = decode(a, start);
    const int64_t sample = bag_of(a, payload_of(a, start)) - d.first_bag;
    prefetch_bytes(a.grad + sample * a.output_dim + d.feature->output_offset, d.feature->embedding_dim * 4);
    target.prefetch(d);
  };
  for (int64_t r = begin; r < end && r < begin + kAhead; ++r) announce(r);
  int64_t next_long = 0;
  while (next_long < a.num_long_runs && a.long_runs[next_long].run < begin) ++next_long;
  Terms terms;
  for (int64_t r = begin; r < end; ++r) {
    const Decoded run = coming[r % kAhead];
    if (r + kAhead < end) announce(r + kAhead);
    const int64_t start = a.starts[r], count = a.starts[r + 1] - start, D = run.feature->embedding_dim;
    if (count > kChunk) {
      const LongRun& l = a.long_runs[next_long++];
      terms_of_partials(l.partials, l.count, D, &terms);
    } else {
      terms_of_occurrences(a, run, start, count, &terms);
    }
    if (D <= kBlock) for_blocks(D, FinishNarrow<Target>{target, terms, run, r, a.inverse_scale});
    else finish_wide(target, terms, run, r, a.inverse_scale, scratch);
  }
}

void dense(const RunArgs& a, const RowTarget& t, float* scratch, int64_t begin, int64_t end) {
  finish_runs(a, DenseTarget{t.weights}, scratch, begin, end);
}

void sparse(const RunArgs& a, const RowTarget& t, float* scratch, int64_t begin, int64_t end) {
  finish_runs(a, SparseTarget{&t, a.features}, scratch, begin, end);
}

void sgd(const RunArgs& a, const RowTarget& t, float* scratch, int64_t begin, int64_t end) {
  finish_runs(a, UpdateTarget<Sgd>{{t.lr}, t.weights, t.sum}, scratch, begin, end);
}

void rowwise_adagrad(const RunArgs& a, const RowTarget& t, float* scratch, int64_t begin, int64_t end) {
  finish_runs(a, UpdateTarget<RowwiseAdagrad>{{t.lr, t.eps, t.sum}, t.weights, t.sum}, scratch, begin, end);
}

}  // namespace
}  // namespace RK_ISA

template <>
const EmbeddingBagBackwardKernels EmbeddingBagBackwardKernels::table<CpuIsa::RK_ISA> = {
    RK_ISA::sum_chunks, RK_ISA::dense, RK_ISA::sparse, RK_ISA::sgd, RK_ISA::rowwise_adagrad};

}  // namespace rec_kernels
