// Lookups of features with a row cache, for the kernels of one instruction set.
#pragma once

#include "embedding_bag/cpu/pool.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Pools bags of a feature of one part from the cache and its table. Returns false without pooling if no row is cached.
bool pool_cached(const PoolArgs& a, const Part& f, const PooledBags& k);

// The cached row of ids[i], or null.
RK_HOST_DEVICE const float* cached_row(const PoolArgs& a, const Part& f, int64_t i) {
  if (!a.cache.slots || a.cache.slots[i] < 0) return nullptr;
  return a.cache.rows + (a.records[&f - a.parts].cache_row_offset + a.cache.slots[i] * f.embedding_dim);
}

}  // namespace RK_ISA
}  // namespace rec_kernels
