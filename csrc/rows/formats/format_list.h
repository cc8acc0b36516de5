// The one list of row formats: their numbers, their types, the bytes of their rows.
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

// body(Format()) for the format, one of those that tables can have. The body runs where its caller does.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Body>
RK_HOST_DEVICE auto with_bag_format(RowFormat format, const Body& body) {
  switch (format) {
    case RowFormat::kFp16:
      return body(Fp16());
    case RowFormat::kBf16:
      return body(Bf16());
    case RowFormat::kInt8:
      return body(Int8());
    case RowFormat::kInt4:
      return body(Int4());
    case RowFormat::kMx9:
      return body(Mx9());
    case RowFormat::kMx6:
      return body(Mx6());
    case RowFormat::kMx4:
      return body(Mx4());
    default:
      return body(Fp32());
  }
}

// body(Format()) for any format.
template <class Body>
auto with_format(RowFormat format, const Body& body) {
  switch (format) {
    case RowFormat::kInt2:
      return body(Int2());
    case RowFormat::kMxFp8E4M3:
      return body(MxFp8E4M3());
    case RowFormat::kMxFp8E5M2:
      return body(MxFp8E5M2());
    case RowFormat::kMxFp6E3M2:
      return body(MxFp6E3M2());
    case RowFormat::kMxFp6E2M3:
      return body(MxFp6E2M3());
    case RowFormat::kMxFp4E2M1:
      return body(MxFp4E2M1());
    case RowFormat::kMxInt8:
      return body(MxInt8());
    default:
      return with_bag_format(format, body);
  }
}

// Bytes of a row of D columns. Not by with_format: nvcc has no lambdas for host and device at once.
RK_HOST_DEVICE int64_t row_bytes(RowFormat format, int64_t D) {
  switch (format) {
    case RowFormat::kFp32:
      return Fp32::row_bytes(D);
    case RowFormat::kFp16:
    case RowFormat::kBf16:
      return Fp16::row_bytes(D);
    case RowFormat::kInt8:
      return Int8::row_bytes(D);
    case RowFormat::kInt4:
      return Int4::row_bytes(D);
    case RowFormat::kInt2:
      return Int2::row_bytes(D);
    case RowFormat::kMx9:
      return Mx9::row_bytes(D);
    case RowFormat::kMx6:
      return Mx6::row_bytes(D);
    case RowFormat::kMx4:
      return Mx4::row_bytes(D);
    case RowFormat::kMxFp6E3M2:
    case RowFormat::kMxFp6E2M3:
      return MxFp6E3M2::row_bytes(D);
    case RowFormat::kMxFp4E2M1:
      return MxFp4E2M1::row_bytes(D);
    default:
      return MxFp8E4M3::row_bytes(D);
  }
}

}  // namespace RK_ISA
}  // namespace rec_kernels
