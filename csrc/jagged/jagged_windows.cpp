#include "jagged/jagged_windows.h"

#include "core/schema.h"

namespace rec_kernels {

void check_jagged_windows(const Tensor& values, const Tensor& starts, const Tensor& lengths,
                          std::optional<int64_t> total) {
  check_value(values.dim() == 1 || values.dim() == 2, "values must be [N] or [N, D], got shape ", shape_of(values));
  check(starts, "starts").rank(1).integer().on_device_of(values, "values");
  check(lengths, "lengths").shape({starts.size(0)}).integer().on_device_of(values, "values");
  check_total(total, lengths, "lengths");
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m,
         "jagged_windows(Tensor values, Tensor starts, Tensor lengths, SymInt? total=None) -> "
         "(Tensor output, Tensor output_offsets, Tensor status)");
}

}  // namespace rec_kernels
