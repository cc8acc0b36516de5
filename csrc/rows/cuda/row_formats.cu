// quantize_rows and dequantize_rows. Bytes moved: every float and every encoded byte once (int8, int4 and int2 read the
// floats again from a cache), so both are memory bound.
#include "core/boxing.h"
#include "rows/cuda/writer.cuh"
#include "rows/row_formats.h"

namespace rec_kernels {
namespace {

struct QuantizeArgs {
  const void* x;
  ScalarType dtype;
  int64_t N, D, bytes, first_row;
  uint8_t* rows;
  const int64_t *seed, *step;  // null: 0
  uint32_t table;
  bool round_up, stochastic;
  int64_t* status;
};

// Loads x[n, c .. c+3], with zeros after column D.
__device__ __forceinline__ Vec4 load_floats(const QuantizeArgs& a, int64_t n, int64_t c) {
  Vec4 out = {};
  if (c >= a.D) return out;
  if (a.dtype == ScalarType::Float) {
    const float* row = static_cast<const float*>(a.x) + n * a.D;
    return load_columns(row, c, a.D, rows_aligned(row, a.D));
  }
  const auto* row = static_cast<const uint8_t*>(a.x) + 2 * n * a.D;
  const bool aligned = columns_aligned<Fp16>(row, a.D);
  return a.dtype == ScalarType::Half ? ColumnReader<Fp16>(row, a.D, aligned).read(c)
                                     : ColumnReader<Bf16>(row, a.D, aligned).read(c);
}

__device__ __forceinline__ void note_not_finite(const QuantizeArgs& a, int64_t n, int64_t c, const Vec4& x) {
  for (int j = 0; j < 4; ++j)
    if (c + j < a.D && x.v[j] - x.v[j] != 0.0f)
      atomicMin(reinterpret_cast<long long*>(a.status), static_cast<long long>(n * a.D + c + j));
}

// A group of lanes takes a row. Groups are in step: those after the last row read it again and write nothing.
template <class Format, int G>
__global__ void __launch_bounds__(kThreads) quantize_kernel(QuantizeArgs a) {
  const Group<G> group(Pace::kInStep);
  const Rounding how = {make_noise(a.seed ? *a.seed : 0, a.step ? *a.step : 0, {a.table, 0, 0}), a.round_up,
                        a.stochastic};
  const bool aligned = columns_aligned<Format>(a.rows, a.D);
  for (int64_t first = Group<G>::first(); first - group.in_warp() < a.N; first += Group<G>::stride()) {
    const bool there = first < a.N;
    const int64_t n = there ? first : a.N - 1;
    ColumnWriter<Format, G> writer{group, how, a.first_row + n, there ? a.D : 0, a.rows + n * a.bytes, aligned};
    bool finite = true;
    if constexpr (ColumnWriter<Format, G>::kScans) {
      for (int64_t c = 0; c < a.D; c += 4 * G) writer.scan(c + 4 * group.lane, load_floats(a, n, c + 4 * group.lane));
      finite = writer.close_scan();
    }
    for (int64_t c = 0; c < a.D; c += 4 * G) {
      const Vec4 x = load_floats(a, n, c + 4 * group.lane);
      if (!finite) note_not_finite(a, n, c + 4 * group.lane, x);
      writer.write(c + 4 * group.lane, x);
    }
  }
}

struct DequantizeArgs {
  const uint8_t* rows;
  int64_t N, D, bytes;
  void* out;
  ScalarType dtype;
};

// Reads columns c .. c+3 of a row at any address: unaligned floats are read byte by byte.
template <class Format>
__device__ __forceinline__ Vec4 read_anywhere(const ColumnReader<Format>& reader, int64_t c) {
  if constexpr (std::is_same<Format, Fp32>::value) {
    if (reinterpret_cast<uintptr_t>(reader.row) % alignof(float) != 0) {
      Vec4 out = {};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (c + j < reader.D) out.v[j] = float_of(load_little<4>(reader.row + 4 * (c + j), false));
      return out;
    }
  }
  return reader.read(c);
}

// A group of lanes takes a row.
template <class Format, int G>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(DequantizeArgs a) {
  const Group<G> group;
  const bool aligned = columns_aligned<Format>(a.rows, a.D);
  for (int64_t n = Group<G>::first(); n < a.N; n += Group<G>::stride()) {
    const ColumnReader<Format> reader(a.rows + n * a.bytes, a.D, aligned);
    for (int64_t c = 4 * group.lane; c < a.D; c += 4 * G) {
      const Vec4 x = read_anywhere(reader, c);
      if (a.dtype == ScalarType::Float) {
        float* out = static_cast<float*>(a.out) + n * a.D;
        store_columns(out, c, a.D, rows_aligned(out, a.D), x);
      } else {
        store_halves(static_cast<uint8_t*>(a.out) + 2 * n * a.D, c, a.D, a.dtype == ScalarType::Half, x);
      }
    }
  }
}

__global__ void no_bad_position_kernel(int64_t* status) { *status = INT64_MAX; }

std::tuple<Tensor, Tensor> quantize_rows_cuda(const QuantizeArguments& given) {
  const QuantizeOptions options = read_quantize(given);
  const OnDeviceOf device(given.x);
  const Tensor x = as_contiguous(given.x);
  const int64_t N = x.size(0), D = x.size(1), bytes = row_bytes(options.format, D);
  Tensor rows = new_tensor(x, {N, bytes}, ScalarType::Byte), status = new_tensor(x, {1}, ScalarType::Long);
  const QuantizeArgs a{x.const_data_ptr(),
                       x.scalar_type(),
                       N,
                       D,
                       bytes,
                       options.first_row,
                       rows.mutable_data_ptr<uint8_t>(),
                       given.seed ? given.seed->const_data_ptr<int64_t>() : nullptr,
                       given.step ? given.step->const_data_ptr<int64_t>() : nullptr,
                       options.table,
                       options.round_up,
                       options.stochastic,
                       status.mutable_data_ptr<int64_t>()};
  launch_one(device.stream(), no_bad_position_kernel, a.status);
  if (N == 0) return {rows, status};
  with_format(options.format, [&](auto f) {
    with_row_lanes(D, [&](auto lanes) {
      using Format = decltype(f);
      launch_for(N, lanes, device.stream(), quantize_kernel<Format, lanes>, a);
    });
  });
  return {rows, status};
}

Tensor dequantize_rows_cuda(const Tensor& rows_in, const std::string& format, int64_t embedding_dim, ScalarType dtype) {
  const RowFormat number = read_dequantize(rows_in, format, embedding_dim);
  check_float_dtype(dtype, "dtype");
  const OnDeviceOf device(rows_in);
  const Tensor rows = as_contiguous(rows_in);
  const int64_t N = rows.size(0), D = embedding_dim;
  Tensor out = new_tensor(rows, {N, D}, dtype);
  if (N == 0) return out;
  const DequantizeArgs a{rows.const_data_ptr<uint8_t>(), N, D, rows.size(1), out.mutable_data_ptr(), dtype};
  with_format(number, [&](auto f) {
    with_row_lanes(
        D, [&](auto lanes) { launch_for(N, lanes, device.stream(), dequantize_kernel<decltype(f), lanes>, a); });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) {
  implement<&quantize_rows_cuda>(m, "quantize_rows");
  implement<&dequantize_rows_cuda>(m, "dequantize_rows");
}

}  // namespace rec_kernels
