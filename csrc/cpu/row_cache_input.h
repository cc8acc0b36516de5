// From the tensors of a row cache to the plain structs that kernels read.
#pragma once

#include <vector>

#include "cpu/embedding_bag_input.h"
#include "ops/row_cache.h"

namespace rec_kernels {

// The checked places of a call's parts, and the memory of its cache.
struct CacheInput {
  std::vector<CachePlace> places;  // of the parts; empty: there is no cache
  CacheView view{};                // points into `places`
};

// Throws where tables' places exclude each other or lie outside of the cache. For CacheUse::kFind there
// are no cache_rows and cache_offsets.
CacheInput read_cache(const CacheArguments& cache, const TableLayout& layout, const BagInput& in, const Tensor& values,
                      CacheUse use = CacheUse::kUpdate);

// The rows that a lookup reads from slots: checked, so that kernels may follow them.
CachedPool read_cached_rows(const CachedRows& cache, const TableLayout& layout, const BagInput& in,
                            const Tensor& values);

}  // namespace rec_kernels
