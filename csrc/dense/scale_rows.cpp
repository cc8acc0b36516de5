#include "dense/scale_rows.h"

#include "core/schema.h"

namespace rec_kernels {

void check_scale_rows(const Tensor& x, const Tensor& scale) {
  check(x, "x").rank(2).dtype(ScalarType::Float);
  check(scale, "scale").shape({x.size(0)}).dtype(ScalarType::Float).on_device_of(x, "x");
}

void check_row_dot(const Tensor& a, const Tensor& b) {
  check(a, "a").rank(2).dtype(ScalarType::Float);
  check(b, "b").shape({a.size(0), a.size(1)}).dtype(ScalarType::Float).on_device_of(a, "a");
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m, "scale_rows(Tensor x, Tensor scale) -> Tensor");
  define(m, "row_dot(Tensor a, Tensor b) -> Tensor");
}

}  // namespace rec_kernels
