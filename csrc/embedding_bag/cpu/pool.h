// Pooling loop of one instruction set, generic over the source of rows.
//
// Columns are pooled in blocks: the sums of a block stay in registers over the whole bag, rows are prefetched a fixed
// number of ids ahead (also across bags), and each row is read exactly once.
#pragma once

#include "embedding_bag/cpu/bag_loop.h"
#include "rows/cpu/blocks.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Destination of pooled bags: D floats each, `stride` floats apart.
struct Sums {
  float* first;
  int64_t stride;
};

// Bags [begin, end) of one feature, with validated offsets.
struct PooledBags {
  const Bags* bags;
  int64_t begin, end;  // counted over all features
  bool mean;
  bool one_id;  // every bag has exactly one id
  Sums sums;
  Bounds* bounds;

  int64_t first_id() const { return bags->offset(begin); }
  int64_t num_ids() const { return bags->offset(end) - first_id(); }
  PooledBags some(int64_t from, int64_t to) const {
    return {bags, from, to, mean, one_id, {sums.first + (from - begin) * sums.stride, sums.stride}, bounds};
  }
};

// Capacity of the stack buffer of a batch, in rows of all parts; a longer bag allocates.
constexpr int64_t kBatchRows = 4096;

// Calls body(bags, items) for batches of bags of at most `most` ids, or a single longer bag; `items` has room for
// `parts` Items per id. most * parts <= kBatchRows.
template <class Item, class Body>
void for_bag_batches(const PooledBags& k, int64_t most, int64_t parts, const Body& body) {
  Item reserved[kBatchRows];
  for (int64_t begin = k.begin; begin < k.end;) {
    int64_t end = k.end - begin < most ? k.end : begin + most;
    while (end > begin + 1 && k.some(begin, end).num_ids() > most) end = begin + (end - begin) / 2;
    const PooledBags batch = k.some(begin, end);
    const int64_t count = batch.num_ids();
    Item* items = count <= most ? reserved : new Item[static_cast<uint64_t>(count * parts)];
    body(batch, items);
    if (items != reserved) delete[] items;
    begin = end;
  }
}

// Kinds of bags that have their own kernel.
enum class BagKind {
  kOneId,     // exactly one id per bag, no weights
  kPlain,     // no weights
  kWeighted,  // weights
  kAny        // all of the above, decided at run time
};

inline BagKind kind_of(const PooledBags& k) {
  if (k.bags->per_sample_weights) return BagKind::kWeighted;
  return k.one_id ? BagKind::kOneId : BagKind::kPlain;
}

// Pools a block of columns. A source (embedding_bag/cpu/sources.h) tells whether ids[i] contributes, finds its row and
// reads the row's columns in kSteps steps of one or more registers. Arguments are passed by value, since stores to the
// output might alias the originals. Not inlined, which leaves all registers to the loops.
template <BagKind kKind, class Source>
__attribute__((noinline)) void pool_block(const PooledBags k, const Source source) {
  using Step = typename Source::Step;
  constexpr int kSteps = Source::kSteps;
  constexpr bool kWeighted = kKind == BagKind::kWeighted || kKind == BagKind::kAny;
  const Bags bags = *k.bags;
  const float* factors = bags.per_sample_weights;
  const int64_t last = bags.offset(k.end), ahead = source.ahead();
  Bounds ignored;  // bad ids are already reported by the first block of columns
  Bounds* bounds = source.column() == 0 ? k.bounds : &ignored;
  float* out = k.sums.first + source.column();
  int64_t i = bags.offset(k.begin);
  for (int64_t first = i; first < last && first < i + ahead; ++first) source.prefetch(first);
  for (int64_t bag = k.begin; bag < k.end; ++bag, out += k.sums.stride) {
    const int64_t stop = kKind == BagKind::kOneId ? i + 1 : bags.offset(bag + 1);
    int64_t counted = stop - i;
    Step sum[kSteps];
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) sum[s] = Step::broadcast(0.0f);
    for (; i < stop; ++i) {
      if (__builtin_expect(i + ahead < last, 1)) source.prefetch(i + ahead);
      if (__builtin_expect(!source.counts(i), 0)) {
        if (source.out_of_range(i)) note_bad(bounds, i);
        --counted;
        continue;
      }
      const auto row = source.row(i);
      // A factor of 1 changes no bit of a sum. A single row is also added to 0, which turns -0 into +0.
      const Step factor = Step::broadcast(kWeighted && (kKind == BagKind::kWeighted || factors) ? factors[i] : 1.0f);
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s) {
        const Step x = source.read(row, s);
        sum[s] = kWeighted ? fused_multiply_add(factor, x, sum[s]) : sum[s] + x;
      }
    }
    if (kKind != BagKind::kOneId && k.mean && counted > 1) {
      const Step n = Step::broadcast(static_cast<float>(counted));
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s) sum[s] = sum[s] / n;
    }
    source.store(sum, out);
  }
}

}  // namespace RK_ISA
}  // namespace rec_kernels
