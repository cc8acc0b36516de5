// What the kernels that look rows up have in common: rows on their way, the output, the gradient of
// per_sample_weights.
#pragma once

#include "cuda/embedding_bag.cuh"
#include "cuda/row_codec.cuh"

namespace rec_kernels {
inline namespace RK_ISA {

// Rows a group has on their way: 4 x 16 bytes x 2048 threads cover the latency of an H200's memory; more cost
// registers.
constexpr int kMostInFlight = 4;

// Columns c .. c+3 of D, of the output's elements from `row` on.
__device__ __forceinline__ void store_output(const PoolArgs& a, int64_t row, int64_t c, int64_t D, const Vec4& x) {
  const bool aligned = D % 4 == 0 && row % 4 == 0;
  if (a.output_format == RowFormat::kFp32) {
    float* out = static_cast<float*>(a.output) + row;
    store_columns(out, c, D, aligned && reinterpret_cast<uintptr_t>(a.output) % 16 == 0, x);
    return;
  }
  if (c >= D) return;
  uint64_t codes = 0;
  for (int j = 0; j < 4; ++j) {
    const uint32_t half = a.output_format == RowFormat::kFp16 ? Fp16::encode<false>(x.v[j], uint32_t{0})
                                                              : Bf16::encode<false>(x.v[j], uint32_t{0});
    codes |= uint64_t{half} << 16 * j;
  }
  store_little<8>(static_cast<uint8_t*>(a.output) + 2 * (row + c), codes,
                  aligned && reinterpret_cast<uintptr_t>(a.output) % 8 == 0, 2 * (D - c));
}

// The whole output, by all threads.
__device__ __forceinline__ void store_nans(const PoolArgs& a) {
  const int64_t size = a.bags.output_rows() * a.output_dim;
  const Vec4 nan = {{__builtin_nanf("")}};
  for (int64_t i = Group<1>::first(); i < size; i += Group<1>::stride()) store_output(a, i, 0, 1, nan);
}

// The sums of a bag of `counted` ids, from column `first` on, go to the output's row at element `out`.
template <int G, int kBlocks>
__device__ __forceinline__ void store_sums(const PoolArgs& a, const Feature& f, int64_t counted, int64_t out,
                                           int64_t first, Vec4 (&sum)[kBlocks]) {
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    if (f.mean && counted > 1)
      for (int j = 0; j < 4; ++j) sum[k].v[j] = sum[k].v[j] / static_cast<float>(counted);
    store_output(a, out, first + k * 4 * G, f.embedding_dim, sum[k]);
  }
}

// Columns c .. c+3 of a row, zeros behind its end; `aligned`: of its table.
template <class Format>
__device__ __forceinline__ Vec4 load_row(const uint8_t* row, int64_t c, int64_t D, bool aligned) {
  return c < D ? ColumnReader<Format>(row, D, aligned).read(c) : Vec4{};
}

// Zeros for the columns from `used` on of the row of the output that is a bag's alone, if it has one.
template <int G>
__device__ __forceinline__ void store_zeros_behind(const PoolArgs& a, int64_t bag, int64_t used,
                                                   const Group<G>& group) {
  if (!a.bags.have_own_rows()) return;
  for (int64_t c = used + group.lane; c < a.output_dim; c += G) store_output(a, bag * a.output_dim + c, 0, 1, Vec4{});
}

// How many ids of a bag count.
__device__ __forceinline__ int64_t count_ids(const PoolArgs& a, const Feature& f, Range ids) {
  int64_t counted = 0;
  for (int64_t i = ids.start; i < ids.stop; ++i) {
    const int64_t id = a.bags.id(i);
    counted += a.bags.in_range(id, f) && id != a.bags.padding_idx;
  }
  return counted;
}

// out[i] for the ids of a bag: dot(id, i), times 1 / n for mean.
template <class Dot>
__device__ __forceinline__ void write_dots(const PoolArgs& a, const Feature& f, Range ids, int lane, float* out,
                                           const Dot& dot) {
  const int64_t counted = f.mean ? count_ids(a, f, ids) : 0;
  const float each = counted > 1 ? 1.0f / static_cast<float>(counted) : 1.0f;
  for (int64_t i = ids.start; i < ids.stop; ++i) {
    const int64_t id = a.bags.id(i);
    float sum = 0.0f;
    if (a.bags.in_range(id, f) && id != a.bags.padding_idx) sum = dot(id, i);
    else if (!a.bags.in_range(id, f) && lane == 0) note_bad(a.status, i);
    if (lane == 0) out[i] = counted > 1 ? sum * each : sum;
  }
}

}  // namespace RK_ISA
}  // namespace rec_kernels
