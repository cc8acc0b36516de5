// Optimizers with per-element state, for rows of any format: turns the gradient into a direction, which Base then
// applies like a gradient.
#pragma once

#include "embedding_bag/cuda/backward_kernels.cuh"
#include "rows/cuda/writer.cuh"

namespace rec_kernels {
inline namespace RK_ISA {

// A row's optimizer state, and the scalars of the step.
struct RowState {
  Elementwise optimizer;
  float divisor;          // of row-wise Adam
  float *first, *second;  // [D], or null
  bool bf16;              // first and second are bfloat16
  Rounding rounding;
  int64_t whole_row;  // row index in the unsharded table

  // Loads columns c .. c+3 of moments. `aligned`: is_aligned() of them.
  __device__ __forceinline__ Vec4 load(const float* moments, int64_t c, int64_t D, bool aligned) const {
    if (!bf16) return load_columns(moments, c, D, aligned);
    return ColumnReader<Bf16>(reinterpret_cast<const uint8_t*>(moments), D, aligned).read(c);
  }
  template <int G>
  __device__ __forceinline__ void store(float* moments, uint32_t stream, int64_t c, int64_t D, bool aligned,
                                        const Group<G>& group, const Vec4& x) const {
    if (!bf16) return store_columns(moments, c, D, aligned, x);
    Rounding how = rounding;
    how.noise.stream = stream;
    ColumnWriter<Bf16, G>{group, how, whole_row, D, reinterpret_cast<uint8_t*>(moments), aligned}.write(c, x);
  }
  __device__ __forceinline__ bool is_aligned(const float* moments, int64_t D) const {
    if (!bf16) return rows_aligned(moments, D);
    return columns_aligned<Bf16>(reinterpret_cast<const uint8_t*>(moments), D);
  }

  // Turns the gradients g of the columns starting at `column` into directions. Updates the state only if `last`.
  template <int G, int kBlocks>
  __device__ __forceinline__ void direct(int64_t column, int64_t D, const Group<G>& group, Vec4 (&g)[kBlocks],
                                         bool last) const {
    const ElementwiseRegisters<float> step(optimizer, divisor, OneLane());
    const bool aligned_first = is_aligned(first, D), aligned_second = is_aligned(second, D);
    // Unrolled to keep g in registers, except for the widest rows, whose kernels would grow by half.
#pragma unroll(kTakesWider<kBlocks, G> ? 1 : kBlocks)
    for (int k = 0; k < kBlocks; ++k) {
      const int64_t c = column + (k * G + group.lane) * 4;
      if (c >= D) continue;
      Vec4 m = {}, v = {};
      if (first) m = load(first, c, D, aligned_first);
      if (second) v = load(second, c, D, aligned_second);
      for (int j = 0; j < 4; ++j) g[k].v[j] = step.direction(optimizer.kind, g[k].v[j], &m.v[j], &v.v[j]);
      if (!last) continue;
      if (first) store(first, kFirstMomentStream, c, D, aligned_first, group, m);
      if (second) store(second, kSecondMomentStream, c, D, aligned_second, group, v);
    }
  }
};

template <class Base>
struct ElementwiseTarget : Base {
  static constexpr bool kElementwise = true;
  using Base::u;

  __device__ Elementwise optimizer() const { return elementwise_of(u); }
  __device__ bool needs_mean_square() const { return optimizer().needs_mean_square(); }

  __device__ void expect(int64_t part, const Part& f, int64_t row, PrefetchLanes lanes) const {
    Base::expect(part, f, row, lanes);
    const OptimizerState& s = u.state;
    const int64_t place = place_of(part, f, row), bytes = f.embedding_dim * (s.bf16 ? 2 : 4);
    if (s.sum) lanes.bytes(s.moment(s.sum, place), bytes);
    if (s.exp_avg) lanes.bytes(s.moment(s.exp_avg, place), bytes);
    if (!s.exp_avg_sq) return;
    if (needs_mean_square()) lanes.one(s.exp_avg_sq + row);
    else lanes.bytes(s.moment(s.exp_avg_sq, place), bytes);
  }
  __device__ float state_before(int64_t row) const { return needs_mean_square() ? u.state.exp_avg_sq[row] : 0.0f; }
  // Returns the divisor of row-wise Adam; 1 for other optimizers.
  __device__ float open(const Part&, int64_t row, int64_t, float before, float mean_square, bool stores) const {
    const Elementwise o = optimizer();
    if (!o.needs_mean_square()) return 1.0f;
    const float second = o.row_moment(before, mean_square);
    if (stores) u.state.exp_avg_sq[row] = second;
    return o.row_divisor(second);
  }
  __device__ RowState state_of(int64_t part, const Part& f, int64_t row, float divisor) const {
    const Elementwise o = optimizer();
    const int64_t place = place_of(part, f, row);
    const OptimizerState& s = u.state;
    float* second = s.sum ? s.sum : s.exp_avg_sq;
    return {o,
            divisor,
            o.has_first() ? s.moment(s.exp_avg, place) : nullptr,
            o.has_second() ? s.moment(second, place) : nullptr,
            s.bf16,
            update_rounding(u.seed, u.step, f.shard, u.stochastic),
            f.whole_row(row)};
  }

  // Factor of the row's direction, which is in g; for a wider row, direction(column, false, read) computes it by
  // blocks.
  template <int G, int kBlocks, class Direction>
  __device__ __forceinline__ float factor(const Elementwise& o, const Part& f, int64_t row, const Group<G>& group,
                                          Vec4 (&g)[kBlocks], const Direction& direction) const {
    if (!o.needs_norms()) return -u.lr_of(f.shard.table);
    constexpr int64_t kWidth = kBlocks * 4 * G;
    const int64_t D = f.embedding_dim;
    SquareSum<G, kBlocks> weights{group}, directions{group};
    for (int64_t column = 0; column < columns_behind<kBlocks, G>(D); column += kWidth) {
      const auto read = [&](int64_t c) { return Base::read(f, row, c); };
      if (is_wider<G, kBlocks>(D)) direction(column, false, read);
      Vec4 w[kBlocks];
      for (int k = 0; k < kBlocks; ++k) {
        const int64_t c = column + (k * G + group.lane) * 4;
        w[k] = c < D ? read(c) : Vec4{};
      }
      weights.add(column, D, w);
      directions.add(column, D, g);
    }
    const float weight_squares = weights.total(), direction_squares = directions.total();
    return o.trusted(u.lr_of(f.shard.table), weight_squares, direction_squares);
  }

 private:
  __device__ int64_t place_of(int64_t part, const Part& f, int64_t row) const {
    return u.records[part].state_offset + (row - f.row_offset) * f.embedding_dim;
  }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
