// expand and the sum of its gradients on the CPU.
#include "dense/expand.h"

#include <tuple>

#include "core/boxing.h"
#include "embedding_bag/cpu/numbered_rows.h"
#include "embedding_bag/cpu/sum_rows.h"
#include "jagged/cpu/jagged.h"

namespace rec_kernels {
namespace {

std::tuple<Tensor, Tensor> expand_cpu(const Tensor& x_in, const Tensor& inverse_in) {
  check_expand(x_in, inverse_in);
  const Tensor x = as_contiguous(x_in), inverse = as_contiguous(inverse_in);
  const int64_t count = inverse.size(0), columns = x.size(1);
  const int64_t bytes = columns * static_cast<int64_t>(x.element_size());
  check_indices(inverse, x.size(0), "inverse", "the rows of x");
  Tensor out = new_tensor(x, {count, columns}, x.scalar_type());
  if (count == 0 || bytes == 0) return {out, good_status(x)};
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const Integers rows(inverse);
  const auto copy_rows = kernels<NumberedRowsKernels>().copy_rows;
  parallel_shares(count, workers_for(count, 1 + kFewBytes / bytes), [&](int64_t begin, int64_t end, int64_t) {
    copy_rows(from, rows.data, rows.wide, bytes, bytes, to, begin, end);
  });
  return {out, good_status(x)};
}

Tensor expand_backward_cpu(const Tensor& grad_in, const Tensor& inverse_in, int64_t rows) {
  check_expand_backward(grad_in, inverse_in, rows);
  const Tensor grad = as_contiguous(grad_in), inverse = as_contiguous(inverse_in);
  const int64_t count = inverse.size(0), columns = grad.size(1);
  check_indices(inverse, rows, "inverse", "the rows");
  Tensor out = new_tensor(grad, {rows, columns}, ScalarType::Float);
  if (rows == 0 || columns == 0) return out;
  sum_rows(grad.const_data_ptr<float>(), columns, order_by_row(Integers(inverse), count, rows), rows, columns,
           out.mutable_data_ptr<float>(), columns);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) {
  implement<&expand_cpu>(m, "expand");
  implement<&expand_backward_cpu>(m, "expand_backward");
}

}  // namespace rec_kernels
