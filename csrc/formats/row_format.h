// The numbers of the row formats.
#pragma once

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

// Whether tables of this format can be looked up and trained.
constexpr bool is_bag_format(RowFormat f) { return f <= RowFormat::kMx4 && f != RowFormat::kInt2; }
constexpr int kNumBagFormats = 8;

}  // namespace rec_kernels
