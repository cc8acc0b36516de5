#include "jagged/jagged_index_select.h"

#include "core/schema.h"

namespace rec_kernels {

void check_jagged_index_select(const Tensor& values, const Tensor& offsets, const Tensor& index,
                               std::optional<int64_t> total) {
  check_jagged(values, offsets);
  check(index, "index").rank(1).integer().on_device_of(values, "values");
  check_total(total, offsets);
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m,
         "jagged_index_select(Tensor values, Tensor offsets, Tensor index, SymInt? total=None) -> "
         "(Tensor output, Tensor output_offsets, Tensor status)");
}

}  // namespace rec_kernels
