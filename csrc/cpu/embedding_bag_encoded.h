// Lookups of rows that are not plain floats, for the kernels of one instruction set.
#pragma once

#include "cpu/embedding_bag.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Where the sums of bags go: D floats of the first, and so on, `stride` floats apart.
struct Sums {
  float* first;
  int64_t stride;
};

// Pools bags [begin, end) of one feature, whose offsets are known to be good.
void pool_encoded(const PoolArgs& a, const Feature& f, int64_t begin, int64_t end, Sums sums, Bounds* bounds);
// The dot product of g [D] and an encoded row, in the order of core/row_statistics.h.
float dot_with_encoded(const float* g, const uint8_t* row, const Feature& f);

}  // namespace RK_ISA
}  // namespace rec_kernels
