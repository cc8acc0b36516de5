#include "jagged/jagged_index_select.h"

#include "core/boxing.h"
#include "jagged/cpu/copy_rows.h"

namespace rec_kernels {
namespace {

struct ChosenRows {
  Bags rows;
  Integers index;

  static constexpr const char *kNamed = "the rows that index names", *kTyped = "offsets";
  int64_t start(int64_t m) const { return rows.offset(index[m]); }
  int64_t stop(int64_t m) const { return rows.offset(index[m] + 1); }
};

std::tuple<Tensor, Tensor, Tensor> jagged_index_select_cpu(const Tensor& values_in, const Tensor& offsets_in,
                                                           const Tensor& index_in, std::optional<int64_t> total) {
  check_jagged_index_select(values_in, offsets_in, index_in, total);
  const Tensor values = as_contiguous(values_in), offsets = as_contiguous(offsets_in), index = as_contiguous(index_in);
  const Bags rows = jagged_rows(values, offsets);
  check_offsets(rows);
  check_indices(index, rows.num_bags, "index", "the rows that offsets describe");
  return copied_rows(values, ChosenRows{rows, Integers(index)}, index.size(0), offsets, total);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { implement<&jagged_index_select_cpu>(m, "jagged_index_select"); }

}  // namespace rec_kernels
