// jagged_permute: reorders or selects the features of a key-major batch.
//
// Contract. values [N] ids of any dtype, offsets [sum(strides) + 1]; feature f has strides[f] bags. The result has
// features permute[0], permute[1], ... of the input, each in [0, F); repeats and omissions are allowed.
// Returns new tensors: output [total], output_offsets of offsets' dtype, output_weights [total], or [0] without
// `weights` [N] float32, and a status (jagged/jagged.h). `total`, if given, must be the number of ids of these
// features, as for jagged_index_select. Without it, a call does not synchronize with a GPU either if permute has every
// feature exactly once: total is N then, and offsets must start at 0 and end at N (ValueError on the CPU).
// Differentiable in weights.
#pragma once

#include "jagged/jagged.h"

namespace rec_kernels {

// Throws std::invalid_argument naming the argument; returns the first bag of each feature, [F + 1].
RK_EXPORT std::vector<int64_t> check_jagged_permute(const Tensor& values, const Tensor& offsets,
                                                    const std::vector<int64_t>& permute,
                                                    const std::vector<int64_t>& strides, const OptionalTensor& weights,
                                                    std::optional<int64_t> total);
// True if a checked `permute` has every feature exactly once.
RK_EXPORT bool names_each_once(const std::vector<int64_t>& permute, size_t features);

}  // namespace rec_kernels
