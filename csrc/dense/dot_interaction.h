// dot_interaction: the dense vector of a sample, followed by the dot products of the pairs among it and the sample's
// sparse vectors (Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
// arXiv:1906.00091).
//
// Contract. dense [B, D] and sparse [B, F, D], both float32, float16 or bfloat16, D >= 1. Vector 0 of a sample is the
// dense one, vector 1 + f its sparse vector f. The result is a new [B, D + pairs] of their dtype: dense,
// then the pairs (i, j), j < i, in row-major order: (1, 0), (2, 0), (2, 1), ... With self_interaction also the
// pairs with j = i. Sums are float32, rounded once; docs/numerics.md has their order on the CPU and error bounds
// elsewhere. `precision`: precision of float32 products on a GPU. F = 0 and B = 0 are allowed. NaN and Inf propagate.
// Differentiable once in dense and sparse; one op computes both gradients, in the inputs' dtype.
#pragma once

#include <string>

#include "core/stable.h"

namespace rec_kernels {

struct InteractionSizes {
  int64_t B, F, D;
  int64_t pairs;
  int64_t columns() const { return D + pairs; }
};

// Each throws std::invalid_argument naming the argument.
InteractionSizes check_dot_interaction(const Tensor& dense, const Tensor& sparse, bool self_interaction,
                                       const std::string& precision);
InteractionSizes check_dot_interaction_backward(const Tensor& grad, const Tensor& dense, const Tensor& sparse,
                                                bool self_interaction, const std::string& precision);

}  // namespace rec_kernels
