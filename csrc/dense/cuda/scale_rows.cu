// y[n, :] = scale[n] * x[n, :], and out[n] = dot(a[n, :], b[n, :]). Bytes moved: two rows read or written per row, so
// both are bound by memory; a warp takes a row, lanes take neighbouring columns.
#include "core/boxing.h"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "dense/scale_rows.h"

namespace rec_kernels {
namespace {

__global__ void __launch_bounds__(kThreads)
    scale_rows_kernel(const float* x, const float* scale, float* out, int64_t rows, int64_t columns) {
  const Group<kWarpSize> warp;
  for (int64_t n = Group<kWarpSize>::first(); n < rows; n += Group<kWarpSize>::stride()) {
    const float s = scale[n];
    for (int64_t c = warp.lane; c < columns; c += kWarpSize) out[n * columns + c] = s * x[n * columns + c];
  }
}

__global__ void __launch_bounds__(kThreads)
    row_dot_kernel(const float* a, const float* b, float* out, int64_t rows, int64_t columns) {
  const Group<kWarpSize> warp;
  for (int64_t n = Group<kWarpSize>::first(); n < rows; n += Group<kWarpSize>::stride()) {
    const float sum = warp_row_dot(a + n * columns, b + n * columns, columns, warp.lane);
    if (warp.lane == 0) out[n] = sum;
  }
}

Tensor scale_rows_cuda(const Tensor& x_in, const Tensor& scale_in) {
  check_scale_rows(x_in, scale_in);
  const OnDeviceOf device(x_in);
  const Tensor x = as_contiguous(x_in), scale = as_contiguous(scale_in);
  const int64_t rows = x.size(0), columns = x.size(1);
  Tensor out = new_tensor(x, {rows, columns}, ScalarType::Float);
  if (rows * columns == 0) return out;
  launch(scale_rows_kernel, blocks_for(rows, kWarpSize), dim3(kThreads), 0, device.stream(), x.const_data_ptr<float>(),
         scale.const_data_ptr<float>(), out.mutable_data_ptr<float>(), rows, columns);
  return out;
}

Tensor row_dot_cuda(const Tensor& a_in, const Tensor& b_in) {
  check_row_dot(a_in, b_in);
  const OnDeviceOf device(a_in);
  const Tensor a = as_contiguous(a_in), b = as_contiguous(b_in);
  const int64_t rows = a.size(0), columns = a.size(1);
  Tensor out = new_tensor(a, {rows}, ScalarType::Float);
  if (rows == 0) return out;
  launch(row_dot_kernel, blocks_for(rows, kWarpSize), dim3(kThreads), 0, device.stream(), a.const_data_ptr<float>(),
         b.const_data_ptr<float>(), out.mutable_data_ptr<float>(), rows, columns);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) {
  implement<&scale_rows_cuda>(m, "scale_rows");
  implement<&row_dot_cuda>(m, "row_dot");
}

}  // namespace rec_kernels
