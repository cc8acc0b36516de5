// jagged_overlaps: stores overlapping rows, such as growing histories, once. Makes the buffer and windows of
// jagged_windows.
//
// Contract. values [N] ids, int32 or int64; offsets [R + 1]. Returns new tensors: output [stored], starts [R] of
// offsets' dtype, a status (jagged/jagged.h), so that row r is output[starts[r] : starts[r] + length of row r]. For
// each row, searches an earlier row whose last ids are the row's first ids; the row then starts in that row, and only
// its remaining ids are stored after it. A row that is a suffix of another is not stored. Candidates are found by a
// hash of the last kAnchor ids of each row and compared, so that only equal ids overlap. The result depends only on
// values and offsets. Time is linear in N: at most kTries comparisons per row and one hash table lookup per id, which
// takes a few probes unless the ids were chosen to collide. Missed overlaps only cost memory: those of fewer than
// kAnchor ids, those with a row that another row already continues, and those with a later row, so that rows should be
// in order of time. CPU only, in the calling thread, for use in data loaders. Not differentiable.
#pragma once

#include "jagged/jagged.h"

namespace rec_kernels {

constexpr int64_t kAnchor = 4, kTries = 8;

// Throws std::invalid_argument naming the argument.
void check_jagged_overlaps(const Tensor& values, const Tensor& offsets);

}  // namespace rec_kernels
