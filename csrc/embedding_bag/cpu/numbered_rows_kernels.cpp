// Compiled once per instruction set: no torch header and no std template here (core/host_device.h says why).
#include "core/cpu/simd.h"
#include "embedding_bag/cpu/numbered_rows.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// Copies raw bytes in words of four; the remainder of 2-byte elements is copied byte by byte.
RK_HOST_DEVICE void copy_row(const char* from, char* to, int64_t bytes) {
  const auto* x = reinterpret_cast<const float*>(from);
  auto* out = reinterpret_cast<float*>(to);
  const int64_t words = bytes / 4;
  int64_t c = 0;
  for (; c + W <= words; c += W) Vec::load(x + c).store(out + c);
  if (c < words) {
    const int rest = static_cast<int>(words - c);
    Vec::load_partial(x + c, rest).store_partial(out + c, rest);
  }
  for (int64_t i = 4 * words; i < bytes; ++i) to[i] = from[i];
}

template <class Index>
void gather_rows(const char* rows, const Index* indices, int64_t bytes, int64_t stride, char* out, int64_t begin,
                 int64_t end) {
  for (int64_t i = begin; i < end; ++i) copy_row(rows + indices[i] * stride, out + i * stride, bytes);
}

void copy_rows(const char* rows, const void* indices, bool wide, int64_t bytes, int64_t stride, char* out,
               int64_t begin, int64_t end) {
  if (wide) gather_rows(rows, static_cast<const int64_t*>(indices), bytes, stride, out, begin, end);
  else gather_rows(rows, static_cast<const int32_t*>(indices), bytes, stride, out, begin, end);
}

// Registers per block of columns, and prefetch distance in rows.
constexpr int kRegisters = 4;
constexpr int64_t kAhead = 8;

RK_HOST_DEVICE const float* row_of(const float* rows, const int64_t* order, int64_t i, int64_t stride) {
  return rows + (order ? order[i] : i) * stride;
}

// Sums a block of kVecs * W columns of all rows.
template <int kVecs>
RK_HOST_DEVICE void sum_columns(const float* rows, const int64_t* order, int64_t count, int64_t stride, float* out) {
  Vec sum[kVecs];
  const float* first = row_of(rows, order, 0, stride);
  for (int k = 0; k < kVecs; ++k) sum[k] = Vec::load(first + k * W);
  for (int64_t i = 1; i < count; ++i) {
    if (order && i + kAhead < count) prefetch_bytes(rows + order[i + kAhead] * stride, kVecs * W * 4);
    const float* row = row_of(rows, order, i, stride);
    for (int k = 0; k < kVecs; ++k) sum[k] = sum[k] + Vec::load(row + k * W);
  }
  for (int k = 0; k < kVecs; ++k) sum[k].store(out + k * W);
}

RK_HOST_DEVICE void sum_last_columns(const float* rows, const int64_t* order, int64_t count, int64_t stride, float* out,
                                     int rest) {
  Vec sum = Vec::load_partial(row_of(rows, order, 0, stride), rest);
  for (int64_t i = 1; i < count; ++i) sum = sum + Vec::load_partial(row_of(rows, order, i, stride), rest);
  sum.store_partial(out, rest);
}

void sum_rows(const float* rows, const int64_t* order, int64_t count, int64_t columns, int64_t stride, float* out) {
  int64_t c = 0;
  for (; c + kRegisters * W <= columns; c += kRegisters * W)
    sum_columns<kRegisters>(rows + c, order, count, stride, out + c);
  for (; c + W <= columns; c += W) sum_columns<1>(rows + c, order, count, stride, out + c);
  if (c < columns) sum_last_columns(rows + c, order, count, stride, out + c, static_cast<int>(columns - c));
}

}  // namespace
}  // namespace RK_ISA

template <>
const NumberedRowsKernels NumberedRowsKernels::table<CpuIsa::RK_ISA> = {RK_ISA::copy_rows, RK_ISA::sum_rows};

}  // namespace rec_kernels
