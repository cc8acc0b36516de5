#include "dense/expand.h"

#include "core/schema.h"

namespace rec_kernels {

void check_expand(const Tensor& x, const Tensor& inverse) {
  check(x, "x").rank(2);
  const ScalarType t = x.scalar_type();
  check_value(t == ScalarType::Float || t == ScalarType::Half || t == ScalarType::BFloat16 || t == ScalarType::Int ||
                  t == ScalarType::Long,
              "x must be float32, float16, bfloat16, int32 or int64, got ", dtype_name(t));
  check(inverse, "inverse").rank(1).integer().on_device_of(x, "x");
}

void check_expand_backward(const Tensor& grad, const Tensor& inverse, int64_t rows) {
  check(grad, "grad").rank(2).dtype(ScalarType::Float);
  check(inverse, "inverse").shape({grad.size(0)}).integer().on_device_of(grad, "grad");
  check_value(rows >= 0, "rows = ", rows, " must be 0 or more");
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m, "expand(Tensor x, Tensor inverse) -> (Tensor output, Tensor status)");
  define(m, "expand_backward(Tensor grad, Tensor inverse, SymInt rows) -> Tensor");
}

}  // namespace rec_kernels
