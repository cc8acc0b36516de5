// Occurrences of ids in an embedding_bag call, sorted by row on the GPU, and the sum of a row's terms by a group of
// lanes. The host does not know the number of runs; grids are sized for the maximum.
#pragma once

#include "core/cuda/to_gpu.cuh"
#include "embedding_bag/cuda/input.cuh"

namespace rec_kernels {
inline namespace RK_ISA {

// Sort keys of entries: linear rows, in 32 bits if all rows and one larger key fit.
struct RowKeys {
  void* keys;
  bool wide;

  __device__ __forceinline__ int64_t operator[](int64_t entry) const {
    return wide ? static_cast<const int64_t*>(keys)[entry] : int64_t{static_cast<const uint32_t*>(keys)[entry]};
  }
  __device__ __forceinline__ void set(int64_t entry, int64_t row) const {
    if (wide) static_cast<int64_t*>(keys)[entry] = row;
    else static_cast<uint32_t*>(keys)[entry] = static_cast<uint32_t>(row);
  }
};

// Runs of the sorted entries. A run is the entries of one row. Long runs are split into chunks of at most kChunk
// entries. Short runs of multiplied tables also have a chunk, since their sums are needed before any row changes. The
// chunks of a run have consecutive indices, which may differ from call to call; no sum depends on them.
struct Runs {
  RowKeys keys;
  const uint32_t* payloads;       // per entry: its bag, or its id's position << part_bits | its part
  const uint32_t* bag_of;         // per position: the bag; null: the payload is the bag
  const float* coefficients;      // per position; null: 1
  const float* const* gradients;  // per payload: address of its gradient; null: computed from the bag
  uint32_t* starts;               // run r is entries [starts[r], starts[r + 1])
  uint32_t* first_chunks;         // per run with chunks: index of its first chunk
  uint32_t* owners;               // per chunk: its run
  uint32_t *num_runs, *num_chunks;
  int64_t most_runs, most_chunks;
  int part_bits;  // bits of a part's index within its feature

  __device__ __forceinline__ int64_t count(int64_t run) const { return starts[run + 1] - starts[run]; }
  __device__ __forceinline__ int64_t row(int64_t run) const { return keys[starts[run]]; }
  __device__ __forceinline__ uint32_t position(uint32_t payload) const { return payload >> part_bits; }
  __device__ __forceinline__ uint32_t bag(uint32_t payload) const {
    return bag_of ? bag_of[position(payload)] : payload;
  }
  // The part of the given feature that an entry belongs to.
  __device__ __forceinline__ int64_t part(const Bags& bags, int64_t feature, uint32_t payload) const {
    return bags.first_part(feature) + (payload & ((1u << part_bits) - 1));
  }
};

// The part that an entry belongs to.
__device__ __forceinline__ int64_t part_of_entry(const Runs& runs, const Bags& bags, uint32_t payload) {
  const uint32_t bag = runs.bag(payload);
  const int64_t feature = bags.starts ? bags.feature_of(bag) : bag / static_cast<uint32_t>(bags.batch);
  return runs.part(bags, feature, payload);
}

// The part of a run's first entry; all entries of a run belong to parts that read the same table.
__device__ __forceinline__ int64_t part_of_run(const Runs& runs, const Bags& bags, int64_t run) {
  return part_of_entry(runs, bags, runs.payloads[runs.starts[run]]);
}

// Gradient rows in flight per group, as in the forward. Two for wide rows: with four, a multiprocessor would hold one
// block instead of two, with as many bytes in flight. Kernels with per-element state hold one block anyway and keep
// four.
constexpr int kInFlight = 4;
template <int kBlocks>
constexpr int kGradientsInFlight = kBlocks == kMaxBlocks ? kInFlight / 2 : kInFlight;

// Conditions, known only on the device, that skip the update.
struct Skip {
  const int64_t *forward_status, *own_status;
  const float* found_inf;
  bool raise;

  __device__ bool bad(const int64_t* status) const {
    return status && *status != kNoBadPosition && (raise || *status < 0);
  }
  __device__ bool now() const { return (found_inf && *found_inf != 0.0f) || bad(forward_status) || bad(own_status); }
};

// Slots of runs whose rows are updated in a row cache.
struct CachedRuns {
  const int64_t* slots;  // per run, or -1; null: no cache
  bool hot;              // this launch finishes the rows in slots, else uncached rows of one format
};

struct SumArgs {
  Runs runs;
  Parts parts;
  const uint8_t* weights;  // values before the update, for products; null: no table is multiplied
  int format;              // format of the rows to finish or multiply, an index into parts.formats
  Bags bags;
  const float* grad;
  int64_t output_dim;
  const float* grad_scale;  // or null: 1
  Skip skip;
  float* partials;  // chunk sums, rows of max_dim floats
  int64_t max_dim;
  CachedRuns cache;

  // True if this launch finishes the run's row.
  __device__ __forceinline__ bool finishes(int64_t run, int64_t part) const {
    const int64_t slot = cache.slots ? cache.slots[run] : -1;
    return cache.hot ? slot >= 0 : slot < 0 && parts.has_format(part, format);
  }
  // The part of a row to finish; for a row in a slot, with a weight_offset that maps the row to the slot.
  __device__ __forceinline__ Part table_of(int64_t run, int64_t part, int64_t row) const {
    Part f = parts[part];
    if (!cache.hot) return f;
    const int64_t slot = cache.slots[run] - (row - f.row_offset);
    f.weight_offset = 4 * (parts.records[part].cache_row_offset + slot * f.embedding_dim);
    return f;
  }
  // Address of the gradient that an entry contributes to its row.
  __device__ __forceinline__ const float* gradient_of(uint32_t payload) const {
    if (runs.gradients) return runs.gradients[payload];
    const uint32_t bag = runs.bag(payload), batch = static_cast<uint32_t>(bags.batch);
    if (bags.starts) return grad + int64_t{bag} * output_dim;
    return grad + int64_t{bag % batch} * output_dim + parts[bag / batch].output_offset;
  }
  // Coefficient of that gradient.
  __device__ __forceinline__ float coefficient_of(uint32_t payload) const {
    return runs.coefficients ? runs.coefficients[runs.position(payload)] : 1.0f;
  }
};

// sum += c * x with one rounding; exact addition of x if c is 1.
template <int kBlocks>
__device__ __forceinline__ void add_term(Vec4 (&sum)[kBlocks], const Vec4 (&x)[kBlocks], float c) {
#pragma unroll
  for (int k = 0; k < kBlocks; ++k)
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[k].v[j] = fused_multiply_add(c, x[k].v[j], sum[k].v[j]);
}

// The terms of a row's gradient, count <= kChunk: the gradients of its bags, each times a coefficient, or chunk sums.
struct Terms {
  const float* row;   // first term
  float coefficient;  // of the first term
  uint32_t first;     // first entry
  uint32_t count : 31, summed : 1;

  // `payload`: of the first entry.
  __device__ __forceinline__ static Terms of_entries(const SumArgs& a, uint32_t payload, uint32_t first,
                                                     uint32_t count) {
    return {a.gradient_of(payload), a.coefficient_of(payload), first, count, 0};
  }
  __device__ __forceinline__ static Terms of_sums(const float* row, uint32_t count) { return {row, 1.0f, 0, count, 1}; }
};

// Sums terms with groups in step; groups without terms take part with D = 0. Each lane computes the addresses of some
// of the next rows, and all lanes of the group read each row together.
template <int G, int kBlocks, int kRows = kGradientsInFlight<kBlocks>>
struct TermSum {
  static constexpr int kOfLane = kRows < G ? 1 : kRows / G, kRound = G * kOfLane;  // rows
  const SumArgs& a;
  const Group<G>& group;
  const Terms& terms;
  int64_t D;

  __device__ __forceinline__ void operator()(int64_t column, Vec4 (&sum)[kBlocks]) const {
    const bool weighted = a.runs.coefficients != nullptr, summed = terms.summed;
    const int count = terms.count, most = static_cast<int>(group.most_of_groups(terms.count));
    uint32_t payloads[kOfLane] = {};
    load_payloads(1, payloads);
    load_row(terms.row, column, D, rows_aligned(terms.row, D), group, sum);
    if (weighted) {
#pragma unroll
      for (int k = 0; k < kBlocks; ++k)
        for (int j = 0; j < 4; ++j) sum[k].v[j] = terms.coefficient * sum[k].v[j];
    }
    for (int begin = 1; begin < most; begin += kRound) {
      const float* own[kOfLane];
      float c[kOfLane];
#pragma unroll
      for (int p = 0; p < kOfLane; ++p) {
        const int i = begin + p * G + group.lane;
        own[p] = terms.row;
        c[p] = 1.0f;
        if (i >= count) continue;
        if (summed) own[p] += i * a.max_dim;
        else own[p] = a.gradient_of(payloads[p]);
        if (weighted && !summed) c[p] = a.coefficient_of(payloads[p]);
      }
      load_payloads(begin + kRound, payloads);  // the next round's payloads load during this round's gradients
      add(column, most - begin, count - begin, own, c, sum);
    }
  }

 private:
  // Loads the payloads of the terms from `begin` on.
  __device__ __forceinline__ void load_payloads(int begin, uint32_t (&payloads)[kOfLane]) const {
#pragma unroll
    for (int p = 0; p < kOfLane; ++p) {
      const int i = begin + p * G + group.lane;
      if (i < terms.count && !terms.summed) payloads[p] = a.runs.payloads[terms.first + i];
    }
  }
  // Adds the rows of a round with kRows in flight: `left` remain in this group, `most` in the longest group in step.
  __device__ __forceinline__ void add(int64_t column, int most, int left, const float* (&own)[kOfLane],
                                      const float (&c)[kOfLane], Vec4 (&sum)[kBlocks]) const {
    const int here = most < kRound ? most : kRound;
#pragma unroll 1
    for (int next = 0; next < here; next += kRows) {
      float factor[kRows];
      Vec4 x[kRows][kBlocks];
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const int lane = kOfLane > 1 ? u % G : next + u, place = kOfLane > 1 ? u / G : 0;
        const float* row = group.broadcast(own[place], lane);
        factor[u] = a.runs.coefficients ? group.broadcast(c[place], lane) : 1.0f;
        if (next + u < left) load_row(row, column, D, rows_aligned(row, D), group, x[u]);
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u)
        if (next + u < left) add_term(sum, x[u], factor[u]);
    }
  }
};

}  // namespace RK_ISA

// Sorted runs and the memory that they point to.
struct SortedOccurrences {
  Runs runs;
  DeviceMemory memory;
};

// Records bad ids and offsets in `status`.
SortedOccurrences sort_occurrences(const BagInput& in, int64_t* status, const Tensor& grad, cudaStream_t stream);

// Computes the chunk sums of the multiplied tables of one format: gradients times the rows of the other parts. Launched
// before any row is updated.
void launch_product_sums(const SumArgs& args, cudaStream_t stream);

}  // namespace rec_kernels
