// Interface between the driver of embedding_bag's backward (backward.cpp) and its plain-pointer kernels, one function
// table per instruction set. Kernels sum each row's gradient in the order of docs/numerics.md, then store or apply it.
#pragma once

#include "embedding_bag/cpu/forward.h"
#include "row_cache/places.h"
#include "rows/cpu/row_formats.h"
#include "rows/optimizers/update.h"

namespace rec_kernels {

// The runs of a table: a run is the occurrences of one row.
struct TableRuns {
  const Part* part;             // the first part that reads the table
  int64_t first_bag, num_bags;  // bags of that part's feature
  const float* gradients;       // its columns in the first bag's gradient; bags are RunArgs::output_dim floats apart
  const int64_t* starts;        // run r is entries [starts[r], starts[r + 1]) of RunArgs::sorted
  int64_t num_runs;
  int64_t first_run;    // total runs of the preceding tables
  int64_t first_float;  // total floats of row gradients of the preceding tables
  bool multiplied;      // some feature multiplies its rows with those of other tables
  const Part* other;    // the only part that it is multiplied with, if that is float32; null if several parts read the
                        // table or the feature has more than two parts
  float* sums;          // [num_runs, D] precomputed gradients of the runs that are not long, or null
};

// A run of more than kChunk occurrences: its chunk sums, `count` <= kChunk of them, D floats each.
struct LongRun {
  int64_t run;  // index over all tables
  const float* partials;
  int64_t count;
};

// A chunk of a long run to be summed into `out`: occurrences [first, first + count) of RunArgs::sorted at the first
// level, `count` rows of floats starting at `partials` at higher levels.
struct ChunkSum {
  const TableRuns* table;
  int64_t first;
  const float* partials;
  int64_t count;
  float* out;
};

struct RunArgs {
  Bags bags;
  const Part* parts;
  const uint8_t* weights;  // values before the update, read for products only
  const uint64_t* sorted;  // row in its table << payload_bits | payload
  int payload_bits;
  int64_t first_id;           // position of the first bag's first id, payload 0 if payloads are not bags
  const uint32_t* bag_of;     // payload -> bag; null: the payload is the bag
  const float* coefficients;  // payload -> coefficient; null: 1
  const float* grad;
  int64_t output_dim;
  const LongRun* long_runs;
  int64_t num_long_runs;
  float inverse_scale;  // 1 / grad_scale, applied to row gradients
  int64_t product_dim;  // columns of the widest multiplied table; 0: none
};

// Destination of row gradients. Only the fields that the chosen kernel reads are set.
struct RowTarget {
  uint8_t* weights;  // updated in place, or the gradient tensor to write
  Update update;
  int64_t* rows;         // row index of each run of a sparse gradient; null for a dense one
  RowRounding rounding;  // for encoded rows; the shard of its noise is set per table
  CacheView cache;
  int64_t* slots;  // with a cache: scratch for the slot of each run, over all tables
};

// Updated rows are buffered and encoded in batches, which overlaps their latencies.
constexpr int64_t kBufferedRows = 16, kBufferedFloats = 2048;
inline int64_t buffered_rows(int64_t D) {
  const int64_t rows = kBufferedFloats / D;
  return rows < 1 ? 1 : (rows < kBufferedRows ? rows : kBufferedRows);
}
// Layout of a worker's scratch for runs of D columns, in floats: a row's gradient, its moments, the buffered rows.
inline int64_t scratch_moments(int64_t D) { return D; }
inline int64_t scratch_rows(int64_t D) { return scratch_moments(D) + 2 * D; }
inline int64_t scratch_floats(int64_t D) { return scratch_rows(D) + (D < kBufferedFloats ? kBufferedFloats : D); }

// Scratch floats for sums over a multiplied table: a row of ones, a decoded row, and kChunk computed terms.
inline int64_t scratch_factors(int64_t D) { return (kChunk + 2) * D; }

using FinishRuns = void (*)(const RunArgs&, const RowTarget&, const TableRuns&, float* scratch, int64_t begin,
                            int64_t end);

struct EmbeddingBagBackwardKernels {
  // Sums chunks [begin, end) of long runs into their `out`; `scratch` has scratch_factors(D) floats.
  void (*sum_chunks)(const RunArgs&, const ChunkSum*, float* scratch, int64_t begin, int64_t end);
  // Sums the short runs among [begin, end) of a multiplied table into its `sums`.
  void (*sum_runs)(const RunArgs&, const TableRuns&, float* scratch, int64_t begin, int64_t end);
  // Sum and finish runs [begin, end) of a table; `scratch` has scratch_floats(D) floats. `scaled` is SGD, or row-wise
  // Adagrad if Update::state.sum is set.
  FinishRuns store, scaled, elementwise;

  template <CpuIsa>
  static const EmbeddingBagBackwardKernels table;
};

}  // namespace rec_kernels
