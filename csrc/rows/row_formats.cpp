#include "rows/row_formats.h"

#include "core/schema.h"

namespace rec_kernels {
namespace {

// Names in the order of RowFormat.
constexpr const char* kNames[kNumRowFormats] = {"fp32",       "fp16",       "bf16",       "int8",       "int4",
                                                "int2",       "mx9",        "mx6",        "mx4",        "mxfp8_e4m3",
                                                "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8"};

void check_scalar(const OptionalTensor& t, const Tensor& x, const char* name) {
  if (!t) return;
  check(*t, name).rank(0).dtype(ScalarType::Long).on_device_of(x, "x");
}

}  // namespace

RowFormat parse_row_format(const std::string& name, const std::string& argument) {
  std::string known;
  for (int f = 0; f < kNumRowFormats; ++f) {
    if (name == kNames[f]) return static_cast<RowFormat>(f);
    known += (f ? ", " : "") + std::string(kNames[f]);
  }
  throw_value_error(join(argument, " must be one of ", known, "; got \"", name, "\""));
}

const char* row_format_name(RowFormat format) { return kNames[static_cast<int>(format)]; }

QuantizeOptions read_quantize(const QuantizeArguments& a) {
  parse_row_format(a.format);  // reports an unknown format before a wrong shape
  check(a.x, "x").rank(2);
  check_value(a.x.size(1) <= INT32_MAX, "x must have fewer than 2^31 columns, got shape ", shape_of(a.x));
  return read_fake_quantize(a);
}

QuantizeOptions read_fake_quantize(const QuantizeArguments& a) {
  const Tensor& x = a.x;
  const std::optional<std::string>& rule = a.scale_rule;
  const RowFormat f = parse_row_format(a.format);
  check_float_dtype(x.scalar_type(), "x");
  check_value(x.dim() >= 1 && x.size(x.dim() - 1) >= 1, "x must have at least one column, got shape ", shape_of(x));
  const int64_t rows = x.numel() / x.size(x.dim() - 1);
  const bool stochastic = parse_choice(a.rounding, "rounding", "nearest", "stochastic");
  check_value(!rule || *rule == "floor" || *rule == "rceil", "scale_rule must be \"floor\", \"rceil\" or None, got \"",
              rule.value_or(""), "\"");
  check_scalar(a.seed, x, "seed");
  check_scalar(a.step, x, "step");
  check_value(a.table >= 0 && a.table < kMaxTableId, "table = ", a.table, " must be in [0, ", kMaxTableId, ")");
  check_value(a.first_row >= 0 && a.first_row <= kMaxNoisyRows - rows, "first_row = ", a.first_row,
              " must be in [0, 2^44 - ", rows, "]");
  return {f, stochastic, rule ? *rule == "rceil" : stochastic, static_cast<uint32_t>(a.table), a.first_row};
}

RowFormat read_dequantize(const Tensor& rows, const std::string& format, int64_t embedding_dim) {
  const RowFormat f = parse_row_format(format);
  check(rows, "rows").rank(2).dtype(ScalarType::Byte);
  check_value(embedding_dim >= 1 && embedding_dim <= INT32_MAX, "embedding_dim = ", embedding_dim,
              " must be in [1, 2^31)");
  const int64_t want = row_bytes(f, embedding_dim);
  check_value(rows.size(1) == want, "rows must be ", want, " bytes wide for format \"", format,
              "\" and embedding_dim = ", embedding_dim, ", got ", rows.size(1));
  return f;
}

void throw_not_finite(RowFormat format, int64_t position, int64_t D, float value) {
  // Print NaN without its sign.
  const std::string shown = value == value ? join(value) : "nan";
  throw_value_error(join("x[", position / D, ", ", position % D, "] = ", shown, ": format \"", row_format_name(format),
                         "\" holds finite numbers only"));
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m,
         "quantize_rows(Tensor x, str format, str rounding=\"nearest\", Tensor? seed=None, Tensor? step=None, "
         "int table=0, SymInt first_row=0, str? scale_rule=None) -> (Tensor rows, Tensor status)");
  define(m, "dequantize_rows(Tensor rows, str format, SymInt embedding_dim, ScalarType dtype) -> Tensor");
  define(m,
         "fake_quantize(Tensor x, str format, str rounding=\"nearest\", Tensor? seed=None, Tensor? step=None, "
         "int table=0, SymInt first_row=0, str? scale_rule=None) -> Tensor");
}

}  // namespace rec_kernels
