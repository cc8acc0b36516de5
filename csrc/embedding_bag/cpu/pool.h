// Pools bags for one instruction set, from any source of rows.
//
// A bag's columns are pooled in blocks of registers: sums stay in registers over the whole bag, rows are prefetched a
// fixed number of ids ahead (also across bags), and a row is read exactly once.
#pragma once

#include "embedding_bag/cpu/bag_loop.h"
#include "rows/cpu/blocks.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Destination of bags' sums: D floats each, `stride` floats apart.
struct Sums {
  float* first;
  int64_t stride;
};

// Bags [begin, end) of one feature, whose offsets are known to be good.
struct PooledBags {
  const Bags* bags;
  int64_t begin, end;  // of all F * B
  bool mean;
  bool one_id;  // each has one
  Sums sums;
  Bounds* bounds;

  int64_t first_id() const { return bags->offset(begin); }
  int64_t num_ids() const { return bags->offset(end) - first_id(); }
  PooledBags some(int64_t from, int64_t to) const {
    return {bags, from, to, mean, one_id, {sums.first + (from - begin) * sums.stride, sums.stride}, bounds};
  }
};

// Rows that are found at once, of all parts of some ids; a longer bag has memory of its own.
constexpr int64_t kMapped = 4096;

// A few bags at a time, of `most` ids unless one alone has more: body(these bags, room for `parts` Items of each id).
// `most` times `parts` is at most kMapped.
template <class Item, class Body>
void for_few_bags(const PooledBags& k, int64_t most, int64_t parts, const Body& body) {
  Item reserved[kMapped];
  for (int64_t begin = k.begin; begin < k.end;) {
    int64_t end = k.end - begin < most ? k.end : begin + most;
    while (end > begin + 1 && k.some(begin, end).num_ids() > most) end = begin + (end - begin) / 2;
    const PooledBags few = k.some(begin, end);
    const int64_t count = few.num_ids();
    Item* items = count <= most ? reserved : new Item[static_cast<uint64_t>(count * parts)];
    body(few, items);
    if (items != reserved) delete[] items;
    begin = end;
  }
}

// Kinds of bags that kernels are compiled for.
enum class BagKind {
  kOneId,     // each has one id, without a weight
  kPlain,     // ids have no weights
  kWeighted,  // ids have weights
  kAny        // nothing
};

inline BagKind kind_of(const PooledBags& k) {
  if (k.bags->per_sample_weights) return BagKind::kWeighted;
  return k.one_id ? BagKind::kOneId : BagKind::kPlain;
}

// Pools a block of columns. A source (embedding_bag/cpu/sources.h) knows whether id i counts, its row, and the columns
// of a row, in `kSteps` steps of one or more registers. Arguments are copies: a store through a pointer could change
// the originals as far as a compiler knows. Not inlined: callers take registers that the loops need.
template <BagKind kKind, class Source>
__attribute__((noinline)) void pool_block(const PooledBags k, const Source source) {
  using Step = typename Source::Step;
  constexpr int kSteps = Source::kSteps;
  constexpr bool kWeighted = kKind == BagKind::kWeighted || kKind == BagKind::kAny;
  const Bags bags = *k.bags;
  const float* factors = bags.per_sample_weights;
  const int64_t last = bags.offset(k.end), ahead = source.ahead();
  Bounds repeated;  // of ids that the first block of columns has noted
  Bounds* bounds = source.column() == 0 ? k.bounds : &repeated;
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
      // A factor of 1 changes no bit of a sum. A sum of one row is one, too: -0 becomes +0.
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
