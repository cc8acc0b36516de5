// jagged_bucketize: distributes the ids of a key-major batch among the shards of row-wise sharded tables.
//
// Contract. values [N] ids, offsets [sum(strides) + 1]; feature f has strides[f] bags. block_sizes [F] int64, at
// least 1: the rows of feature f's table per bucket; its ids are in [0, block_sizes[f] * num_buckets). Id i goes to
// bucket i / block_sizes[f] as i % block_sizes[f]. Returns new tensors:
//   output [N], output_offsets [num_buckets * bags + 1] of offsets' dtype: bags (bucket, feature, sample), which keep
//   the order of ids; output_weights [N], or [0] without `weights` [N] float32; positions [N] int64: the output
//   position of each id; status (jagged/jagged.h: positions in `values`).
//
// An id out of range raises IndexError on the CPU. On a GPU, a negative id goes unchanged to bucket 0, and an id too
// large goes to the last bucket, minus that bucket's first row, so that the shard's lookup reports it as well. Offsets
// must start at 0 and end at N: ValueError on the CPU; on a GPU, the output has a zero after the last bag for each id
// outside of all bags, whose position is -1.
// On a GPU with bad offsets (bags may overlap) or a block size below 1 (the status is kBadLayout), all output bags are
// empty. Differentiable in weights.
#pragma once

#include "jagged/jagged.h"

namespace rec_kernels {

// Throws std::invalid_argument naming the argument; returns the first bag of each feature, [F + 1].
RK_EXPORT std::vector<int64_t> check_jagged_bucketize(const Tensor& values, const Tensor& offsets,
                                                      const Tensor& block_sizes, int64_t num_buckets,
                                                      const std::vector<int64_t>& strides,
                                                      const OptionalTensor& weights);

}  // namespace rec_kernels
