// The row cache on the CPU: where a call's ids are in it.
#pragma once

#include "embedding_bag/cpu/cache_input.h"
#include "row_cache/cpu/find.h"

namespace rec_kernels {

// Writes the slots of a call's ids. What it finds wrong is the caller's to raise.
Bounds find_slots(const BagInput& in, const CacheView& cache, int64_t* slots);

}  // namespace rec_kernels
