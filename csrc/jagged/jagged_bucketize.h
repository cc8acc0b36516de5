// jagged_bucketize: the ids of a key-major batch, sorted out among the shards of row-wise sharded tables.
//
// Contract. values [N] ids, offsets [sum(strides) + 1]; feature f has strides[f] bags. block_sizes [F] int64, 1 or
// more: the rows of feature f's table in every bucket; its ids are in [0, block_sizes[f] * num_buckets). Id i goes to
// bucket i / block_sizes[f], as i % block_sizes[f]. Returns new tensors:
//   output [N], output_offsets [num_buckets * bags + 1] of offsets' dtype: bag (bucket, feature, sample), ids in the
//   order that they had; output_weights [N], or [0] without `weights` [N] float32; positions [N] int64: where each id
//   is in the output; status (jagged/jagged.h: positions in `values`).
// An id out of range: IndexError on the CPU. On a GPU, a negative id goes to bucket 0 as it is, and one too large to
// the last bucket, less that bucket's first row: the shard's lookup reports it, too. Offsets start at 0 and end with
// the ids, a ValueError on the CPU; on a GPU, ids that no bag names are zeros behind the last bag, at position -1.
// Where offsets are bad there, bags may share ids, and a block size that is not 1 or more fits no id (the status has
// kBadLayout): no bag of the output has any then. Differentiable in weights.
#pragma once

#include "jagged/jagged.h"

namespace rec_kernels {

// Throws std::invalid_argument naming the argument; returns where the features' bags start, [F + 1].
RK_EXPORT std::vector<int64_t> check_jagged_bucketize(const Tensor& values, const Tensor& offsets,
                                                      const Tensor& block_sizes, int64_t num_buckets,
                                                      const std::vector<int64_t>& strides,
                                                      const OptionalTensor& weights);

}  // namespace rec_kernels
