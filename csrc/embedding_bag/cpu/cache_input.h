// Reads the tensors of a row cache into the plain structs of its kernels.
#pragma once

#include <vector>

#include "embedding_bag/cpu/input.h"
#include "row_cache/row_cache.h"

namespace rec_kernels {

// The checked places of a call's parts, and the memory of its cache.
struct CacheInput {
  std::vector<CachePlace> places;  // of the parts; empty: there is no cache
  CacheView view{};                // points into `places`
};

// The bags of one of the cache's own ops, whose layout is checked against the cache. `weights`: null where no row of a
// table is read.
BagInput read_bags(const CacheBags& bags, const Tensor* weights, const CacheArguments& cache, CacheUse use);

// The cache of a call whose layout has been checked against it. For CacheUse::kFind there are no cache_rows.
CacheInput read_cache(const CacheArguments& cache, const BagInput& in, CacheUse use = CacheUse::kUpdate);

// The rows that a lookup reads from slots: checked, so that kernels may follow them.
CachedPool read_cached_rows(const CachedRows& cache, const BagInput& in, const Tensor& values);

}  // namespace rec_kernels
