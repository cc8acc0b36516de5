// Backward of embedding_bag. Compiled once per instruction set: no torch header and no std template here.
//
// Occurrences arrive sorted by row. A row's terms are summed in registers, column block by column block, into a scratch
// row that stays in the first-level cache; then the target (gradient or optimizer) reads it once. Rows to come are
// announced a few runs ahead so that their memory is on its way.
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
// Runs between a row's prefetch and its update.
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

int64_t payload_of(const RunArgs& a, int64_t entry) {
  return static_cast<int64_t>(a.sorted[entry] & ((uint64_t{1} << a.payload_bits) - 1));
}

uint32_t bag_of(const RunArgs& a, int64_t payload) {
  return a.bag_of ? a.bag_of[payload] : static_cast<uint32_t>(payload);
}

int64_t row_of(const RunArgs& a, int64_t entry) { return static_cast<int64_t>(a.sorted[entry] >> a.payload_bits); }

// The gradient of the bag that an entry of the table names.
RK_HOST_DEVICE const float* gradient_of(const RunArgs& a, const TableRuns& table, uint32_t bag) {
  const Feature* f = table.feature;
  int64_t sample = bag - table.first_bag;
  if (static_cast<uint64_t>(sample) >= static_cast<uint64_t>(a.batch)) {  // another feature of a shared table
    f = a.features + bag / static_cast<uint32_t>(a.batch);
    sample = bag % static_cast<uint32_t>(a.batch);
  }
  return a.grad + sample * a.output_dim + f->output_offset;
}

// Occurrences [first, first + count) of the sorted list, count <= kChunk.
void terms_of_occurrences(const RunArgs& a, const TableRuns& table, int64_t first, int64_t count, Terms* t) {
  t->count = count;
  t->weighted = a.coefficients != nullptr;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t payload = payload_of(a, first + i);
    t->rows[i] = gradient_of(a, table, bag_of(a, payload));
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

void sum_scaled(const Terms& terms, int64_t D, float inverse_scale, float* out) {
  for_blocks(D, SumInto{&terms, out});
  if (inverse_scale != 1.0f)
    for (int64_t c = 0; c < D; ++c) out[c] *= inverse_scale;
}

void sum_chunks(const RunArgs& a, const ChunkSum* chunks, int64_t begin, int64_t end) {
  Terms terms;
  for (int64_t i = begin; i < end; ++i) {
    const ChunkSum& c = chunks[i];
    const int64_t D = c.table->feature->embedding_dim;
    if (c.partials) terms_of_partials(c.partials, c.count, D, &terms);
    else terms_of_occurrences(a, *c.table, c.first, c.count, &terms);
    for_blocks(D, SumInto{&terms, c.out});
  }
}

// A target is what becomes of a row's gradient, for the rows of one table. open(row, run, mean of g^2) starts a row;
// put<NV, kTail>(...) takes its columns block by block, close(row) ends it.
struct DenseTarget {
  static constexpr bool kNeedsMeanSquare = false;
  int64_t D;
  float* gradient;  // of the table

  void prefetch(int64_t) const {}
  float* open(int64_t row, int64_t, float) const { return gradient + row * D; }
  template <int NV, bool kTail>
  RK_HOST_DEVICE static void put(float* row, int64_t column, const Vec* g, int tail) {
    store_columns<NV, kTail>(g, row + column, tail);
  }
  void close(int64_t) const {}
};

struct SparseTarget {
  static constexpr bool kNeedsMeanSquare = false;
  int64_t D;
  int64_t* rows;  // of the table's runs
  float* gradients;

  void prefetch(int64_t) const {}
  float* open(int64_t row, int64_t run, float) const {
    rows[run] = row;
    return gradients + run * D;
  }
  template <int NV, bool kTail>
  RK_HOST_DEVICE static void put(float* row, int64_t column, const Vec* g, int tail) {
    store_columns<NV, kTail>(g, row + column, tail);
  }
  void close(int64_t) const {}
};

template <class Optimizer>
struct UpdateTarget {
  static constexpr bool kNeedsMeanSquare = Optimizer::kNeedsMeanSquare;
  int64_t D;
  Optimizer optimizer;
  float* weights;    // of the table
  const float* sum;  // of the table

  struct Row {
    float* weights;
    float factor;
  };
  void prefetch(int64_t row) const {
    prefetch_bytes(weights + row * D, D * 4);
    if (kNeedsMeanSquare) prefetch_line(sum + row);
  }
  RK_HOST_DEVICE Row open(int64_t row, int64_t, float mean_square) const {
    return {weights + row * D, optimizer.prepare(row, mean_square)};
  }
  template <int NV, bool kTail>
  RK_HOST_DEVICE static void put(const Row& row, int64_t column, const Vec* g, int tail) {
    Vec w[NV];
    load_row<NV, kTail>(row.weights + column, tail, w);
    const Vec factor = Vec::broadcast(row.factor);
    for (int v = 0; v < NV; ++v) w[v] = Optimizer::update(w[v], g[v], factor);
    store_columns<NV, kTail>(w, row.weights + column, tail);
  }
  void close(int64_t) const {}
};

// Rows of a format: decoded into scratch memory, updated there, and encoded.
template <class Optimizer>
struct EncodedTarget {
  static constexpr bool kNeedsMeanSquare = Optimizer::kNeedsMeanSquare;
  int64_t D;
  Optimizer optimizer;
  uint8_t* rows;  // of the table
  int64_t row_bytes;
  const float* sum;  // of the table
  float* scratch;
  RowFormatKernels::Decode decode;
  RowFormatKernels::Encode encode;
  RowRounding rounding;

  EncodedTarget(const Feature& f, const RowTarget& t, const Optimizer& optimizer, const float* sum, float* scratch)
      : D(f.embedding_dim),
        optimizer(optimizer),
        rows(t.weights + f.weight_offset),
        row_bytes(f.row_bytes),
        sum(sum),
        scratch(scratch),
        rounding(t.rounding) {
    const RowFormatKernels& k = RowFormatKernels::table<CpuIsa::RK_ISA>;
    const auto format = static_cast<int>(f.format);
    decode = k.decode[format];
    encode = t.stochastic ? k.stochastic[format] : k.nearest[format];
    rounding.noise.table = static_cast<uint32_t>(f.table_id);
  }

  using Row = typename UpdateTarget<Optimizer>::Row;
  void prefetch(int64_t row) const {
    prefetch_bytes(rows + row * row_bytes, row_bytes);
    if (kNeedsMeanSquare) prefetch_line(sum + row);
  }
  RK_HOST_DEVICE Row open(int64_t row, int64_t, float mean_square) const {
    decode(rows + row * row_bytes, D, scratch);
    return {scratch, optimizer.prepare(row, mean_square)};
  }
  template <int NV, bool kTail>
  RK_HOST_DEVICE static void put(const Row& row, int64_t column, const Vec* g, int tail) {
    UpdateTarget<Optimizer>::template put<NV, kTail>(row, column, g, tail);
  }
  void close(int64_t row) const { encode(scratch, D, rounding, row, rows + row * row_bytes); }
};

// for_blocks of a row that fits in the registers: sum, statistic and target without touching memory between.
template <class Target>
struct FinishNarrow {
  const Target& target;
  const Terms& terms;
  int64_t row, run;
  float inverse_scale;

  template <int NV, bool kTail>
  RK_HOST_DEVICE void block(int64_t column, int tail) const {
    Vec g[NV];
    sum_columns<NV, kTail>(terms, column, tail, g);
    if (inverse_scale != 1.0f)
      for (int v = 0; v < NV; ++v) g[v] = g[v] * Vec::broadcast(inverse_scale);
    // Zero times an infinite coefficient has made the absent lanes NaN.
    if (kTail && Target::kNeedsMeanSquare) g[NV - 1] = g[NV - 1].first(tail);
    const float mean_square =
        Target::kNeedsMeanSquare ? square_sum<NV>(g, target.D) / static_cast<float>(target.D) : 0.0f;
    Target::template put<NV, kTail>(target.open(row, run, mean_square), column, g, tail);
    target.close(row);
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
void finish_wide(const Target& target, const Terms& terms, int64_t row, int64_t run, float inverse_scale,
                 float* scratch) {
  const int64_t D = target.D;
  sum_scaled(terms, D, inverse_scale, scratch);
  const float mean_square = Target::kNeedsMeanSquare ? row_dot(scratch, scratch, D) / static_cast<float>(D) : 0.0f;
  const auto opened = target.open(row, run, mean_square);
  for_blocks(D, PutFrom<Target, decltype(opened)>{scratch, opened});
  target.close(row);
}

template <class Target>
void finish_row(const Target& target, const Terms& terms, int64_t row, int64_t run, float inverse_scale,
                float* scratch) {
  if (target.D <= kBlock) for_blocks(target.D, FinishNarrow<Target>{target, terms, row, run, inverse_scale});
  else finish_wide(target, terms, row, run, inverse_scale, scratch);
}

// The first long run at or behind `run`, which counts over all tables.
const LongRun* first_long_run(const RunArgs& a, int64_t run) {
  int64_t low = 0, high = a.num_long_runs;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (a.long_runs[middle].run < run) low = middle + 1;
    else high = middle;
  }
  return a.long_runs + low;
}

// Runs [begin, end) of a table in order. The memory of rows to come is fetched kAhead runs before their turn.
template <class Target>
void finish_runs(const RunArgs& a, const Target& target, const TableRuns& table, float* scratch, int64_t begin,
                 int64_t end) {
  const int64_t D = target.D;
  const auto announce = [&](int64_t r) {
    const int64_t start = table.starts[r];
    prefetch_bytes(gradient_of(a, table, bag_of(a, payload_of(a, start))), D * 4);
    target.prefetch(row_of(a, start));
  };
  for (int64_t r = begin; r < end && r < begin + kAhead; ++r) announce(r);
  const LongRun* next_long = first_long_run(a, table.first_run + begin);
  Terms terms;
  for (int64_t r = begin; r < end; ++r) {
    if (r + kAhead < end) announce(r + kAhead);
    const int64_t start = table.starts[r], count = table.starts[r + 1] - start, row = row_of(a, start);
    if (count > kChunk) {
      terms_of_partials(next_long->partials, next_long->count, D, &terms);
      ++next_long;
    } else {
      terms_of_occurrences(a, table, start, count, &terms);
    }
    finish_row(target, terms, row, r, a.inverse_scale, scratch);
  }
}

void dense(const RunArgs& a, const RowTarget& t, const TableRuns& table, float* scratch, int64_t begin, int64_t end) {
  const Feature& f = *table.feature;
  finish_runs(a, DenseTarget{f.embedding_dim, reinterpret_cast<float*>(t.weights + f.weight_offset)}, table, scratch,
              begin, end);
}

void sparse(const RunArgs& a, const RowTarget& t, const TableRuns& table, float* scratch, int64_t begin, int64_t end) {
  const SparseTarget target{table.feature->embedding_dim, t.rows + table.first_run,
                            reinterpret_cast<float*>(t.weights) + table.first_float};
  finish_runs(a, target, table, scratch, begin, end);
}

// Of the table's first row; null stays null.
float* state_of(const RowTarget& t, const TableRuns& table) {
  return t.sum ? t.sum + table.feature->row_offset : nullptr;
}

template <class Optimizer>
void update(const RunArgs& a, const RowTarget& t, const Optimizer& optimizer, const TableRuns& table, float* scratch,
            int64_t begin, int64_t end) {
  const Feature& f = *table.feature;
  if (f.format != RowFormat::kFp32)
    return finish_runs(
        a, EncodedTarget<Optimizer>(f, t, optimizer, state_of(t, table), scratch + scratch_row(f.embedding_dim)), table,
        scratch, begin, end);
  auto* weights = reinterpret_cast<float*>(t.weights + f.weight_offset);
  finish_runs(a, UpdateTarget<Optimizer>{f.embedding_dim, optimizer, weights, state_of(t, table)}, table, scratch,
              begin, end);
}

void sgd(const RunArgs& a, const RowTarget& t, const TableRuns& table, float* scratch, int64_t begin, int64_t end) {
  update(a, t, Sgd{t.lr}, table, scratch, begin, end);
}

void rowwise_adagrad(const RunArgs& a, const RowTarget& t, const TableRuns& table, float* scratch, int64_t begin,
                     int64_t end) {
  update(a, t, RowwiseAdagrad{t.lr, t.eps, state_of(t, table)}, table, scratch, begin, end);
}

}  // namespace
}  // namespace RK_ISA

template <>
const EmbeddingBagBackwardKernels EmbeddingBagBackwardKernels::table<CpuIsa::RK_ISA> = {
    RK_ISA::sum_chunks, RK_ISA::dense, RK_ISA::sparse, RK_ISA::sgd, RK_ISA::rowwise_adagrad};

}  // namespace rec_kernels
