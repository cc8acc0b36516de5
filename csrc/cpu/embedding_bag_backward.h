// Plain-pointer backward kernels of embedding_bag: row gradients summed in the order of docs/numerics.md and handed to
// what uses them, one table of kernels per instruction set.
#pragma once

#include "cpu/embedding_bag.h"

namespace rec_kernels {

// Occurrences of a row are summed in chunks of this many; part of the numerics, not a tuning knob.
constexpr int64_t kChunk = 64;

// A run of more than kChunk occurrences: its chunk sums, `count` <= kChunk of them, D floats each.
struct LongRun {
  int64_t run;
  const float* partials;
  int64_t count;
};

// A chunk of a long run to be summed into `out`: occurrences [first, first + count) of `sorted`, or, above the first
// level, `count` rows of `embedding_dim` floats from `partials`.
struct ChunkSum {
  int64_t first;
  const float* partials;
  int64_t count;
  int64_t embedding_dim;
  float* out;
};

struct RunArgs {
  const Feature* features;
  const uint64_t* sorted;  // linear row << payload_bits | payload
  int payload_bits;
  const uint32_t* bag_of;     // payload -> bag; null: the payload is the bag
  const float* coefficients;  // payload -> coefficient; null: 1
  int64_t batch;
  const float* grad;
  int64_t output_dim;
  const int64_t* starts;  // run r is entries [starts[r], starts[r + 1]) of `sorted`: one row's occurrences
  const LongRun* long_runs;
  int64_t num_long_runs;
  float inverse_scale;  // gradients are multiplied by it before use
};

// Where finished row gradients go. The fields of the one that runs are set.
struct RowTarget {
  float* weights;  // updated in place, or receives the dense gradient
  float* sum;      // row-wise Adagrad state
  float lr;
  float eps;
  int64_t* rows;              // sparse: linear row of each run
  const int64_t* grad_start;  // sparse, per feature: where run 0 of the numbering would put its gradient
};

struct EmbeddingBagBackwardKernels {
  // Sums chunks [begin, end) of long runs into their `out`.
  void (*sum_chunks)(const RunArgs&, const ChunkSum*, int64_t begin, int64_t end);
  // Sum and finish runs [begin, end); `scratch` holds the widest row, in floats.
  void (*dense)(const RunArgs&, const RowTarget&, float* scratch, int64_t begin, int64_t end);
  void (*sparse)(const RunArgs&, const RowTarget&, float* scratch, int64_t begin, int64_t end);
  void (*sgd)(const RunArgs&, const RowTarget&, float* scratch, int64_t begin, int64_t end);
  void (*rowwise_adagrad)(const RunArgs&, const RowTarget&, float* scratch, int64_t begin, int64_t end);

  template <CpuIsa>
  static const EmbeddingBagBackwardKernels table;
};

}  // namespace rec_kernels
