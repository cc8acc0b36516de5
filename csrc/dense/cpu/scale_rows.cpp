#include "dense/cpu/scale_rows.h"

#include "core/boxing.h"
#include "core/cpu/parallel.h"
#include "dense/scale_rows.h"

namespace rec_kernels {
namespace {

// Minimum rows per thread: about 64 KiB.
int64_t few_rows(int64_t columns) { return 1 + 16384 / (columns + 1); }

Tensor scale_rows_cpu(const Tensor& x_in, const Tensor& scale_in) {
  check_scale_rows(x_in, scale_in);
  const Tensor x = as_contiguous(x_in), scale = as_contiguous(scale_in);
  const int64_t rows = x.size(0), columns = x.size(1), few = few_rows(columns);
  Tensor out = new_tensor(x, {rows, columns}, ScalarType::Float);
  const float *x_data = x.const_data_ptr<float>(), *scale_data = scale.const_data_ptr<float>();
  float* out_data = out.mutable_data_ptr<float>();
  parallel_shares(rows, workers_for(rows, few), [&](int64_t begin, int64_t end, int64_t) {
    kernels<ScaleRowsKernels>().scale_rows(x_data, scale_data, out_data, columns, begin, end);
  });
  return out;
}

Tensor row_dot_cpu(const Tensor& a_in, const Tensor& b_in) {
  check_row_dot(a_in, b_in);
  const Tensor a = as_contiguous(a_in), b = as_contiguous(b_in);
  const int64_t rows = a.size(0), columns = a.size(1), few = few_rows(columns);
  Tensor out = new_tensor(a, {rows}, ScalarType::Float);
  const float *a_data = a.const_data_ptr<float>(), *b_data = b.const_data_ptr<float>();
  float* out_data = out.mutable_data_ptr<float>();
  parallel_shares(rows, workers_for(rows, few), [&](int64_t begin, int64_t end, int64_t) {
    kernels<ScaleRowsKernels>().row_dot(a_data, b_data, out_data, columns, begin, end);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) {
  implement<&scale_rows_cpu>(m, "scale_rows");
  implement<&row_dot_cpu>(m, "row_dot");
}

}  // namespace rec_kernels
