// Updates of encoded rows: a group of lanes decodes a row, updates it in FP32 and encodes it, all in registers. The
// grid of int8 and int4 rows depends on the whole row, so rows too wide for the registers are computed twice: for the
// grid, then for the codes. Two files instantiate finish_encoded, each for some formats.
#pragma once

#include "embedding_bag/cuda/targets_elementwise.cuh"
#include "rows/cuda/writer.cuh"

namespace rec_kernels {
inline namespace RK_ISA {

template <class Format>
struct EncodedTarget {
  static constexpr bool kElementwise = false, kEncodes = true, kUpdates = true;
  RowUpdate u;

  __device__ void expect(int64_t, const Part& f, int64_t row, PrefetchLanes lanes) const {
    lanes.bytes(place(f, row), Format::row_bytes(f.embedding_dim));
    if (u.is_adagrad()) lanes.one(u.state.sum + row);
  }
  __device__ bool needs_mean_square() const { return u.is_adagrad(); }
  __device__ Vec4 read(const Part& f, int64_t row, int64_t c) const {
    const uint8_t* w = place(f, row);
    return ColumnReader<Format>(w, f.embedding_dim, columns_aligned<Format>(w, f.embedding_dim)).read(c);
  }
  __device__ float state_before(int64_t row) const { return u.state_before(row); }
  __device__ float open(const Part& f, int64_t row, int64_t, float before, float mean_square, bool stores) const {
    return u.factor(f, row, before, mean_square, stores);
  }
  // x: the gradient of all columns; for a wider row, gradient(column, last, read) computes it block by block into x.
  template <int G, int kBlocks, class Gradient>
  __device__ __forceinline__ void put_row(const Part& f, int64_t row, float factor, const Group<G>& group,
                                          Vec4 (&x)[kBlocks], const Gradient& gradient) const {
    constexpr int64_t kWidth = kBlocks * 4 * G;
    const int64_t D = f.embedding_dim;
    // A group without a row writes nothing, and reads a grid from the step, which no other group writes.
    uint8_t* out = D > 0 ? place(f, row) : reinterpret_cast<uint8_t*>(const_cast<int64_t*>(u.step));
    const bool aligned = columns_aligned<Format>(out, D), wider = is_wider<G, kBlocks>(D);
    const ColumnReader<Format> reader(out, D, aligned);
    const Rounding how = update_rounding(u.seed, u.step, f.shard, u.stochastic);
    ColumnWriter<Format, G> writer{group, how, f.whole_row(row), D, out, aligned};
    // Replaces gradients by updated weights.
    const auto update = [&](int64_t column, bool last) {
      if (wider) gradient(column, last, [&](int64_t c) { return reader.read(c); });
      for (int k = 0; k < kBlocks; ++k) {
        const int64_t c = column + (k * G + group.lane) * 4;
        Vec4 w = c < D ? reader.read(c) : Vec4{};
        if (u.shrinks_weights) w = u.shrunk(w, f);
        for (int j = 0; j < 4; ++j) x[k].v[j] = c + j < D ? moved(w.v[j], x[k].v[j], factor) : 0.0f;
      }
      __syncwarp(group.mask);  // all lanes have read the grid or the exponents that one of them writes
    };
    // A loop over both passes, so that their common code is compiled once.
    constexpr int kFirst = ColumnWriter<Format, G>::kScans ? 0 : 1;
#pragma unroll 1
    for (int pass = kFirst; pass < 2; ++pass) {
      for (int64_t column = 0; column < columns_behind<kBlocks, G>(D); column += kWidth) {
        if (wider || pass == kFirst) update(column, !wider || pass == 1);
        // Unrolled, because an array with a variable index would not stay in registers.
#pragma unroll
        for (int k = 0; k < kBlocks; ++k) {
          const int64_t c = column + (k * G + group.lane) * 4;
          if (pass == 1) writer.write(c, x[k]);
          else if constexpr (kFirst == 0) writer.scan(c, x[k]);
        }
      }
      if constexpr (kFirst == 0)
        if (pass == 0) writer.close_scan();
    }
  }

 private:
  __device__ __forceinline__ uint8_t* place(const Part& f, int64_t row) const {
    return u.weights + f.weight_offset + (row - f.row_offset) * Format::row_bytes(f.embedding_dim);
  }
};

template <>
inline constexpr bool kNarrow<ElementwiseTarget<EncodedTarget<Fp16>>> = true;
template <>
inline constexpr bool kNarrow<ElementwiseTarget<EncodedTarget<Bf16>>> = true;

}  // namespace RK_ISA

template <class Format>
void finish_encoded(const SumArgs& a, const RowUpdate& update, cudaStream_t stream) {
  using Plain = EncodedTarget<Format>;
  if (is_elementwise(update.optimizer)) finish_few_widths(a, ElementwiseTarget<Plain>{{update}}, stream);
  else finish_few_widths(a, Plain{update}, stream);
}

}  // namespace rec_kernels
