// jagged_dedup: finds the samples of a batch that have the same bags. Samples of a session repeat most of their
// features, so that their bags need to be looked up only once (RecD: Zhao et al., "RecD: Deduplication for End-to-End
// Deep Learning Recommendation Model Training Infrastructure", MLSys 2023, arXiv:2211.05239).
//
// Contract. values [N] ids, offsets [F * B + 1], key-major; `groups` [F]: the group of each feature, numbered from 0
// without gaps, or -1 for a feature in no group. Two samples are equal in a group if their bags are equal in every
// feature of the group: the same ids in the same order, and bitwise equal `weights` [N] float32, if given. With G
// groups, the op returns
//   rows [G, B] int64: the first sample of each distinct one, ascending, padded with -1; inverse [G, B] int64: the
//   index of each sample's distinct one; counts [G] int64: the number of distinct samples; status (jagged/jagged.h).
//
// Samples are hashed and then compared, so that collisions cost time but never merge samples. `hash_bits`, 0 to 64,
// limits the hash to produce collisions in tests. Not differentiable.
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
