// factorization_machine: the pairwise dot products of a sample's vectors projected to fewer columns, computed as x (x^T
// y) instead of (x x^T) y (Zhang et al., "Wukong: Towards a Scaling Law for Large-Scale Recommendation",
// arXiv:2403.02545).
//
// Contract. x [B, F, D]; y [F, K], the same for all samples, or [B, F, K]; both float32, float16 or bfloat16, D >= 1,
// K >= 1. The result is a new [B, F, K] of their dtype. Sums and the intermediate product are float32; the result
// is rounded once. `precision`: precision of float32 products on a GPU. F = 0 and B = 0 are allowed. NaN and Inf
// propagate. Differentiable once in x and y; one op computes both gradients, in the inputs' dtype. The gradient of
// a shared y is summed over samples; docs/numerics.md has the order of every sum on the CPU.
#pragma once

#include <string>

#include "core/stable.h"

namespace rec_kernels {

struct FactorizationSizes {
  int64_t B, F, D, K;
  bool shared;  // y has no batch dimension
};

// Each throws std::invalid_argument naming the argument.
FactorizationSizes check_factorization_machine(const Tensor& x, const Tensor& y, const std::string& precision);
FactorizationSizes check_factorization_machine_backward(const Tensor& grad, const Tensor& x, const Tensor& y,
                                                        const std::string& precision);

}  // namespace rec_kernels
