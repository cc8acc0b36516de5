// Lookups of rows of one table, for the kernels of one instruction set.
#pragma once

#include "embedding_bag/cpu/sources.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Pools bags of rows of a table in the feature's format, which starts at `rows`.
void pool_table(const PooledBags& k, const Part& f, const uint8_t* rows, const RowNumbers& numbers);

}  // namespace RK_ISA
}  // namespace rec_kernels
