// Search for the ids of a call in the row cache, on the CPU.
#pragma once

#include "embedding_bag/cpu/cache_input.h"
#include "row_cache/cpu/find.h"

namespace rec_kernels {

// Writes the slots of a call's ids. The caller raises the returned bounds errors.
Bounds find_slots(const BagInput& in, const CacheView& cache, int64_t* slots);

}  // namespace rec_kernels
