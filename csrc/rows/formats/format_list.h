// The list of row formats: enum values, types and row sizes.
#pragma once

#include "rows/formats/affine_integers.h"
#include "rows/formats/floats.h"
#include "rows/formats/microscaling.h"
#include "rows/formats/shared_microexponents.h"

namespace rec_kernels {

enum class RowFormat {
  kFp32,
  kFp16,
  kBf16,
  kInt8,
  kInt4,
  kInt2,
  kMx9,
  kMx6,
  kMx4,
  kMxFp8E4M3,
  kMxFp8E5M2,
  kMxFp6E3M2,
  kMxFp6E2M3,
  kMxFp4E2M1,
  kMxInt8,
};
constexpr int kNumRowFormats = 15;

// True if tables of this format can be looked up and trained.
constexpr bool is_bag_format(RowFormat f) { return f <= RowFormat::kMx4 && f != RowFormat::kInt2; }
constexpr int kNumBagFormats = 8;

inline namespace RK_ISA {

// Use<Fp32, Fp16, ...>, in the order of RowFormat.
template <template <class...> class Use>
using WithAllFormats = Use<Fp32, Fp16, Bf16, Int8, Int4, Int2, Mx9, Mx6, Mx4, MxFp8E4M3, MxFp8E5M2, MxFp6E3M2,
                           MxFp6E2M3, MxFp4E2M1, MxInt8>;

// Calls body(Format()) for a format of tables, on the host or device of the caller.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Body>
RK_HOST_DEVICE auto with_bag_format(RowFormat format, const Body& body) {
  if (format == RowFormat::kFp16) return body(Fp16());
  if (format == RowFormat::kBf16) return body(Bf16());
  if (format == RowFormat::kInt8) return body(Int8());
  if (format == RowFormat::kInt4) return body(Int4());
  if (format == RowFormat::kMx9) return body(Mx9());
  if (format == RowFormat::kMx6) return body(Mx6());
  if (format == RowFormat::kMx4) return body(Mx4());
  return body(Fp32());
}

// Calls body(Format()) for any format.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Body>
RK_HOST_DEVICE auto with_format(RowFormat format, const Body& body) {
  if (format == RowFormat::kInt2) return body(Int2());
  if (format == RowFormat::kMxFp8E4M3) return body(MxFp8E4M3());
  if (format == RowFormat::kMxFp8E5M2) return body(MxFp8E5M2());
  if (format == RowFormat::kMxFp6E3M2) return body(MxFp6E3M2());
  if (format == RowFormat::kMxFp6E2M3) return body(MxFp6E2M3());
  if (format == RowFormat::kMxFp4E2M1) return body(MxFp4E2M1());
  if (format == RowFormat::kMxInt8) return body(MxInt8());
  return with_bag_format(format, body);
}

// Bytes of a row of D columns. A functor, since nvcc has no lambdas for both host and device.
struct BytesOfRow {
  int64_t D;
  template <class Format>
  RK_HOST_DEVICE int64_t operator()(Format) const {
    return Format::row_bytes(D);
  }
};
RK_HOST_DEVICE int64_t row_bytes(RowFormat format, int64_t D) { return with_format(format, BytesOfRow{D}); }

}  // namespace RK_ISA
}  // namespace rec_kernels
