#include "jagged/jagged_windows.h"

#include "core/boxing.h"
#include "jagged/cpu/copy_rows.h"

namespace rec_kernels {
namespace {

struct WindowRows {
  Windows windows;

  static constexpr const char *kNamed = "the windows", *kTyped = "lengths";
  int64_t start(int64_t m) const { return windows.starts[m]; }
  int64_t stop(int64_t m) const { return windows.starts[m] + windows.lengths[m]; }
};

// Throws std::out_of_range for the first window outside of the values.
void check_windows(const Windows& w, int64_t count) {
  const int64_t m = first_bad(count, [w](int64_t at) { return w.is_bad(at); });
  if (m == kNoBadPosition) return;
  const int64_t start = w.starts[m], size = w.num_values;
  if (w.starts_outside(m))
    throw std::out_of_range(join("starts[", m, "] = ", start, " must be in [0, ", size, "], the number of values"));
  throw std::out_of_range(join("lengths[", m, "] = ", w.lengths[m], " must be in [0, ", size - start,
                               "]: the window begins at ", start, " of ", size, " values"));
}

std::tuple<Tensor, Tensor, Tensor> jagged_windows_cpu(const Tensor& values_in, const Tensor& starts_in,
                                                      const Tensor& lengths_in, std::optional<int64_t> total) {
  check_jagged_windows(values_in, starts_in, lengths_in, total);
  const Tensor values = as_contiguous(values_in), starts = as_contiguous(starts_in);
  const Tensor lengths = as_contiguous(lengths_in);
  const WindowRows rows{{Integers(starts), Integers(lengths), values.size(0)}};
  check_windows(rows.windows, starts.size(0));
  return copied_rows(values, rows, starts.size(0), lengths, total);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { implement<&jagged_windows_cpu>(m, "jagged_windows"); }

}  // namespace rec_kernels
