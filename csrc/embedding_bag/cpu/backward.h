// Plain-pointer backward kernels of embedding_bag: row gradients summed in the order of docs/numerics.md and handed to
// what uses them, one table of kernels per instruction set.
#pragma once

#include "embedding_bag/cpu/forward.h"
#include "row_cache/places.h"
#include "rows/cpu/row_formats.h"
#include "rows/optimizers/update.h"

namespace rec_kernels {

// The runs of a table: each is one row's occurrences.
struct TableRuns {
  const Part* part;             // the first part that reads the table
  int64_t first_bag, num_bags;  // of that part's feature
  const float* gradients;       // of its columns: that of the first bag, and on from there RunArgs::output_dim apart
  const int64_t* starts;        // run r is entries [starts[r], starts[r + 1]) of RunArgs::sorted
  int64_t num_runs;
  int64_t first_run;    // runs of the tables before
  int64_t first_float;  // floats of row gradients of the tables before
  bool multiplied;      // with rows of other tables
  const Part* other;    // the one part that this is multiplied with, of floats; null where several parts read the
                        // table or there are more than two
  float* sums;          // [num_runs, D] gradients of the runs that are not long, where they are known already; or null
};

// A run of more than kChunk occurrences: its chunk sums, `count` <= kChunk of them, D floats each.
struct LongRun {
  int64_t run;  // counted over all tables
  const float* partials;
  int64_t count;
};

// A chunk of a long run to be summed into `out`: occurrences [first, first + count) of RunArgs::sorted, or, above the
// first level, `count` rows of floats from `partials`.
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
  const uint8_t* weights;  // as they were; for multiplied tables
  const uint64_t* sorted;  // row of its table << payload_bits | payload
  int payload_bits;
  int64_t first_id;           // of the first bag: payload 0 where payloads are not bags
  const uint32_t* bag_of;     // payload -> bag; null: the payload is the bag
  const float* coefficients;  // payload -> coefficient; null: 1
  const float* grad;
  int64_t output_dim;
  const LongRun* long_runs;
  int64_t num_long_runs;
  float inverse_scale;  // gradients are multiplied by it before use
  int64_t product_dim;  // columns of the widest multiplied table; 0: there is none
};

// Destination of finished row gradients. Only the fields of the target in use are set.
struct RowTarget {
  uint8_t* weights;  // updated in place, or receives the gradient
  Update update;
  int64_t* rows;         // row of each run of sparse gradients; null for dense ones
  RowRounding rounding;  // of encoded rows; the noise's table is the feature's
  CacheView cache;
  int64_t* slots;  // of the rows of all tables' runs, with a cache: found where runs are finished
};

// Updated rows that wait for each other, so that they are encoded together: the work of one fills the pauses of
// another.
constexpr int64_t kRowsHeld = 16, kFloatsHeld = 2048;
inline int64_t rows_held(int64_t D) {
  const int64_t rows = kFloatsHeld / D;
  return rows < 1 ? 1 : (rows < kRowsHeld ? rows : kRowsHeld);
}
// Scratch memory for finishing runs of up to D columns, in floats: a row's gradient, its moments, the rows that wait.
inline int64_t scratch_moments(int64_t D) { return D; }
inline int64_t scratch_held(int64_t D) { return scratch_moments(D) + 2 * D; }
inline int64_t scratch_floats(int64_t D) { return scratch_held(D) + (D < kFloatsHeld ? kFloatsHeld : D); }

// Scratch floats for sums over a multiplied table: a row of ones, another row, and terms that are not in memory.
inline int64_t scratch_factors(int64_t D) { return (kChunk + 2) * D; }

using FinishRuns = void (*)(const RunArgs&, const RowTarget&, const TableRuns&, float* scratch, int64_t begin,
                            int64_t end);

struct EmbeddingBagBackwardKernels {
  // Sums chunks [begin, end) of long runs into their `out`; `scratch` is scratch_factors(D) floats.
  void (*sum_chunks)(const RunArgs&, const ChunkSum*, float* scratch, int64_t begin, int64_t end);
  // Sums the short runs among [begin, end) of a multiplied table into its `sums`.
  void (*sum_runs)(const RunArgs&, const TableRuns&, float* scratch, int64_t begin, int64_t end);
  // Sum and finish runs [begin, end) of a table; `scratch` is scratch_floats(D) floats. `scaled`: SGD, or row-wise
  // Adagrad, if it has state.
  FinishRuns store, scaled, elementwise;

  template <CpuIsa>
  static const EmbeddingBagBackwardKernels table;
};

}  // namespace rec_kernels
