// Plain-pointer kernel of the row cache, one function table per instruction set.
#pragma once

#include "embedding_bag/cpu/forward.h"
#include "row_cache/places.h"

namespace rec_kernels {

struct FindSlots {
  Bags bags;
  const Part* parts;
  CacheView cache;
  int64_t* slots;  // per id
};

struct RowCacheKernels {
  // Writes the slots of the ids of bags [begin, end), or -1 for rows that are not cached.
  void (*find)(const FindSlots&, int64_t begin, int64_t end, Bounds*);

  template <CpuIsa>
  static const RowCacheKernels table;
};

}  // namespace rec_kernels
