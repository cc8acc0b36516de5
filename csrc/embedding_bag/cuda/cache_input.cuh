// The row cache as CUDA kernels see it: its tensors, and the places of parts in it.
#pragma once

#include "embedding_bag/cuda/input.cuh"
#include "row_cache/row_cache.h"

namespace rec_kernels {

// The cached parts in the order of their tables' first rows; of those that read one table, the first comes last.
struct PartOrder {
  int64_t *first_rows, *parts;
  int64_t* count;
};

// The tensors of a cache; `tags` is null where there is none.
struct CacheTensors {
  int64_t* tags;
  uint8_t *marks, *dirty;
  float* rows;
  int64_t ways, num_slots;
  PartOrder order;  // for those who ask whose a row is

  // The fields by which rows are found.
  RK_HOST_DEVICE CacheView view() const { return {tags, marks, nullptr, nullptr, nullptr, ways}; }
};

inline namespace RK_ISA {

__device__ __forceinline__ CachePlace place_of(const CacheTensors& cache, const Parts& parts, int64_t part) {
  const TablePart& p = parts.records[part];
  return CachePlace::of(p.cache_sets, p.cache_first_set, p.cache_row_offset, cache.ways, p.num_embeddings);
}

}  // namespace RK_ISA

// Reads the tensors of a cache, whose checks are row_cache.h's.
CacheTensors read_cache(const CacheArguments& cache, const Layout& layout, const Tensor& values,
                        CacheUse use = CacheUse::kUpdate);

}  // namespace rec_kernels
