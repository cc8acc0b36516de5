#include "dense/expand.h"

#include "core/schema.h"

namespace rec_kernels {

void check_expand(const Tensor& x, const Tensor& inverse) {
  check_rank(x, 2, "x");
  const ScalarType t = x.scalar_type();
  check_value(t == ScalarType::Float || t == ScalarType::Half || t == ScalarType::BFloat16 || t == ScalarType::Int ||
                  t == ScalarType::Long,
              "x must be float32, float16, bfloat16, int32 or int64, got ", dtype_name(t));
  check_rank(inverse, 1, "inverse");
  check_integer(inverse, "inverse");
  check_same_device(inverse, x, "inverse", "x");
}

void check_expand_backward(const Tensor& grad, const Tensor& inverse, int64_t rows) {
  check_rank(grad, 2, "grad");
  check_dtype(grad, ScalarType::Float, "grad");
  check_shape(inverse, {grad.size(0)}, "inverse");
  check_integer(inverse, "inverse");
  check_same_device(inverse, grad, "inverse", "grad");
  check_value(rows >= 0, "rows = ", rows, " must be 0 or more");
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m, "expand(Tensor x, Tensor inverse) -> (Tensor output, Tensor status)");
  define(m, "expand_backward(Tensor grad, Tensor inverse, SymInt rows) -> Tensor");
}

}  // namespace rec_kernels
