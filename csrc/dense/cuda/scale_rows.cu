// y[n, :] = scale[n] * x[n, :], and out[n] = dot(a[n, :], b[n, :]). A group of lanes takes a row, a lane one word at a
// time: four floats if rows are aligned. Bytes moved: two rows read or written per row, so both ops are memory bound,
// and a lane loads words of kRows rows before it waits for the first. The rows of a warp are consecutive.
#include <type_traits>

#include "core/boxing.h"
#include "core/cuda/launch.h"
#include "core/cuda/warp_dot.cuh"
#include "core/cuda/words.cuh"
#include "dense/scale_rows.h"

namespace rec_kernels {
namespace {

constexpr int kRows = 4;  // 16 registers of words

// Rows that a group of G lanes processes together: first + u * kStep for u < kRows. A warp covers kSpan consecutive
// rows.
template <int G>
struct RowsOfGroup {
  static constexpr int kStep = kWarpSize / G, kSpan = kRows * kStep;

  // First row of the warp, and the distance to its next rows.
  __device__ __forceinline__ static int64_t first() { return Group<kWarpSize>::first() * kSpan; }
  __device__ __forceinline__ static int64_t stride() { return Group<kWarpSize>::stride() * kSpan; }
};

// Blocks for rows of `lanes` lanes each: kRows rows per group, without a grid-stride loop, since starting blocks
// balances load better and a lane has enough loads in flight.
inline dim3 blocks_for_rows(int64_t rows, int lanes) { return capped_grid(kMostBlocks, ceil_div(rows, kRows), lanes); }

__device__ __forceinline__ float scaled(float s, float x) { return s * x; }
__device__ __forceinline__ float4 scaled(float s, float4 x) { return make_float4(s * x.x, s * x.y, s * x.z, s * x.w); }

// Rows of `words` words. Past the end, the last row is read again: conditional loads would be serialized.
template <class Word, int G>
__global__ void __launch_bounds__(kThreads)
    scale_rows_kernel(const float* x, const float* scale, float* out, int64_t rows, int64_t words) {
  using Rows = RowsOfGroup<G>;
  const Group<G> group;
  for (int64_t base = Rows::first(); base < rows; base += Rows::stride()) {
    const int64_t first = base + Group<G>::in_warp();
    int64_t row[kRows];
    float s[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t n = first + u * Rows::kStep;
      row[u] = n < rows ? n : rows - 1;
      s[u] = scale[row[u]];
    }
#pragma unroll 1
    for (int64_t c = group.lane; c < words; c += G) {
      Word word[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) word[u] = load_word<Word>(x, row[u] * words + c);
#pragma unroll
      for (int u = 0; u < kRows; ++u)
        if (first + u * Rows::kStep < rows) store_word(out, row[u] * words + c, scaled(s[u], word[u]));
    }
  }
}

// For aligned rows; if G is less than a warp, rows have at most 4 * G columns. The order is that of warp_row_dot().
template <int G>
__global__ void __launch_bounds__(kThreads)
    row_dot_kernel(const float* a, const float* b, float* out, int64_t rows, int64_t columns) {
  using Rows = RowsOfGroup<G>;
  const Group<G> group(Pace::kInStep);
  for (int64_t base = Rows::first(); base < rows; base += Rows::stride()) {
    const int64_t first = base + Group<G>::in_warp();
    float s[kRows][4] = {};
#pragma unroll 1
    for (int64_t c = 4 * group.lane; c < columns; c += 4 * G) {
      Vec4 left[kRows], right[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const int64_t n = first + u * Rows::kStep, row = (n < rows ? n : rows - 1) * columns;
        left[u] = load_columns(a + row, c, columns, true);
        right[u] = load_columns(b + row, c, columns, true);
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u)
        for (int j = 0; j < 4; ++j) s[u][j] = fused_multiply_add(left[u].v[j], right[u].v[j], s[u][j]);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const float sum = sum_partials(s[u], group);
      const int64_t n = first + u * Rows::kStep;
      if (group.lane == 0 && n < rows) out[n] = sum;
    }
  }
}

// For unaligned rows.
__global__ void __launch_bounds__(kThreads)
    row_dot_unaligned_kernel(const float* a, const float* b, float* out, int64_t rows, int64_t columns) {
  const Group<kWarpSize> warp;
  for (int64_t n = Group<kWarpSize>::first(); n < rows; n += Group<kWarpSize>::stride()) {
    const float sum = warp_row_dot(a + n * columns, b + n * columns, columns, warp);
    if (warp.lane == 0) out[n] = sum;
  }
}

template <class Word>
void launch_scale_rows(const float* x, const float* scale, float* out, int64_t rows, int64_t words,
                       cudaStream_t stream) {
  with_lanes(lanes_for(4 * words), [&](auto group) {
    launch(scale_rows_kernel<Word, group>, blocks_for_rows(rows, group), dim3(kThreads), 0, stream, x, scale, out, rows,
           words);
  });
}

// True if the rows of both tables, with this many columns, can be accessed four floats at a time.
bool both_aligned(const float* a, const float* b, int64_t columns) {
  return word_bytes(static_cast<int64_t>(sizeof(float)) * columns, a, b) == sizeof(float4);
}

Tensor scale_rows_cuda(const Tensor& x_in, const Tensor& scale_in) {
  check_scale_rows(x_in, scale_in);
  const OnDeviceOf device(x_in);
  const Tensor x = as_contiguous(x_in), scale = as_contiguous(scale_in);
  const int64_t rows = x.size(0), columns = x.size(1);
  Tensor result = new_tensor(x, {rows, columns}, ScalarType::Float);
  if (rows * columns == 0) return result;
  const auto *from = x.const_data_ptr<float>(), *by = scale.const_data_ptr<float>();
  auto* out = result.mutable_data_ptr<float>();
  if (both_aligned(from, out, columns)) launch_scale_rows<float4>(from, by, out, rows, columns / 4, device.stream());
  else launch_scale_rows<float>(from, by, out, rows, columns, device.stream());
  return result;
}

Tensor row_dot_cuda(const Tensor& a_in, const Tensor& b_in) {
  check_row_dot(a_in, b_in);
  const OnDeviceOf device(a_in);
  const Tensor a = as_contiguous(a_in), b = as_contiguous(b_in);
  const int64_t rows = a.size(0), columns = a.size(1);
  Tensor result = new_tensor(a, {rows}, ScalarType::Float);
  if (rows == 0) return result;
  const auto *left = a.const_data_ptr<float>(), *right = b.const_data_ptr<float>();
  auto* out = result.mutable_data_ptr<float>();
  const dim3 block(kThreads);
  if (both_aligned(left, right, columns)) {
    with_lanes(lanes_for(columns), [&](auto group) {
      launch(row_dot_kernel<group>, blocks_for_rows(rows, group), block, 0, device.stream(), left, right, out, rows,
             columns);
    });
  } else {
    launch_for(rows, kWarpSize, device.stream(), row_dot_unaligned_kernel, left, right, out, rows, columns);
  }
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) {
  implement<&scale_rows_cuda>(m, "scale_rows");
  implement<&row_dot_cuda>(m, "row_dot");
}

}  // namespace rec_kernels
