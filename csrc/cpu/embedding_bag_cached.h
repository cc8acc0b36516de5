// Lookups of features whose rows may lie in a row cache, for the kernels of one instruction set.
#pragma once

#include "cpu/embedding_bag.h"
#include "cpu/embedding_bag_encoded.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Pools bags [begin, end) of a feature of one part, whose offsets are known to be good: from the cache and the table;
// from the table alone.
void pool_cached(const PoolArgs& a, const Feature& f, int64_t begin, int64_t end, Sums sums, Bounds* bounds);
void pool_uncached(const PoolArgs& a, const Feature& f, int64_t begin, int64_t end, Sums sums, Bounds* bounds);

// The row of id i in the cache, or null.
RK_HOST_DEVICE const float* cached_row(const PoolArgs& a, const Feature& f, int64_t i) {
  if (!a.cache.slots || a.cache.slots[i] < 0) return nullptr;
  return a.cache.rows + (a.cache.parts[&f - a.features].cache_row_offset + a.cache.slots[i] * f.embedding_dim);
}

}  // namespace RK_ISA
}  // namespace rec_kernels
