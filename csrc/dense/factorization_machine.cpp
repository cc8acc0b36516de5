#include "dense/factorization_machine.h"

#include "core/schema.h"
#include "dense/vectors.h"
#include "rows/row_formats.h"

namespace rec_kernels {

FactorizationSizes check_factorization_machine(const Tensor& x, const Tensor& y, const std::string& precision) {
  check(x, "x").rank(3);
  check_float_dtype(x.scalar_type(), "x");
  check_columns(x, "x");
  const int64_t B = x.size(0), F = x.size(1), D = x.size(2);
  check_value(F <= kMostVectors, "x must have at most ", kMostVectors, " vectors per sample, got shape ", shape_of(x));
  const bool shared = y.dim() == 2;
  check_value(shared || y.dim() == 3, "y must have 2 or 3 dimensions, got shape ", shape_of(y));
  check(y, "y").dtype(x.scalar_type());
  check_columns(y, "y");
  const int64_t K = y.size(y.dim() - 1);
  if (shared) check(y, "y").shape({F, K});
  else check(y, "y").shape({B, F, K});
  check(y, "y").on_device_of(x, "x");
  check_precision(precision);
  return {B, F, D, K, shared};
}

FactorizationSizes check_factorization_machine_backward(const Tensor& grad, const Tensor& x, const Tensor& y,
                                                        const std::string& precision) {
  const FactorizationSizes sizes = check_factorization_machine(x, y, precision);
  check(grad, "grad").shape({sizes.B, sizes.F, sizes.K}).dtype(x.scalar_type()).on_device_of(x, "x");
  return sizes;
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m, "factorization_machine(Tensor x, Tensor y, str precision=\"ieee\") -> Tensor");
  define(m,
         "factorization_machine_backward(Tensor grad, Tensor x, Tensor y, str precision=\"ieee\") "
         "-> (Tensor grad_x, Tensor grad_y)");
}

}  // namespace rec_kernels
