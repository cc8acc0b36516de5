#include "dense/scale_rows.h"

#include "core/schema.h"

namespace rec_kernels {

void check_scale_rows(const Tensor& x, const Tensor& scale) {
  check_rank(x, 2, "x");
  check_dtype(x, ScalarType::Float, "x");
  check_shape(scale, {x.size(0)}, "scale");
  check_dtype(scale, ScalarType::Float, "scale");
  check_same_device(scale, x, "scale", "x");
}

void check_row_dot(const Tensor& a, const Tensor& b) {
  check_rank(a, 2, "a");
  check_dtype(a, ScalarType::Float, "a");
  check_shape(b, {a.size(0), a.size(1)}, "b");
  check_dtype(b, ScalarType::Float, "b");
  check_same_device(b, a, "b", "a");
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m, "scale_rows(Tensor x, Tensor scale) -> Tensor");
  define(m, "row_dot(Tensor a, Tensor b) -> Tensor");
}

}  // namespace rec_kernels
