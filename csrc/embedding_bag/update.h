// Arguments of fused updates, and the checks that all backends share.
//
// Optimizer state. `sum`: per row for row-wise Adagrad, per element for Adagrad; exp_avg: per element; exp_avg_sq: per
// element, or per row for row-wise Adam; beta_powers [2]: beta1^t and beta2^t after t updates. Per-element state of a
// table starts at the state_offset of its parts and may be bfloat16.
#pragma once

#include "embedding_bag/embedding_bag.h"
#include "rows/optimizers/update.h"

namespace rec_kernels {

// Unchecked arguments of a fused update.
struct UpdateArguments {
  const std::string& optimizer;
  double eps, beta1, beta2, weight_decay;
  const std::string& weight_decay_mode;
  std::optional<double> clip_grad_value, clip_grad_norm;
  const OptionalTensor &exp_avg, &exp_avg_sq, &beta_powers;
  const std::string& rounding;
  const OptionalTensor& seed;
};
template <>
struct ArgumentsOf<const UpdateArguments&> {
  using types = Types<const std::string&, double, double, double, double, const std::string&, std::optional<double>,
                      std::optional<double>, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                      const std::string&, const OptionalTensor&>;
};

// Rounding of updated rows. `seed` points into its tensor, which may be on a GPU.
struct UpdateRounding {
  bool stochastic;
  const int64_t* seed;
};
RK_EXPORT UpdateRounding read_rounding(const Tensor& values, const std::string& rounding, const OptionalTensor& seed);

// Checks all that does not depend on the tables. The caller sets Update::records and calls check_row_state();
// fault_of() checks each state_offset.
RK_EXPORT Update read_update(const Tensor& values, const OptionalTensor& sum, const Tensor& step, const Tensor& lr,
                             const UpdateArguments& fused, const OptionalTensor& grad_scale);
// Checks that row-wise state has an element for each of `rows` rows.
RK_EXPORT void check_row_state(const Update& update, int64_t rows);

}  // namespace rec_kernels
