// Contract of quantize_rows, dequantize_rows and fake_quantize: conversion of float rows to a row format and back.
//
// quantize_rows. x [N, D] float32, float16 or bfloat16, 1 <= D < 2^31; the result is a new uint8 [N,
// row_bytes(format, D)], with zeros in unused bits. Rounding "nearest" or "stochastic"; the noise of an
// element depends on seed, step (0-dim int64 tensors on x's device; absent: 0), table, its row (first_row + n) and its
// column. scale_rule, of the block formats: "floor", "rceil", or absent: "floor" for nearest, "rceil" for stochastic.
// int8, int4 and int2 cannot encode NaN and Inf: `status`, int64 [1], is the smallest n * D + column of such an
// element, or INT64_MAX; the CPU raises instead. Such a row decodes to NaN. Not differentiable.
//
// dequantize_rows. The inverse, into a new [N, D] of a float dtype, rounded to nearest. docs/numerics.md has the maths.
//
// fake_quantize. Both in one op, from x [..., D] to a new tensor of x's shape and dtype; rows are counted over all
// leading dimensions. Without status: a row that the format cannot encode becomes NaN. Straight-through gradient
// (identity).
#pragma once

#include "core/boxing.h"
#include "core/philox.h"
#include "core/stable.h"
#include "rows/formats/format_list.h"

namespace rec_kernels {

// `argument`: name of the argument for error messages.
RowFormat parse_row_format(const std::string& name, const std::string& argument = "format");
const char* row_format_name(RowFormat format);

// Checked arguments of quantize_rows; seed and step point into their tensors.
struct QuantizeOptions {
  RowFormat format;
  bool stochastic;
  bool round_up;
  uint32_t table;
  int64_t first_row;
};
// Unchecked arguments of quantize_rows and fake_quantize.
struct QuantizeArguments {
  const Tensor& x;
  const std::string &format, &rounding;
  const OptionalTensor &seed, &step;
  int64_t table, first_row;
  const std::optional<std::string>& scale_rule;
};
template <>
struct ArgumentsOf<const QuantizeArguments&> {
  using types = Types<const Tensor&, const std::string&, const std::string&, const OptionalTensor&,
                      const OptionalTensor&, int64_t, int64_t, const std::optional<std::string>&>;
};
RK_EXPORT QuantizeOptions read_quantize(const QuantizeArguments& a);
// read_quantize() for x of at least one dimension.
QuantizeOptions read_fake_quantize(const QuantizeArguments& a);
RK_EXPORT RowFormat read_dequantize(const Tensor& rows, const std::string& format, int64_t embedding_dim);
// Inline, not exported: a ScalarType in a mangled symbol would tie the library to a version of torch.
inline void check_float_dtype(ScalarType dtype, const char* name) {
  check_value(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16, name,
              " must be float32, float16 or bfloat16, got ", dtype_name(dtype));
}
// The row format of a float dtype.
inline RowFormat float_format(ScalarType dtype) {
  if (dtype == ScalarType::Float) return RowFormat::kFp32;
  return dtype == ScalarType::Half ? RowFormat::kFp16 : RowFormat::kBf16;
}
// Throws for the non-finite `value` at `position` = n * D + column of x.
[[noreturn]] void throw_not_finite(RowFormat format, int64_t position, int64_t D, float value);

}  // namespace rec_kernels
