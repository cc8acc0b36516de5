// grouped_projection: multiplies groups of columns by one matrix each in a single call. It projects the pooled
// embeddings of mixed-dimension tables to the width of the model (Ginart et al., "Mixed Dimension Embeddings with
// Application to Memory-Efficient Recommendation Systems", arXiv:1909.11810).
//
// Contract. x [B, sum(in_dims)] float32: group g takes the next in_dims[g] columns and belongs to the block outputs[g]
// of the result, a new [B, sum(out_dims)] float32 tensor. `outputs` is ascending, and every block has at least
// one group. A block is the sum of its groups' x_g W_g^T. W_g [out_dims[outputs[g]], in_dims[g]] is row-major; the flat
// `weights` holds the matrices consecutively. A group as wide as its block is the identity and has no weights.
// Without groups the result has no columns. docs/numerics.md has the order of every sum; NaN and Inf propagate.
// Differentiable once in x and weights; each gradient has its own op, since often only one is needed.
#pragma once

#include <vector>

#include "core/stable.h"

namespace rec_kernels {

// Unchecked widths and blocks of the groups.
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
