// jagged_overlaps: rows that go on from one another, laid over each other: the buffer and the windows of
// jagged_windows.
//
// Contract. values [N] ids, int32 or int64; offsets [R + 1]. Returns new tensors: output [stored], starts [R] of
// offsets' dtype, a status (jagged/jagged.h), so that row r is output[starts[r] : starts[r] + length of row r]. Row by
// row, an earlier one is looked for whose last ids are the row's first ones: the row begins there then, and only the
// rest is stored, behind it. A row that is all of another's end is not stored at all. Found by the hash of the last
// kAnchor ids of each row and compared: nothing is laid over what differs. What is found depends on values and offsets
// alone, in time linear in N: kTries comparisons a row at most, and a look into a hash table for each id, of a few of
// its places unless ids were chosen so that their hashes meet. Overlaps that are not found cost memory only: those of
// less than kAnchor ids; those with a row from which another goes on already; those that only a later row has, so that
// rows must come in the order of their time. On the CPU only, by the calling thread: it is meant for a loader's. Not
// differentiable.
#pragma once

#include "jagged/jagged.h"

namespace rec_kernels {

constexpr int64_t kAnchor = 4, kTries = 8;

// Throws std::invalid_argument naming the argument.
void check_jagged_overlaps(const Tensor& values, const Tensor& offsets);

}  // namespace rec_kernels
