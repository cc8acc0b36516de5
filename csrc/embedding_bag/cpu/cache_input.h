// Converts the tensors of a row cache into the plain structs of its kernels.
#pragma once

#include <vector>

#include "embedding_bag/cpu/input.h"
#include "row_cache/row_cache.h"

namespace rec_kernels {

// The checked cache locations of a call's parts, and views of the cache's tensors.
struct CacheInput {
  std::vector<CachePlace> places;  // per part; empty: no cache
  CacheView view{};                // points into `places`
};

// Checks the bags of an op of the cache itself, and the layout against the cache. `weights` is null if no table row is
// read.
BagInput read_bags(const CacheBags& bags, const Tensor* weights, const CacheArguments& cache, CacheUse use);

// Reads the cache of a call whose layout has been checked against it. CacheUse::kFind sets only tags and marks.
CacheInput read_cache(const CacheArguments& cache, const BagInput& in, CacheUse use = CacheUse::kUpdate);

// Checks the slots that a lookup reads from, so that kernels may dereference them.
CachedPool read_cached_rows(const CachedRows& cache, const BagInput& in, const Tensor& values);

}  // namespace rec_kernels
