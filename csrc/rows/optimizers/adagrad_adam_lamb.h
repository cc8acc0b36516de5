// Optimizers with per-element state: Adagrad, Adam, row-wise Adam and LAMB (docs/numerics.md, "Optimizers"). The
// gradient g of a row and its state give a direction r; then w = fmaf(factor, r, w) with one factor per row.
#pragma once

#include "rows/optimizers/state.h"

namespace rec_kernels {

// Noise streams for rounding moments; stream 0 is that of the weights.
constexpr uint32_t kFirstMomentStream = 1, kSecondMomentStream = 2;

inline namespace RK_ISA {

// Scalars of one step. The bias corrections are 1 - beta1^t and 1 - beta2^t for step t, counted from 1.
struct Elementwise {
  Optimizer kind;
  float eps, beta1, beta2, correction1, correction2;

  RK_HOST_DEVICE bool needs_mean_square() const { return kind == Optimizer::kRowwiseAdam; }
  RK_HOST_DEVICE bool needs_norms() const { return kind == Optimizer::kLamb; }
  RK_HOST_DEVICE bool has_first() const { return kind != Optimizer::kAdagrad; }
  RK_HOST_DEVICE bool has_second() const { return kind != Optimizer::kRowwiseAdam; }

  // Row-wise Adam: the row's new second moment, from the old one and the mean of g^2, and the divisor for it.
  RK_HOST_DEVICE float row_moment(float second, float mean_square) const {
    return fused_multiply_add(beta2, second, (1.0f - beta2) * mean_square);
  }
  RK_HOST_DEVICE float row_divisor(float second) const { return square_root(second / correction2) + eps; }

  // LAMB: the factor of a row, from the square sums of its weights and its direction.
  RK_HOST_DEVICE static float trusted(float lr, float weight_squares, float direction_squares) {
    const float weight = square_root(weight_squares), direction = square_root(direction_squares);
    return -(lr * (weight == 0.0f || direction == 0.0f ? 1.0f : weight / direction));
  }
};

// Broadcast for one lane: the identity.
struct OneLane {
  RK_HOST_DEVICE float operator()(float x) const { return x; }
};

// The scalars of a step broadcast to V, a float or a register of floats.
template <class V>
struct ElementwiseRegisters {
  V beta1, rest1, beta2, rest2, correction1, correction2, eps, row_divisor;

  template <class Spread>
  RK_HOST_DEVICE ElementwiseRegisters(const Elementwise& o, float divisor, const Spread& spread)
      : beta1(spread(o.beta1)),
        rest1(spread(1.0f - o.beta1)),
        beta2(spread(o.beta2)),
        rest2(spread(1.0f - o.beta2)),
        correction1(spread(o.correction1)),
        correction2(spread(o.correction2)),
        eps(spread(o.eps)),
        row_divisor(spread(divisor)) {}

  // Returns the direction of gradients g and updates the state: `first` (exp_avg) and `second` (sum, exp_avg_sq).
  RK_HOST_DEVICE V adagrad(V g, V* second) const {
    *second = fused_multiply_add(g, g, *second);
    return g / (square_root(*second) + eps);
  }
  RK_HOST_DEVICE V adam(V g, V* first, V* second) const {
    *first = fused_multiply_add(beta1, *first, rest1 * g);
    *second = fused_multiply_add(beta2, *second, (rest2 * g) * g);
    return (*first / correction1) / (square_root(*second / correction2) + eps);
  }
  RK_HOST_DEVICE V rowwise_adam(V g, V* first) const {
    *first = fused_multiply_add(beta1, *first, rest1 * g);
    return (*first / correction1) / row_divisor;
  }
  RK_HOST_DEVICE V direction(Optimizer kind, V g, V* first, V* second) const {
    if (kind == Optimizer::kAdagrad) return adagrad(g, second);
    if (kind == Optimizer::kRowwiseAdam) return rowwise_adam(g, first);
    return adam(g, first, second);
  }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
