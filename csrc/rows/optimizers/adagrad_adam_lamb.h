// Optimizers with state for every element of a row: Adagrad, Adam, row-wise Adam and LAMB (docs/numerics.md,
// "Optimizers"). A row's gradient g becomes a direction r, and state advances on the way; then w = fmaf(factor, r, w)
// with one factor for the row.
#pragma once

#include "rows/optimizers/state.h"

namespace rec_kernels {

// Streams of the noise with which moments are rounded; the weights' is 0.
constexpr uint32_t kFirstMomentStream = 1, kSecondMomentStream = 2;

inline namespace RK_ISA {

// One step's numbers. The corrections are 1 - beta1^t and 1 - beta2^t of this step, t counted from 1.
struct Elementwise {
  Optimizer kind;
  float eps, beta1, beta2, correction1, correction2;

  RK_HOST_DEVICE bool needs_mean_square() const { return kind == Optimizer::kRowwiseAdam; }
  RK_HOST_DEVICE bool needs_norms() const { return kind == Optimizer::kLamb; }
  RK_HOST_DEVICE bool has_first() const { return kind != Optimizer::kAdagrad; }
  RK_HOST_DEVICE bool has_second() const { return kind != Optimizer::kRowwiseAdam; }

  // Row-wise Adam: the row's second moment after the mean of its g^2, and the divisor that comes from it.
  RK_HOST_DEVICE float row_moment(float second, float mean_square) const {
    return fused_multiply_add(beta2, second, (1.0f - beta2) * mean_square);
  }
  RK_HOST_DEVICE float row_divisor(float second) const { return square_root(second / correction2) + eps; }

  // LAMB: the factor of a row whose weights and direction have these square sums.
  RK_HOST_DEVICE static float trusted(float lr, float weight_squares, float direction_squares) {
    const float weight = square_root(weight_squares), direction = square_root(direction_squares);
    return -(lr * (weight == 0.0f || direction == 0.0f ? 1.0f : weight / direction));
  }
};

// Broadcasts a number to a register of one lane: itself.
struct OneLane {
  RK_HOST_DEVICE float operator()(float x) const { return x; }
};

// The numbers in registers of V, a float or several.
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

  // The direction of gradients g; `first` (exp_avg) and `second` (sum, exp_avg_sq) are state before and after.
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
