// Compiled once per instruction set: no torch header and no std template here (core/host_device.h says why).
//
// The operands of a sample fit in the L1 cache: x, and x^T y or its transpose, whichever has the lanes of the next
// product as columns.
#include "dense/cpu/factorization_machine.h"
#include "dense/cpu/small_product.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// Rows of a matrix padded with zeros to whole registers: in place if they have that width, else copied to `memory`.
const float* whole_registers(const float* matrix, int64_t rows, int64_t columns, float* memory) {
  const int64_t stride = padded(columns);
  if (stride == columns) return matrix;
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = matrix + r * columns;
    float* to = memory + r * stride;
    int64_t c = 0;
    for (; c + W <= columns; c += W) Vec::load(from + c).store(to + c);
    Vec::load_partial(from + c, static_cast<int>(columns - c)).store(to + c);
  }
  return memory;
}

// out [rows, columns] = left times right [terms, columns]; the rows of right are whole registers.
void multiply_into(float* out, int64_t out_stride, const float* left, int64_t down, int64_t across, int64_t terms,
                   const float* right, int64_t rows, int64_t columns) {
  multiply({left, down, across, right, padded(columns), terms, out, out + out_stride, out_stride}, rows, columns);
}

int64_t forward_scratch(const FactorizationShape& s) { return (s.F + s.D) * padded(s.K); }

void forward(const FactorizationShape& s, SampleRows<const float> x, SampleRows<const float> y, SampleRows<float> out,
             int64_t samples, float* scratch) {
  const int64_t F = s.F, D = s.D, K = s.K, width = padded(K);
  float *y_memory = scratch, *inner = scratch + F * width;
  const float* y_rows = nullptr;
  for (int64_t b = 0; b < samples; ++b) {
    if (b == 0 || y.stride) y_rows = whole_registers(y[b], F, K, y_memory);
    multiply_into(inner, width, x[b], 1, D, F, y_rows, D, width);
    multiply_into(out[b], K, x[b], D, 1, D, inner, F, K);
  }
}

int64_t backward_scratch(const FactorizationShape& s) {
  return s.F * (padded(s.D) + padded(s.K) + 3 * s.K) + s.D * padded(s.K) + 2 * s.K * padded(s.D);
}

// P = x^T y and Q = x^T grad, the gradient of P. The gradient of x is grad P^T + y Q^T, that of y is x Q.
void backward(const FactorizationShape& s, SampleRows<const float> grad, SampleRows<const float> x,
              SampleRows<const float> y, SampleRows<float> grad_x, SampleRows<float> grad_y, int64_t samples,
              float* scratch) {
  const int64_t F = s.F, D = s.D, K = s.K, x_width = padded(D), y_width = padded(K);
  float *x_memory = scratch, *grad_memory = x_memory + F * x_width;
  float *factors = grad_memory + F * y_width, *inner = factors + F * 2 * K, *transposed = inner + D * y_width;
  float* sums = transposed + 2 * K * x_width;
  for (int64_t b = 0; b < samples; ++b) {
    const float *x_rows = whole_registers(x[b], F, D, x_memory),
                *grad_rows = whole_registers(grad[b], F, K, grad_memory);
    // The gradient of x as one product: [grad, y] times [P^T; Q^T].
    for (int64_t f = 0; f < F; ++f) {
      __builtin_memcpy(factors + f * 2 * K, grad[b] + f * K, static_cast<size_t>(K) * 4);
      __builtin_memcpy(factors + f * 2 * K + K, y[b] + f * K, static_cast<size_t>(K) * 4);
    }
    multiply_into(transposed, x_width, y[b], 1, K, F, x_rows, K, x_width);
    multiply_into(transposed + K * x_width, x_width, grad[b], 1, K, F, x_rows, K, x_width);
    multiply_into(grad_x[b], D, factors, 2 * K, 1, 2 * K, transposed, F, D);
    multiply_into(inner, y_width, x[b], 1, D, F, grad_rows, D, y_width);
    multiply_into(grad_y.stride ? grad_y[b] : sums, K, x[b], D, 1, D, inner, F, K);
    if (grad_y.stride) continue;  // y is not shared
    float* to = grad_y[b];
    for (int64_t i = 0; i < F * K; ++i) to[i] += sums[i];
  }
}

}  // namespace
}  // namespace RK_ISA

template <>
const FactorizationMachineKernels FactorizationMachineKernels::table<CpuIsa::RK_ISA> = {
    RK_ISA::forward_scratch, RK_ISA::forward, RK_ISA::backward_scratch, RK_ISA::backward};

}  // namespace rec_kernels
