// Sums of row gradients over the sorted occurrences of a table.
#pragma once

#include "embedding_bag/cpu/backward.h"
#include "embedding_bag/cpu/pool_composed.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Terms of a sum are indexed: load(i, column, tail, x) reads columns of term i, coefficient(i) is its weight if
// kWeighted, and prefetch(i, column) prefetches a later term.

// sum[] = columns [column, column + NV * W) of terms [first, first + count), added in ascending order.
template <int NV, bool kTail, class Terms>
RK_HOST_DEVICE void sum_columns(const Terms& terms, int64_t first, int64_t count, int64_t column, int tail, Vec* sum) {
  constexpr bool kWeighted = Terms::kWeighted;
  terms.template prefetch<NV>(first, column);
  terms.template load<NV, kTail>(first, column, tail, sum);
  if (kWeighted)
    for (int v = 0; v < NV; ++v) sum[v] = Vec::broadcast(terms.coefficient(first)) * sum[v];
  for (int64_t i = first + 1; i < first + count; ++i) {
    terms.template prefetch<NV>(i, column);
    Vec x[NV];
    terms.template load<NV, kTail>(i, column, tail, x);
    const Vec c = Vec::broadcast(kWeighted ? terms.coefficient(i) : 1.0f);
    for (int v = 0; v < NV; ++v) sum[v] = kWeighted ? fused_multiply_add(c, x[v], sum[v]) : sum[v] + x[v];
  }
}

// Body of for_blocks: sums one block of columns of terms [first, first + count) into out [D].
template <class Terms>
struct SumInto {
  Terms terms;
  int64_t first, count;
  float* out;

  template <int NV, bool kTail>
  RK_HOST_DEVICE void block(int64_t column, int tail) const {
    Vec sum[NV];
    sum_columns<NV, kTail>(terms, first, count, column, tail, sum);
    store_columns<NV, kTail>(sum, out + column, tail);
  }
};

inline int64_t payload_of(const RunArgs& a, int64_t entry) {
  return static_cast<int64_t>(a.sorted[entry] & ((uint64_t{1} << a.payload_bits) - 1));
}

inline uint32_t bag_of(const RunArgs& a, int64_t payload) {
  return a.bag_of ? a.bag_of[payload] : static_cast<uint32_t>(payload);
}

// The part of a bag's feature that reads the table, and the bag's gradient in that part's columns.
struct BagPlace {
  const Part* part;
  const float* gradient;
};

__attribute__((noinline)) inline BagPlace place_in_shared_table(const RunArgs& a, const TableRuns& table,
                                                                uint32_t bag) {
  const Part* f = a.parts + a.bags.first_part(a.bags.feature_of(bag));
  for (; f->row_offset != table.part->row_offset || f->num_embeddings == 0; ++f) continue;
  return {f, a.bags.row_of(bag, f->feature, a.grad, a.output_dim) + f->output_offset};
}

RK_HOST_DEVICE BagPlace place_of(const RunArgs& a, const TableRuns& table, uint32_t bag) {
  const int64_t number = bag - table.first_bag;
  if (static_cast<uint64_t>(number) < static_cast<uint64_t>(table.num_bags))
    return {table.part, table.gradients + number * a.output_dim};
  return place_in_shared_table(a, table, bag);
}

// Prefetch distance in terms. Occurrences are sorted by row, so their bags are in random order.
constexpr int64_t kTermsAhead = 24;

// Gradients of a table's sorted occurrences up to `end`. Members are copies, which stores to the sums cannot alias.
template <bool kIsWeighted>
struct SortedTerms {
  static constexpr bool kWeighted = kIsWeighted;  // payloads are positions of ids, which may have coefficients
  const uint64_t* sorted;
  uint64_t payload_mask;
  const uint32_t* bags;
  const float* coefficients;
  const float* gradients;
  int64_t first_bag, num_bags, stride, end;
  const RunArgs* args;
  const TableRuns* table;

  SortedTerms(const RunArgs& a, const TableRuns& runs, int64_t last)
      : sorted(a.sorted),
        payload_mask((uint64_t{1} << a.payload_bits) - 1),
        bags(a.bag_of),
        coefficients(a.coefficients),
        gradients(runs.gradients),
        first_bag(runs.first_bag),
        num_bags(runs.num_bags),
        stride(a.output_dim),
        end(last),
        args(&a),
        table(&runs) {}

  RK_HOST_DEVICE const float* row(int64_t i) const {
    const auto payload = static_cast<int64_t>(sorted[i] & payload_mask);
    const int64_t bag = kWeighted ? int64_t{bags[payload]} : payload, number = bag - first_bag;
    if (__builtin_expect(static_cast<uint64_t>(number) < static_cast<uint64_t>(num_bags), 1))
      return gradients + number * stride;
    return place_in_shared_table(*args, *table, static_cast<uint32_t>(bag)).gradient;
  }
  template <int NV, bool kTail>
  RK_HOST_DEVICE void load(int64_t i, int64_t column, int tail, Vec* x) const {
    load_row<NV, kTail>(row(i) + column, tail, x);
  }
  RK_HOST_DEVICE float coefficient(int64_t i) const {
    return coefficients ? coefficients[sorted[i] & payload_mask] : 1.0f;
  }
  template <int NV>
  RK_HOST_DEVICE void prefetch(int64_t i, int64_t column) const {
    if (__builtin_expect(i + kTermsAhead < end, 1)) prefetch_bytes(row(i + kTermsAhead) + column, NV * W * 4);
  }
};

// Gradients of a table's occurrences, times the rows of the ids in TableRuns::other.
struct SortedProducts {
  static constexpr bool kWeighted = true;
  SortedTerms<true> gradients;
  const void* ids;  // indexed by payload
  bool ids64, partitioned, far;
  Partition partition;
  const float* factors;
  int64_t D;

  SortedProducts(const RunArgs& a, const TableRuns& runs, int64_t last)
      : gradients(a, runs, last),
        ids(static_cast<const uint8_t*>(a.bags.ids) + a.first_id * (a.bags.ids64 ? 8 : 4)),
        ids64(a.bags.ids64),
        partitioned(runs.other->partitioned),
        far(exceeds_cache(*runs.other)),
        partition(runs.other->partition),
        factors(reinterpret_cast<const float*>(a.weights + runs.other->weight_offset)),
        D(runs.other->embedding_dim) {}

  RK_HOST_DEVICE const float* factor(int64_t i) const {
    const auto payload = gradients.sorted[i] & gradients.payload_mask;
    const int64_t id = ids64 ? static_cast<const int64_t*>(ids)[payload] : static_cast<const int32_t*>(ids)[payload];
    return factors + (partitioned ? partition.row(id) : id) * D;
  }
  template <int NV, bool kTail>
  RK_HOST_DEVICE void load(int64_t i, int64_t column, int tail, Vec* x) const {
    Vec own[NV];
    gradients.load<NV, kTail>(i, column, tail, x);
    load_row<NV, kTail>(factor(i) + column, tail, own);
    for (int v = 0; v < NV; ++v) x[v] = x[v] * own[v];
  }
  RK_HOST_DEVICE float coefficient(int64_t i) const { return gradients.coefficient(i); }
  template <int NV>
  RK_HOST_DEVICE void prefetch(int64_t i, int64_t column) const {
    gradients.prefetch<NV>(i, column);
    if (far && __builtin_expect(i + kTermsAhead < gradients.end, 1))
      prefetch_bytes(factor(i + kTermsAhead) + column, NV * W * 4);
  }
};

// Consecutive rows of D floats.
struct RowsInMemory {
  static constexpr bool kWeighted = false;
  const float* rows;
  int64_t D;

  RK_HOST_DEVICE const float* row(int64_t i) const { return rows + i * D; }
  template <int NV, bool kTail>
  RK_HOST_DEVICE void load(int64_t i, int64_t column, int tail, Vec* x) const {
    load_row<NV, kTail>(row(i) + column, tail, x);
  }
  RK_HOST_DEVICE static float coefficient(int64_t) { return 1.0f; }
  template <int NV>
  RK_HOST_DEVICE static void prefetch(int64_t, int64_t) {}
};

}  // namespace RK_ISA
}  // namespace rec_kernels
