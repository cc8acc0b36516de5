// jagged_index_select. copy_rows.cu has the kernels.
#include "core/boxing.h"
#include "jagged/cuda/jagged.cuh"
#include "jagged/jagged_index_select.h"

namespace rec_kernels {
namespace {

std::tuple<Tensor, Tensor, Tensor> jagged_index_select_cuda(const Tensor& values_in, const Tensor& offsets_in,
                                                            const Tensor& index_in, std::optional<int64_t> total) {
  check_jagged_index_select(values_in, offsets_in, index_in, total);
  const OnDeviceOf device(values_in);
  const Tensor values = as_contiguous(values_in), offsets = as_contiguous(offsets_in), index = as_contiguous(index_in);
  Tensor status = new_jagged_status(values, device.stream());
  const Selection rows = select_rows(jagged_rows(values, offsets), index, offsets, total,
                                     status.mutable_data_ptr<int64_t>(), device.stream());
  const auto [output, output_offsets] = copied_rows(rows, values, offsets, device.stream());
  return {output, output_offsets, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) {
  implement<&jagged_index_select_cuda>(m, "jagged_index_select");
}

}  // namespace rec_kernels
