// jagged_dedup: which samples of a batch have the same bags. Samples of one session repeat most of their features;
// what is computed from a bag need be computed once (RecD: Zhao et al., "RecD: Deduplication for End-to-End Deep
// Learning Recommendation Model Training Infrastructure", MLSys 2023, arXiv:2211.05239).
//
// Contract. values [N] ids, offsets [F * B + 1], key-major; `groups` [F]: the group of each feature, from 0 on, none
// left out, or -1 for a feature that is in none. Two samples are the same in a group if their bags are equal in every
// feature of it: as many ids, the same in the same order, and the same bits of their `weights` [N] float32, if there
// are any. With G groups, the op returns
//   rows [G, B] int64: the sample in which distinct one u of the group occurs first, in ascending order; -1 behind
//   them; inverse [G, B] int64: which distinct one each sample is; counts [G] int64: how many there are; status, as
//   jagged/jagged.h says.
// Distinct samples are found by hash and told apart by comparison: a collision costs time and merges nothing.
// `hash_bits`, 0 to 64, of the hash count: fewer make collisions, for tests. Not differentiable.
#pragma once

#include "jagged/jagged.h"

namespace rec_kernels {

struct DedupSizes {
  int64_t groups;
  int64_t batch;
};

// Throws std::invalid_argument naming the argument.
RK_EXPORT DedupSizes check_jagged_dedup(const Tensor& values, const Tensor& offsets, const std::vector<int64_t>& groups,
                                        const OptionalTensor& weights, int64_t hash_bits);

}  // namespace rec_kernels
