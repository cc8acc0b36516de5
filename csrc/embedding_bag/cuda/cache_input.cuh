// Views of a row cache for CUDA kernels: its tensors, and the sets that each part uses.
#pragma once

#include "embedding_bag/cuda/input.cuh"
#include "row_cache/row_cache.h"

namespace rec_kernels {

// Cached parts sorted by their tables' first rows; among parts of the same table, the first one is last.
struct PartOrder {
  int64_t *first_rows, *parts;
  int64_t* count;
};

// The tensors of a cache; `tags` is null without a cache.
struct CacheTensors {
  int64_t* tags;
  uint8_t *marks, *dirty;
  float* rows;
  int64_t ways, num_slots;
  PartOrder order;  // set by ops that look up the part of a row

  // The fields that are needed to find rows.
  RK_HOST_DEVICE CacheView view() const { return {tags, marks, nullptr, nullptr, nullptr, ways}; }
};

inline namespace RK_ISA {

__device__ __forceinline__ CachePlace place_of(const CacheTensors& cache, const Parts& parts, int64_t part) {
  const TablePart& p = parts.records[part];
  return CachePlace::of(p.cache_sets, p.cache_first_set, p.cache_row_offset, cache.ways, p.num_embeddings);
}

}  // namespace RK_ISA

// Checks the tensors of a cache (row_cache.h) and reads them.
CacheTensors read_cache(const CacheArguments& cache, const Layout& layout, const Tensor& values,
                        CacheUse use = CacheUse::kUpdate);

}  // namespace rec_kernels
