// What becomes of the rows' gradients: stored, or an update of the rows.
#pragma once

#include "cpu/embedding_bag_backward.h"
#include "cpu/row_blocks.h"
#include "cpu/row_formats.h"

namespace rec_kernels {
inline namespace RK_ISA {

// A target is what becomes of a row's gradient, for the rows of one table. open(row, run, mean of g^2) starts a row;
// put<NV, kTail>(...) takes its columns block by block, close(row) ends it; flush()
// ends the last one.
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
  void close(int64_t) {}
  void flush() {}
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
  void close(int64_t) {}
  void flush() {}
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
  void close(int64_t) {}
  void flush() {}
};

// Rows of a format: decoded into scratch memory, updated there, and encoded, several at a time.
template <class Optimizer>
struct EncodedTarget {
  static constexpr bool kNeedsMeanSquare = Optimizer::kNeedsMeanSquare;
  int64_t D;
  Optimizer optimizer;
  const float* sum;  // of the table
  int64_t row_bytes;
  RowFormatKernels::Decode decode;
  RowFormatKernels::EncodeRows encode;
  RowRounding rounding;
  uint8_t* rows;  // of the table
  float* held;    // rows that wait to be encoded
  int64_t numbers[kRowsHeld];
  int64_t count = 0;

  EncodedTarget(const Feature& f, const RowTarget& t, const Optimizer& optimizer, const float* sum, float* held)
      : D(f.embedding_dim),
        optimizer(optimizer),
        sum(sum),
        row_bytes(f.row_bytes),
        rounding(t.rounding),
        rows(t.weights + f.weight_offset),
        held(held) {
    const RowFormatKernels& k = RowFormatKernels::table<CpuIsa::RK_ISA>;
    const auto format = static_cast<int>(f.format);
    decode = k.decode[format];
    encode = (t.stochastic ? k.stochastic : k.nearest)[format];
    rounding.noise.table = static_cast<uint32_t>(f.table_id);
  }

  using Row = typename UpdateTarget<Optimizer>::Row;
  void prefetch(int64_t row) const {
    prefetch_bytes(rows + row * row_bytes, row_bytes);
    if (kNeedsMeanSquare) prefetch_line(sum + row);
  }
  RK_HOST_DEVICE Row open(int64_t row, int64_t, float mean_square) const {
    float* own = held + count * D;
    decode(rows + row * row_bytes, D, own);
    return {own, optimizer.prepare(row, mean_square)};
  }
  template <int NV, bool kTail>
  RK_HOST_DEVICE static void put(const Row& row, int64_t column, const Vec* g, int tail) {
    UpdateTarget<Optimizer>::template put<NV, kTail>(row, column, g, tail);
  }
  void close(int64_t row) {
    numbers[count++] = row;
    if (count == rows_held(D)) flush();
  }
  void flush() {
    if (count == 0) return;
    encode(held, count, D, rounding, {rows, 0, numbers});
    count = 0;
  }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
