#include "dense/factorization_machine.h"

#include "core/schema.h"
#include "dense/vectors.h"
#include "rows/row_formats.h"

namespace rec_kernels {

FactorizationSizes check_factorization_machine(const Tensor& x, const Tensor& y, const std::string& precision) {
  check_rank(x, 3, "x");
  check_float_dtype(x.scalar_type(), "x");
  check_columns(x, "x");
  const int64_t B = x.size(0), F = x.size(1), D = x.size(2);
  check_value(F <= kMostVectors, "x must have at most ", kMostVectors, " vectors per sample, got shape ", shape_of(x));
  const bool shared = y.dim() == 2;
  check_value(shared || y.dim() == 3, "y must have 2 or 3 dimensions, got shape ", shape_of(y));
  check_dtype(y, x.scalar_type(), "y");
  check_columns(y, "y");
  const int64_t K = y.size(y.dim() - 1);
  if (shared) check_shape(y, {F, K}, "y");
  else check_shape(y, {B, F, K}, "y");
  check_same_device(y, x, "y", "x");
  check_precision(precision);
  return {B, F, D, K, shared};
}

FactorizationSizes check_factorization_machine_backward(const Tensor& grad, const Tensor& x, const Tensor& y,
                                                        const std::string& precision) {
  const FactorizationSizes sizes = check_factorization_machine(x, y, precision);
  check_shape(grad, {sizes.B, sizes.F, sizes.K}, "grad");
  check_dtype(grad, x.scalar_type(), "grad");
  check_same_device(grad, x, "grad", "x");
  return sizes;
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m, "factorization_machine(Tensor x, Tensor y, str precision=\"ieee\") -> Tensor");
  define(m,
         "factorization_machine_backward(Tensor grad, Tensor x, Tensor y, str precision=\"ieee\") "
         "-> (Tensor grad_x, Tensor grad_y)");
}

}  // namespace rec_kernels
