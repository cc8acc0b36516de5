// Lookups of encoded rows, for the kernels of one instruction set.
#pragma once

#include "embedding_bag/cpu/sources.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Pools bags of encoded rows of the table that starts at `rows`.
void pool_encoded(const PooledBags& k, const Part& f, const uint8_t* rows, const RowIndices& indices);
// The dot product of g [D] and an encoded row, in the order of rows/cpu/statistics.h.
float dot_with_encoded(const float* g, const uint8_t* row, const Part& f);

}  // namespace RK_ISA
}  // namespace rec_kernels
