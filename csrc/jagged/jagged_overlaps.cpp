#include "jagged/jagged_overlaps.h"

#include "core/schema.h"

namespace rec_kernels {

void check_jagged_overlaps(const Tensor& values, const Tensor& offsets) {
  check_jagged_ids(values, offsets, std::nullopt);
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m, "jagged_overlaps(Tensor values, Tensor offsets) -> (Tensor output, Tensor starts, Tensor status)");
}

}  // namespace rec_kernels
