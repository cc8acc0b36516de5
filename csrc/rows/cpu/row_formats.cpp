// quantize_rows, dequantize_rows and fake_quantize on the CPU.
#include "rows/cpu/row_formats.h"

#include <atomic>

#include "core/boxing.h"
#include "core/cpu/parallel.h"
#include "core/cpu/scratch.h"
#include "rows/row_formats.h"

namespace rec_kernels {
namespace {

// Minimum rows per thread: about 256 KiB of floats.
int64_t few_rows(int64_t D) { return 1 + 65536 / D; }

// Rows per batch that is converted in scratch memory, which fits in the cache.
int64_t rows_in_scratch(int64_t D) { return 1 + 4096 / D; }

int float_number(ScalarType dtype) { return static_cast<int>(float_format(dtype)); }

// Rows of x as float32: in place, or converted into `scratch`.
class FloatRows {
 public:
  explicit FloatRows(const Tensor& x)
      : data_(static_cast<const uint8_t*>(x.const_data_ptr())), D_(x.size(x.dim() - 1)), bytes_(x.element_size()) {
    if (bytes_ == 2) decode_ = kernels<RowFormatKernels>().decode[float_number(x.scalar_type())];
  }
  const float* row(int64_t n, float* scratch) const { return rows(n, 1, scratch); }
  // Returns rows [n, n + count), contiguous.
  const float* rows(int64_t n, int64_t count, float* scratch) const {
    const uint8_t* at = data_ + n * D_ * bytes_;
    if (!decode_) return reinterpret_cast<const float*>(at);
    decode_(at, count, D_, scratch);
    return scratch;
  }
  // Index of the first non-finite element of row n.
  int64_t not_finite(int64_t n, float* scratch) const {
    const float* x = row(n, scratch);
    int64_t c = 0;
    while (c < D_ && x[c] - x[c] == 0.0f) ++c;
    return c;
  }

 private:
  const uint8_t* data_;
  int64_t D_;
  int64_t bytes_;
  RowFormatKernels::DecodeRows decode_ = nullptr;
};

// Decodes rows into a float dtype; `scratch`, of rows_in_scratch(D) rows, is used for half precision.
class RowDecoder {
 public:
  RowDecoder(RowFormat format, int64_t D, const Tensor& out)
      : decode_(kernels<RowFormatKernels>().decode[static_cast<int>(format)]),
        out_(static_cast<uint8_t*>(out.mutable_data_ptr())),
        D_(D),
        row_bytes_(row_bytes(format, D)),
        bytes_(out.element_size()) {
    if (bytes_ == 2) narrow_ = kernels<RowFormatKernels>().nearest[float_number(out.scalar_type())];
  }
  // Decodes `count` rows at `rows` into output rows [n, n + count).
  void decode(const uint8_t* rows, int64_t n, int64_t count, float* scratch) const {
    uint8_t* to = out_ + n * D_ * bytes_;
    if (!narrow_) return decode_(rows, count, D_, reinterpret_cast<float*>(to));
    for (const int64_t most = rows_in_scratch(D_); count > 0; count -= most, rows += most * row_bytes_) {
      const int64_t here = count < most ? count : most;
      decode_(rows, here, D_, scratch);
      narrow_(scratch, here, D_, RowRounding{}, {to, 0, nullptr});
      to += here * D_ * bytes_;
    }
  }

 private:
  RowFormatKernels::DecodeRows decode_;
  uint8_t* out_;
  int64_t D_;
  int64_t row_bytes_;
  int64_t bytes_;
  RowFormatKernels::EncodeRows narrow_ = nullptr;
};

int64_t value_or_zero(const OptionalTensor& t) { return t ? *t->const_data_ptr<int64_t>() : 0; }

RowRounding row_rounding(const QuantizeOptions& options, const QuantizeArguments& a) {
  return {make_noise(value_or_zero(a.seed), value_or_zero(a.step), {options.table, 0, 0}), options.round_up};
}

RowFormatKernels::EncodeRows rows_encoder(const QuantizeOptions& options) {
  const auto& k = kernels<RowFormatKernels>();
  return (options.stochastic ? k.stochastic : k.nearest)[static_cast<int>(options.format)];
}

std::tuple<Tensor, Tensor> quantize_rows_cpu(const QuantizeArguments& a) {
  const QuantizeOptions options = read_quantize(a);
  const Tensor x = as_contiguous(a.x);
  const int64_t N = x.size(0), D = x.size(1), bytes = row_bytes(options.format, D), few = few_rows(D);
  Tensor rows = new_tensor(x, {N, bytes}, ScalarType::Byte), status = new_tensor(x, {1}, ScalarType::Long);
  const RowFormatKernels::EncodeRows encode = rows_encoder(options);
  const RowRounding how = row_rounding(options, a);
  const FloatRows from(x);
  auto* to = rows.mutable_data_ptr<uint8_t>();
  std::atomic<int64_t> first_bad{N};
  const int64_t at_once = x.element_size() == 4 ? few : rows_in_scratch(D);
  parallel_shares(N, workers_for(N, few), [&](int64_t begin, int64_t end, int64_t) {
    const Scratch<float> scratch(x.element_size() == 4 ? 0 : at_once * D);
    for (int64_t n = begin; n < end; n += at_once) {
      const int64_t count = end - n < at_once ? end - n : at_once;
      const RowPlaces places{to + n * bytes, options.first_row + n, nullptr};
      const int64_t bad = encode(from.rows(n, count, scratch.get()), count, D, how, places);
      if (bad == count) continue;
      int64_t first = first_bad.load();
      while (n + bad < first && !first_bad.compare_exchange_weak(first, n + bad)) {
      }
    }
  });
  const int64_t bad = first_bad.load();
  if (bad < N) {
    const Scratch<float> scratch(D);
    const int64_t column = from.not_finite(bad, scratch.get());
    throw_not_finite(options.format, bad * D + column, D, from.row(bad, scratch.get())[column]);
  }
  *status.mutable_data_ptr<int64_t>() = INT64_MAX;
  return {rows, status};
}

Tensor dequantize_rows_cpu(const Tensor& rows_in, const std::string& format, int64_t embedding_dim, ScalarType dtype) {
  const RowFormat f = read_dequantize(rows_in, format, embedding_dim);
  check_float_dtype(dtype, "dtype");
  const Tensor rows = as_contiguous(rows_in);
  const int64_t N = rows.size(0), D = embedding_dim, bytes = rows.size(1), few = few_rows(D);
  Tensor out = new_tensor(rows, {N, D}, dtype);
  const RowDecoder decoder(f, D, out);
  const uint8_t* from = rows.const_data_ptr<uint8_t>();
  parallel_shares(N, workers_for(N, few), [&](int64_t begin, int64_t end, int64_t) {
    const Scratch<float> scratch(dtype == ScalarType::Float ? 0 : rows_in_scratch(D) * D);
    decoder.decode(from + begin * bytes, begin, end - begin, scratch.get());
  });
  return out;
}

Tensor fake_quantize_cpu(const QuantizeArguments& a) {
  const QuantizeOptions options = read_fake_quantize(a);
  const Tensor x = as_contiguous(a.x);
  const int64_t D = x.size(x.dim() - 1), N = x.numel() / D, few = few_rows(D);
  Tensor out = new_tensor(x, x.sizes(), x.scalar_type());
  const RowFormatKernels::EncodeRows encode = rows_encoder(options);
  const RowRounding how = row_rounding(options, a);
  const FloatRows from(x);
  const RowDecoder decoder(options.format, D, out);
  const int64_t bytes = row_bytes(options.format, D), at_once = rows_in_scratch(D);
  parallel_shares(N, workers_for(N, few), [&](int64_t begin, int64_t end, int64_t) {
    const Scratch<float> scratch(at_once * D);
    const Scratch<uint8_t> rows(at_once * bytes);
    for (int64_t n = begin; n < end; n += at_once) {
      const int64_t count = end - n < at_once ? end - n : at_once;
      // A row that the format cannot encode becomes NaN.
      encode(from.rows(n, count, scratch.get()), count, D, how, {rows.get(), options.first_row + n, nullptr});
      decoder.decode(rows.get(), n, count, scratch.get());
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) {
  implement<&quantize_rows_cpu>(m, "quantize_rows");
  implement<&dequantize_rows_cpu>(m, "dequantize_rows");
  implement<&fake_quantize_cpu>(m, "fake_quantize");
}

}  // namespace rec_kernels
