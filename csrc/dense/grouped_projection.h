// grouped_projection: rows of several widths, each times a matrix of its own, all in one call. It brings the pooled
// rows of mixed-dimension embedding tables to the width that the model wants (Ginart et al., "Mixed Dimension
// Embeddings with Application to Memory-Efficient Recommendation Systems", arXiv:1909.11810).
//
// Contract. x [B, sum(in_dims)] float32: group g takes the next in_dims[g] columns and belongs to the block outputs[g]
// of the result, a new [B, sum(out_dims)] float32 tensor. Blocks are named in ascending order, each by one group or
// more. A block is the sum of its groups' x_g W_g^T. W_g [out_dims[outputs[g]], in_dims[g]] is row-major; the matrices
// lie one after the other in the flat `weights`. A group as wide as its block is the identity and has no weights.
// Without groups the result has no columns. docs/numerics.md has the order of every sum; NaN and Inf propagate.
// Differentiable in x and weights, once: each gradient is an op of its own, for it is not always wanted.
#pragma once

#include <vector>

#include "core/stable.h"

namespace rec_kernels {

// The widths and blocks of the groups, as the ops take them.
struct ProjectionDims {
  const std::vector<int64_t>& in_dims;
  const std::vector<int64_t>& out_dims;
  const std::vector<int64_t>& outputs;
};

struct ProjectionSizes {
  int64_t in_columns;
  int64_t out_columns;
  int64_t weights;  // elements
};

// Each throws std::invalid_argument naming the argument. x [B, in_columns], grad [B, out_columns].
ProjectionSizes check_grouped_projection(const Tensor& x, const Tensor& weights, const ProjectionDims& dims);
ProjectionSizes check_grouped_projection_backward_input(const Tensor& grad, const Tensor& weights,
                                                        const ProjectionDims& dims);
ProjectionSizes check_grouped_projection_backward_weights(const Tensor& grad, const Tensor& x,
                                                          const ProjectionDims& dims);

}  // namespace rec_kernels
