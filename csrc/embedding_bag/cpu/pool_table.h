// Lookups in one table, for the kernels of one instruction set.
#pragma once

#include "embedding_bag/cpu/sources.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Pools bags of the table that starts at `rows`, in the format of `f`.
void pool_table(const PooledBags& k, const Part& f, const uint8_t* rows, const RowIndices& indices);

}  // namespace RK_ISA
}  // namespace rec_kernels
