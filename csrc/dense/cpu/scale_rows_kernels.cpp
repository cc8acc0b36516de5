// Compiled once per instruction set: no torch header and no std template here (core/host_device.h says why).
#include "dense/cpu/scale_rows.h"
#include "rows/cpu/statistics.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

void scale_rows(const float* x, const float* scale, float* out, int64_t columns, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    const float* row = x + n * columns;
    float* result = out + n * columns;
    const Vec s = Vec::broadcast(scale[n]);
    int64_t c = 0;
    for (; c + W <= columns; c += W) (s * Vec::load(row + c)).store(result + c);
    if (c < columns) {
      const int rest = static_cast<int>(columns - c);
      (s * Vec::load_partial(row + c, rest)).store_partial(result + c, rest);
    }
  }
}

void row_dots(const float* a, const float* b, float* out, int64_t columns, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) out[n] = row_dot(a + n * columns, b + n * columns, columns);
}

}  // namespace
}  // namespace RK_ISA

template <>
const ScaleRowsKernels ScaleRowsKernels::table<CpuIsa::RK_ISA> = {RK_ISA::scale_rows, RK_ISA::row_dots};

}  // namespace rec_kernels
