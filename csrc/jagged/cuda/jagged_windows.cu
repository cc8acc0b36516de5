// jagged_windows: a thread checks a window; copy_rows.cu copies the windows. Bytes moved: every start read twice and
// every length once; the output start of each window (int64 [M + 1], first its length) written twice and read twice;
// the offsets written; every value of a window read and written once.
#include "core/boxing.h"
#include "jagged/cuda/jagged.cuh"
#include "jagged/jagged_windows.h"

namespace rec_kernels {
namespace {

// lengths: [count + 1]; 0 for a bad window and at the end.
__global__ void __launch_bounds__(kThreads)
    window_lengths_kernel(Windows windows, int64_t count, int64_t* lengths, int64_t* status) {
  for (int64_t m = Group<1>::first(); m <= count; m += Group<1>::stride()) {
    const int64_t length = m < count ? windows.lengths[m] : 0;
    const bool bad = m < count && windows.is_outside(windows.starts[m], length);
    if (bad) note_left_out(status, m);
    lengths[m] = bad ? 0 : length;
  }
}

std::tuple<Tensor, Tensor, Tensor> jagged_windows_cuda(const Tensor& values_in, const Tensor& starts_in,
                                                       const Tensor& lengths_in, std::optional<int64_t> total) {
  check_jagged_windows(values_in, starts_in, lengths_in, total);
  const OnDeviceOf device(values_in);
  const cudaStream_t stream = device.stream();
  const Tensor values = as_contiguous(values_in), starts = as_contiguous(starts_in);
  const Tensor lengths = as_contiguous(lengths_in);
  Tensor status = new_jagged_status(values, stream);
  const int64_t count = starts.size(0);
  Selection rows = new_selection(count, starts, status.mutable_data_ptr<int64_t>(), "starts");
  const Windows windows{Integers(starts), Integers(lengths), values.size(0)};
  launch_for(count + 1, 1, stream, window_lengths_kernel, windows, count, rows.starts.mutable_data_ptr<int64_t>(),
             rows.status);
  place_rows(rows, total, lengths, "lengths", stream);
  const auto [output, output_offsets] = copied_rows(rows, values, lengths, stream);
  return {output, output_offsets, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) { implement<&jagged_windows_cuda>(m, "jagged_windows"); }

}  // namespace rec_kernels
