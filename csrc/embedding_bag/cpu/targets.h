// Targets of row gradients: a gradient tensor, or an update of the rows.
#pragma once

#include "embedding_bag/cpu/backward.h"
#include "rows/cpu/blocks.h"
#include "rows/cpu/row_formats.h"
#include "rows/cpu/statistics.h"
#include "rows/optimizers/sgd_rowwise_adagrad.h"

namespace rec_kernels {
inline namespace RK_ISA {

// A target consumes the row gradients of one table. For each run, in order: prefetch(row, run, columns) is called
// ahead() runs earlier; select(run) follows; the gradient is summed into buffer(row, run, scratch); finish(row, run, g)
// consumes it from there or from other memory, and may overwrite it. flush() is called at the end. `columns` is D, or D
// rounded up to whole registers as a compile-time constant, which unrolls the prefetch loop and avoids a branch
// misprediction. kInRegisters: finish_registers() consumes rows of up to kBlock columns, unless has_step(), which needs
// them in memory; sums of products only with kProductsInRegisters.
struct StoredGradients {
  static constexpr bool kInRegisters = true, kProductsInRegisters = false;
  int64_t D;
  float* gradients;  // of the table, indexed by row if dense, by run if sparse
  int64_t* rows;     // row index per run; null for dense gradients

  static int64_t ahead() { return 0; }
  void prefetch(int64_t, int64_t, int64_t) const {}
  static void select(int64_t) {}
  RK_HOST_DEVICE float* buffer(int64_t row, int64_t run, float*) const { return gradients + (rows ? run : row) * D; }
  void finish(int64_t row, int64_t run, const float* g) const {
    float* const out = buffer(row, run, nullptr);
    if (g != out) memcpy(out, g, static_cast<size_t>(D) * sizeof(float));
    if (rows) rows[run] = row;
  }
  static bool has_step() { return false; }
  template <int NV, bool kTail>
  RK_HOST_DEVICE void finish_registers(int64_t row, int64_t run, const Vec* g, int tail) const {
    store_columns<NV, kTail>(g, buffer(row, run, nullptr), tail);
    if (rows) rows[run] = row;
  }
  void flush() {}
};

// Clips the gradient g of a row w, and adds L2 weight decay to it.
inline void apply_gradient_step(const GradientStep& step, const float* w, int64_t D, float* g) {
  const GradientStep own = step;  // a copy, which stores to g cannot alias
  RowStep row(own);
  const auto clip = [&] {
    for (int64_t c = 0; c < D; ++c) g[c] = row.clipped(g[c]);
  };
  if (own.clips_norm()) {
    clip();
    row.clip_norm(row_dot(g, g, D));
  }
  if (own.clip_value < __builtin_inff() || row.factor != 1.0f) clip();
  if (row.adds_decay()) add_scaled(own.weight_decay, w, D, g);
}

// Rows of an uncached float32 table. open(row) returns the row as floats to update, close(row) writes it back, and
// flush() writes what is still buffered.
struct FloatRows {
  static constexpr bool kAreFloats = true;
  int64_t D;
  float* weights;  // of the table

  static void select(int64_t) {}
  RK_HOST_DEVICE void prefetch(int64_t row, int64_t, int64_t columns) const {
    prefetch_bytes(weights + row * D, columns * 4);
  }
  RK_HOST_DEVICE float* open(int64_t row) const { return weights + row * D; }
  void close(int64_t) {}
  void flush() {}
};

// Encoded rows: decoded into a buffer, and encoded from there in batches.
struct EncodedRows {
  int64_t D;
  int64_t row_bytes;
  RowFormatKernels::DecodeRows decode;
  RowFormatKernels::EncodeRows encode;
  RowRounding rounding;
  uint8_t* rows;  // of the table
  float* buffer;  // updated rows to be encoded
  int64_t indices[kBufferedRows];
  int64_t count = 0;

  EncodedRows(const Part& f, const RowTarget& t, float* buffer)
      : D(f.embedding_dim),
        row_bytes(f.row_bytes),
        rounding(t.rounding),
        rows(t.weights + f.weight_offset),
        buffer(buffer) {
    const RowFormatKernels& k = RowFormatKernels::table<CpuIsa::RK_ISA>;
    const auto format = static_cast<int>(f.format);
    decode = k.decode[format];
    encode = (t.update.stochastic ? k.stochastic : k.nearest)[format];
    rounding.noise.shard = f.shard;
  }
  void prefetch(int64_t row) const { prefetch_bytes(rows + row * row_bytes, row_bytes); }
  RK_HOST_DEVICE float* next() const { return buffer + count * D; }
  RK_HOST_DEVICE float* open(int64_t row) const {
    decode(rows + row * row_bytes, 1, D, next());
    return next();
  }
  void close(int64_t row) {
    indices[count++] = row;
    if (count == buffered_rows(D)) flush();
  }
  void flush() {
    if (count == 0) return;
    encode(buffer, count, D, rounding, {rows, 0, indices});
    count = 0;
  }
};

// Dense gradients of an encoded table, in its format.
struct EncodedGradients {
  static constexpr bool kInRegisters = true, kProductsInRegisters = false;
  int64_t D;
  EncodedRows rows;

  static int64_t ahead() { return 0; }
  void prefetch(int64_t, int64_t, int64_t) const {}
  static void select(int64_t) {}
  RK_HOST_DEVICE float* buffer(int64_t, int64_t, float*) const { return rows.next(); }
  void finish(int64_t row, int64_t, const float* g) {
    if (g != rows.next()) memcpy(rows.next(), g, static_cast<size_t>(D) * sizeof(float));
    rows.close(row);
  }
  static bool has_step() { return false; }
  template <int NV, bool kTail>
  RK_HOST_DEVICE void finish_registers(int64_t row, int64_t, const Vec* g, int tail) {
    store_columns<NV, kTail>(g, rows.next(), tail);
    rows.close(row);
  }
  void flush() { rows.flush(); }
};

// Rows of an encoded or cached table. Cached rows are updated in the cache.
class StoredRows {
 public:
  static constexpr bool kAreFloats = false;
  // `slots`: slot per run of the table; null if the table is not cached.
  StoredRows(const Part& f, const RowTarget& t, int64_t part, const int64_t* slots, float* buffer)
      : rows_(f, t, buffer), slots_(slots), D_(f.embedding_dim) {
    if (!slots) return;
    cached_ = t.cache.rows;
    offset_ = t.cache.places[part].offset;
    dirty_ = t.cache.dirty;
  }

  void prefetch(int64_t row, int64_t run, int64_t) const {
    const int64_t slot = slot_of(run);
    if (slot < 0) return rows_.prefetch(row);
    prefetch_bytes(in_slot(slot), D_ * 4);
    prefetch_line(dirty_ + slot);
  }
  void select(int64_t run) { slot_ = slot_of(run); }
  RK_HOST_DEVICE float* open(int64_t row) const { return slot_ >= 0 ? in_slot(slot_) : rows_.open(row); }
  void close(int64_t row) {
    if (slot_ >= 0) dirty_[slot_] = 1;
    else rows_.close(row);
  }
  void flush() { rows_.flush(); }

 private:
  RK_HOST_DEVICE int64_t slot_of(int64_t run) const { return slots_ ? slots_[run] : -1; }
  RK_HOST_DEVICE float* in_slot(int64_t slot) const { return cached_ + (offset_ + slot * D_); }

  EncodedRows rows_;
  const int64_t* slots_;
  int64_t D_, offset_ = 0;
  float* cached_ = nullptr;
  uint8_t* dirty_ = nullptr;
  int64_t slot_ = -1;  // slot of the current row
};

// SGD or row-wise Adagrad: w += factor * g.
template <class Rows>
struct ScaledTarget {
  static constexpr bool kInRegisters = true, kProductsInRegisters = Rows::kAreFloats;
  int64_t D;
  Update how;
  float lr, shrinkage;  // of the table
  float* sum;           // the table's row-wise Adagrad state; null: SGD
  Rows rows;

  // Enough rows to hide memory latency, but fewer wide rows, which would fill the L1 cache.
  int64_t ahead() const {
    constexpr int64_t kMost = 24, kFewest = 4, kFloats = 3072;
    const int64_t fit = kFloats / D;
    return fit < kFewest ? kFewest : fit < kMost ? fit : kMost;
  }
  RK_HOST_DEVICE void prefetch(int64_t row, int64_t run, int64_t columns) const {
    rows.prefetch(row, run, columns);
    if (sum) prefetch_line(sum + row);
  }
  void select(int64_t run) { rows.select(run); }
  RK_HOST_DEVICE static float* buffer(int64_t, int64_t, float* scratch) { return scratch; }
  bool has_step() const { return how.gradient_step.is_active(); }
  // Updates the row's state and returns the factor of its gradient.
  RK_HOST_DEVICE float adagrad_factor(int64_t row, float square_sum) const {
    sum[row] += square_sum / static_cast<float>(D);
    return rowwise_adagrad_factor(lr, how.eps, sum[row]);
  }
  void finish(int64_t row, int64_t, float* g) {
    float* w = rows.open(row);
    if (has_step()) apply_gradient_step(how.gradient_step, w, D, g);
    const float factor = sum ? adagrad_factor(row, row_dot(g, g, D)) : sgd_factor(lr);
    if (how.shrinks_weights) add_scaled(shrinkage, w, D, w);
    add_scaled(factor, g, D, w);
    rows.close(row);
  }
  template <int NV, bool kTail>
  RK_HOST_DEVICE void finish_registers(int64_t row, int64_t, Vec* g, int tail) {
    // Lanes beyond D may be NaN: 0 times an infinite coefficient.
    if (kTail) g[NV - 1] = g[NV - 1].first(tail);
    const Vec factor = Vec::broadcast(sum ? adagrad_factor(row, square_sum<NV>(g, D)) : sgd_factor(lr));
    float* weights = rows.open(row);
    Vec w[NV];
    load_row<NV, kTail>(weights, tail, w);
    for (int v = 0; v < NV; ++v) w[v] = moved(w[v], g[v], factor);
    store_columns<NV, kTail>(w, weights, tail);
    rows.close(row);
  }
  void flush() { rows.flush(); }
};

// Per-element optimizer state of a table. open() returns a row's moments as floats, and close() writes them back.
struct MomentRows {
  int64_t D;
  OptimizerState state;  // of the table
  bool stochastic;
  RowRounding rounding;
  float* buffer;  // [2, D], for bfloat16 state

  MomentRows(int64_t D, const OptimizerState& state, const RowTarget& t, const TableShard& shard, float* buffer)
      : D(D), state(state), stochastic(t.update.stochastic), rounding(t.rounding), buffer(buffer) {
    rounding.noise.shard = shard;
  }
  void prefetch(int64_t row, bool second_by_row) const {
    const auto prefetch_row = [&](float* moments) {
      if (moments) prefetch_bytes(state.moment(moments, row * D), D * state.moment_bytes());
    };
    prefetch_row(state.sum);
    prefetch_row(state.exp_avg);
    if (second_by_row) prefetch_line(state.exp_avg_sq + row);
    else prefetch_row(state.exp_avg_sq);
  }
  // `stream` selects the noise of these moments.
  float* open(float* moments, uint32_t stream, int64_t row) const {
    if (!moments || !state.bf16) return moments ? moments + row * D : nullptr;
    float* own = buffer + (stream - kFirstMomentStream) * D;
    kernels().decode[static_cast<int>(RowFormat::kBf16)](address(moments, row), 1, D, own);
    return own;
  }
  void close(float* moments, uint32_t stream, int64_t row) const {
    if (!moments || !state.bf16) return;
    RowRounding how = rounding;
    how.noise.stream = stream;
    const auto encode = (stochastic ? kernels().stochastic : kernels().nearest)[static_cast<int>(RowFormat::kBf16)];
    encode(buffer + (stream - kFirstMomentStream) * D, 1, D, how, {address(moments, row), row, nullptr});
  }

 private:
  static const RowFormatKernels& kernels() { return RowFormatKernels::table<CpuIsa::RK_ISA>; }
  uint8_t* address(float* moments, int64_t row) const {
    return reinterpret_cast<uint8_t*>(state.moment(moments, row * D));
  }
};

// An optimizer with per-element state, from the row's gradient in memory.
template <class Rows>
struct ElementwiseTarget {
  static constexpr bool kInRegisters = false;
  int64_t D;
  Elementwise optimizer;
  float lr;
  GradientStep step;
  MomentRows moments;
  Rows rows;

  int64_t ahead() const { return D <= 32 ? 16 : 8; }  // each row with its moments
  void prefetch(int64_t row, int64_t run, int64_t columns) const {
    rows.prefetch(row, run, columns);
    moments.prefetch(row, optimizer.needs_mean_square());
  }
  void select(int64_t run) { rows.select(run); }

  RK_HOST_DEVICE static float* buffer(int64_t, int64_t, float* scratch) { return scratch; }
  void finish(int64_t row, int64_t, float* g) {
    float* w = rows.open(row);
    if (step.is_active()) apply_gradient_step(step, w, D, g);
    const ElementwiseRegisters<Vec> in_registers(optimizer, row_divisor(row, g),
                                                 [](float x) { return Vec::broadcast(x); });
    const OptimizerState& state = moments.state;
    float* const all_first = optimizer.has_first() ? state.exp_avg : nullptr;
    float* const all_second = optimizer.has_second() ? (state.sum ? state.sum : state.exp_avg_sq) : nullptr;
    float* const first = moments.open(all_first, kFirstMomentStream, row);
    float* const second = moments.open(all_second, kSecondMomentStream, row);
    const bool single_pass = !optimizer.needs_norms(), decays = step.decays_weights();
    const Vec factor = Vec::broadcast(-lr), decay = Vec::broadcast(step.weight_decay);
    for_vectors(D, [&](int64_t c, int n) {
      Vec m = first ? load_vector(first + c, n) : Vec{}, v = second ? load_vector(second + c, n) : Vec{};
      Vec r = in_registers.direction(optimizer.kind, load_vector(g + c, n), &m, &v);
      if (first) store_vector(m, first + c, n);
      if (second) store_vector(v, second + c, n);
      const Vec weights = load_vector(w + c, n);
      if (decays) r = fused_multiply_add(decay, weights, r);
      if (single_pass) store_vector(fused_multiply_add(factor, r, weights), w + c, n);
      else store_vector(r, g + c, n);
    });
    if (!single_pass) add_scaled(optimizer.trusted(lr, row_dot(w, w, D), row_dot(g, g, D)), g, D, w);
    moments.close(all_first, kFirstMomentStream, row);
    moments.close(all_second, kSecondMomentStream, row);
    rows.close(row);
  }
  void flush() { rows.flush(); }

 private:
  float row_divisor(int64_t row, const float* g) const {
    if (!optimizer.needs_mean_square()) return 1.0f;
    float* second = moments.state.exp_avg_sq + row;
    *second = optimizer.row_moment(*second, row_dot(g, g, D) / static_cast<float>(D));
    return optimizer.row_divisor(*second);
  }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
