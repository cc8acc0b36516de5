// The terms of row gradients: where the gradients of a table's sorted occurrences lie, and their sums.
#pragma once

#include "embedding_bag/cpu/backward.h"
#include "rows/cpu/blocks.h"

namespace rec_kernels {
inline namespace RK_ISA {

// The terms of one sum: rows of floats, each with a coefficient; without coefficients, all are 1.
struct Terms {
  const float* const* rows;
  const float* coefficients;
  int64_t count;
};

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
  if (t.coefficients) sum_block<NV, kTail, true>(t, column, tail, sum);
  else sum_block<NV, kTail, false>(t, column, tail, sum);
}

// for_blocks: sums the terms into out[0..D).
struct SumInto {
  const Terms& terms;
  float* out;

  template <int NV, bool kTail>
  RK_HOST_DEVICE void block(int64_t column, int tail) const {
    Vec sum[NV];
    sum_columns<NV, kTail>(terms, column, tail, sum);
    store_columns<NV, kTail>(sum, out + column, tail);
  }
};

inline int64_t payload_of(const RunArgs& a, int64_t entry) {
  return static_cast<int64_t>(a.sorted[entry] & ((uint64_t{1} << a.payload_bits) - 1));
}

inline uint32_t bag_of(const RunArgs& a, int64_t payload) {
  return a.bag_of ? a.bag_of[payload] : static_cast<uint32_t>(payload);
}

inline int64_t key_of(const RunArgs& a, int64_t entry) {
  return static_cast<int64_t>(a.sorted[entry] >> a.payload_bits);
}

// The part of the bag's feature that reads the table, and the gradient of its columns of the bag.
struct BagPlace {
  const Part* part;
  const float* gradient;
};

inline BagPlace place_in_shared_table(const RunArgs& a, const TableRuns& table, uint32_t bag) {
  const Part* f = a.parts + a.bags.first_part(a.bags.feature_of(bag));
  for (; f->row_offset != table.part->row_offset || f->num_embeddings == 0; ++f) continue;
  return {f, a.bags.row_of(bag, f->number, a.grad, a.output_dim) + f->output_offset};
}

RK_HOST_DEVICE BagPlace place_of(const RunArgs& a, const TableRuns& table, uint32_t bag) {
  const int64_t number = bag - table.first_bag;
  if (static_cast<uint64_t>(number) < static_cast<uint64_t>(table.num_bags))
    return {table.part, table.gradients + number * a.output_dim};
  return place_in_shared_table(a, table, bag);
}

// The terms of a table's occurrences, which are asked for in ascending order. Sorted by row, bags come in no order: the
// gradients of kTermsAhead occurrences to come are on their way.
class TermsInOrder {
 public:
  // Up to occurrence `end` of RunArgs::sorted.
  TermsInOrder(const RunArgs& a, const TableRuns& table, int64_t end)
      : a_(a), table_(table), bytes_(table.part->embedding_dim * 4), end_(end) {}

  // Occurrences [first, first + count), count <= kChunk. They stay until the next call.
  Terms take(int64_t first, int64_t count) {
    if (first + count + kTermsAhead > first_ + kHeld) move_to(first);
    const int64_t wanted = first + count + kTermsAhead;
    find(wanted < end_ ? wanted : end_);
    return {rows_ + (first - first_), a_.coefficients ? coefficients_ + (first - first_) : nullptr, count};
  }

 private:
  static constexpr int64_t kTermsAhead = 16, kHeld = 4 * kChunk;

  void find(int64_t end) {
    for (; found_ < end; ++found_) {
      const int64_t payload = payload_of(a_, found_), i = found_ - first_;
      rows_[i] = place_of(a_, table_, bag_of(a_, payload)).gradient;
      prefetch_bytes(rows_[i], bytes_);
      if (a_.coefficients) coefficients_[i] = a_.coefficients[payload];
    }
  }
  // Makes room: what lies before `first` is done with.
  void move_to(int64_t first) {
    const int64_t done = first - first_, kept = found_ - first;
    for (int64_t i = 0; i < kept; ++i) {
      rows_[i] = rows_[i + done];
      if (a_.coefficients) coefficients_[i] = coefficients_[i + done];
    }
    first_ = first;
    if (kept < 0) found_ = first;
  }

  const RunArgs& a_;
  const TableRuns& table_;
  int64_t bytes_, end_;
  int64_t first_ = -kHeld, found_ = -1;  // those of [first_, found_) are here
  const float* rows_[kHeld];
  float coefficients_[kHeld];
};

// Rows of floats that lie one after the other.
class TermsOfPartials {
 public:
  // `count` <= kChunk rows of D.
  Terms take(const float* partials, int64_t count, int64_t D) {
    for (int64_t i = 0; i < count; ++i) rows_[i] = partials + i * D;
    return {rows_, nullptr, count};
  }

 private:
  const float* rows_[kChunk];
};

}  // namespace RK_ISA
}  // namespace rec_kernels
