// Plain-pointer kernel of the row cache, one table per instruction set.
#pragma once

#include "embedding_bag/cpu/forward.h"
#include "row_cache/places.h"

namespace rec_kernels {

struct FindSlots {
  Bags bags;
  const Part* parts;
  CacheView cache;
  int64_t* slots;  // of the ids
};

struct RowCacheKernels {
  // The slots of the ids of bags [begin, end): where their rows are, or -1.
  void (*find)(const FindSlots&, int64_t begin, int64_t end, Bounds*);

  template <CpuIsa>
  static const RowCacheKernels table;
};

}  // namespace rec_kernels
