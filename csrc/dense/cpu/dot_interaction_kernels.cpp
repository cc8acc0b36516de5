// Compiled once per instruction set: no torch header and no std template here (core/host_device.h says why).
//
// Forward: a lane is a sample, so each lane adds its sums in order, no pair is computed twice and no horizontal sums
// are needed; vectors are transposed on input, sums on output. Backward: a lane is a column; the square matrix of the
// pairs' gradients is multiplied by the vectors.
#include "core/cpu/transpose.h"
#include "dense/cpu/dot_interaction.h"
#include "dense/cpu/small_product.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// Index of vector i's first pair among all pairs.
RK_HOST_DEVICE int64_t first_pair(int64_t i, bool self_interaction) {
  return self_interaction ? i * (i + 1) / 2 : i * (i - 1) / 2;
}

// Rows and columns of a forward tile, whose sums and operands use all registers.
#if defined(__AVX512F__)
constexpr int kTile = 5;
#else
constexpr int kTile = 3;
#endif

// Part of the square that a tile covers: all of it, or the triangle below the diagonal, without or with the diagonal.
enum class Part { kWhole, kBelow, kWithDiagonal };
template <Part kPart>
constexpr bool has_sum(int row, int column) {
  return kPart == Part::kWhole || column < row || (kPart == Part::kWithDiagonal && column == row);
}

// W columns of W samples' vectors in registers of samples: column k of vector v is panel[v][k].
struct Panel {
  const float* values;
  int columns;  // at most W
  bool first;   // the first panel, which starts the sums
};

// Adds the columns of a panel to the sums of vectors i, i + 1, ... with vectors j, j + 1, ...; rows[r] has those of
// vector i + r.
template <int kRows, Part kPart>
void sum_tile(const Panel& panel, int64_t i, int64_t j, float* const* rows) {
  Vec sum[kRows][kTile], across[kTile];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kTile; ++c)
      if (has_sum<kPart>(r, c)) sum[r][c] = panel.first ? Vec::broadcast(0.0f) : Vec::load(rows[r] + (j + c) * W);
  constexpr int kAcross = kPart == Part::kWhole ? kTile : kRows;
  const float *down = panel.values + i * W * W, *right = panel.values + j * W * W;
  for (int k = 0; k < panel.columns; ++k, down += W, right += W) {
    for (int c = 0; c < kAcross; ++c) across[c] = Vec::load(right + c * W * W);
    for (int r = 0; r < kRows; ++r) {
      const Vec own = kPart == Part::kWhole ? Vec::load(down + r * W * W) : across[r];
      for (int c = 0; c < kTile; ++c)
        if (has_sum<kPart>(r, c)) sum[r][c] = fused_multiply_add(own, across[c], sum[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kTile; ++c)
      if (has_sum<kPart>(r, c)) sum[r][c].store(rows[r] + (j + c) * W);
}

// Computes the pairs of vectors [i, i + kRows), or as many as exist, with all earlier vectors and among themselves.
template <int kRows>
void sum_rows(const InteractionShape& shape, const Panel& panel, int64_t i, int64_t count, float* sums) {
  if constexpr (kRows > 1) {
    if (count < kRows) return sum_rows<kRows - 1>(shape, panel, i, count, sums);
  }
  float* rows[kRows];
  for (int r = 0; r < kRows; ++r) rows[r] = sums + first_pair(i + r, shape.self_interaction) * W;
  for (int64_t j = 0; j < i; j += kTile) sum_tile<kRows, Part::kWhole>(panel, i, j, rows);
  if (shape.self_interaction) sum_tile<kRows, Part::kWithDiagonal>(panel, i, i, rows);
  else sum_tile<kRows, Part::kBelow>(panel, i, i, rows);
}

// Transposes at most W columns of one vector of `samples` samples.
RK_HOST_DEVICE void gather_vector(const float* from, int64_t stride, int64_t samples, int columns, float* to) {
  FloatLanes lanes[W];
  for (int s = 0; s < W; ++s) lanes[s] = FloatLanes{};
  if (samples >= W && columns == W) {
    for (int s = 0; s < W; ++s) lanes[s] = (FloatLanes)Vec::load(from + s * stride).v;
  } else {
    for (int s = 0; s < W && s < samples; ++s) {
      const float* p = from + s * stride;
      lanes[s] = (FloatLanes)(columns == W ? Vec::load(p) : Vec::load_partial(p, columns)).v;
    }
  }
  transpose(lanes);
  for (int k = 0; k < W; ++k) store_as(to + k * W, lanes[k]);
}

// Stores the sums of all pairs after the samples' dense vectors, at `to`.
void scatter_sums(const float* sums, int64_t pairs, int64_t samples, float* to, int64_t stride) {
  for (int64_t p = 0; p < pairs; p += W, sums += W * W) {
    const int count = static_cast<int>(pairs - p < W ? pairs - p : W);
    FloatLanes lanes[W];
    for (int k = 0; k < W; ++k) lanes[k] = k < count ? load_as<FloatLanes>(sums + k * W) : FloatLanes{};
    transpose(lanes);
    for (int s = 0; s < W && s < samples; ++s) {
      const Vec of_sample{lanes[s]};
      if (count == W) of_sample.store(to + s * stride + p);
      else of_sample.store_partial(to + s * stride + p, count);
    }
  }
}

int64_t forward_scratch(const InteractionShape& shape) {
  return (shape.F + 1) * W * W + first_pair(shape.F + 1, shape.self_interaction) * W;
}

// Computes at most W samples.
void interact(const InteractionShape& shape, const InteractionRows<const float>& in, float* out, int64_t out_stride,
              int64_t samples, float* scratch) {
  const int64_t vectors = shape.F + 1, D = shape.D;
  float* sums = scratch + vectors * W * W;
  int64_t ahead = 0;  // elements of the following samples that have been prefetched
  for (int64_t d = 0; d < D; d += W) {
    const int columns = static_cast<int>(D - d < W ? D - d : W);
    gather_vector(in.dense + d, in.dense_stride, samples, columns, scratch);
    for (int64_t f = 0; f < shape.F; ++f, ahead += W * W) {
      const int64_t sample = ahead / (shape.F * D), within = ahead % (shape.F * D);
      if (in.far) prefetch_bytes(in.sparse + (W + sample) * in.sparse_stride + within, W * W * 4);
      gather_vector(in.sparse + f * D + d, in.sparse_stride, samples, columns, scratch + (f + 1) * W * W);
    }
    const Panel panel{scratch, columns, d == 0};
    for (int64_t i = 0; i < vectors; i += kTile) sum_rows<kTile>(shape, panel, i, vectors - i, sums);
  }
  for (int64_t s = 0; s < samples; ++s)
    __builtin_memcpy(out + s * out_stride, in.dense + s * in.dense_stride, static_cast<size_t>(D) * 4);
  scatter_sums(sums, first_pair(vectors, shape.self_interaction), samples, out + D, out_stride);
}

void forward(const InteractionShape& shape, const InteractionRows<const float>& in, float* out, int64_t out_stride,
             int64_t samples, float* scratch) {
  for (int64_t s = 0; s < samples; s += W) {
    const InteractionRows<const float> here{in.dense + s * in.dense_stride, in.dense_stride,
                                            in.sparse + s * in.sparse_stride, in.sparse_stride, in.far};
    interact(shape, here, out + s * out_stride, out_stride, samples - s < W ? samples - s : W, scratch);
  }
}

// Fills the W x W tile of the square at row i and column j <= i, and its mirror image.
RK_HOST_DEVICE void fill_block(const float* pairs, const InteractionShape& shape, int64_t i, int64_t j, float* square) {
  const int64_t vectors = shape.F + 1, stride = padded(vectors);
  FloatLanes below[W], above[W];
  for (int r = 0; r < W; ++r) below[r] = FloatLanes{};
  for (int r = 0; r < W && i + r < vectors; ++r) {
    const float* row = pairs + first_pair(i + r, shape.self_interaction) + j;
    if (j < i) below[r] = (FloatLanes)Vec::load(row).v;
    else if (r > 0) below[r] = (FloatLanes)Vec::load_partial(row, r).v;
  }
  for (int r = 0; r < W; ++r) above[r] = below[r];
  transpose(above);
  for (int r = 0; r < W; ++r) {
    // The diagonal tile is the bitwise or of both halves, which do not overlap. A sum would lose signs of zeros.
    store_as(square + (i + r) * stride + j, j < i ? bits_of(below[r]) : bits_of(below[r]) | bits_of(above[r]));
    if (j < i) store_as(square + (j + r) * stride + i, above[r]);
  }
}

// Fills the symmetric square matrix of the pairs' gradients, padded to whole registers. The diagonal is twice the
// gradient of a vector with itself, or 0.
void fill_square(const float* pairs, const InteractionShape& shape, float* square) {
  const int64_t vectors = shape.F + 1, stride = padded(vectors);
  for (int64_t i = 0; i < vectors; i += W)
    for (int64_t j = 0; j <= i; j += W) fill_block(pairs, shape, i, j, square);
  if (shape.self_interaction)
    for (int64_t i = 0; i < vectors; ++i) square[i * stride + i] = 2.0f * pairs[first_pair(i, true) + i];
}

// Copies a row of D elements, padded with zeros to whole registers, and prefetches memory that is read later.
RK_HOST_DEVICE void copy_vector(const float* from, int64_t D, float* to, const float* later) {
  int64_t c = 0;
  for (; c + W <= D; c += W) {
    prefetch_line(later + c);
    Vec::load(from + c).store(to + c);
  }
  if (c < D) Vec::load_partial(from + c, static_cast<int>(D - c)).store(to + c);
}

int64_t backward_scratch(const InteractionShape& shape) {
  const int64_t side = padded(shape.F + 1);
  return (shape.F + 1) * padded(shape.D) + side * side;
}

void backward(const InteractionShape& shape, const InteractionRows<const float>& in, const float* grad,
              int64_t grad_stride, const InteractionRows<float>& out, int64_t samples, float* scratch) {
  const int64_t vectors = shape.F + 1, D = shape.D, stride = padded(D);
  float* square = scratch + vectors * stride;
  for (int64_t s = 0; s < samples; ++s) {
    const float *dense = in.dense + s * in.dense_stride, *sparse = in.sparse + s * in.sparse_stride;
    const float* of_sample = grad + s * grad_stride;
    float *to = out.dense + s * out.dense_stride, *to_sparse = out.sparse + s * out.sparse_stride;
    copy_vector(dense, D, scratch, dense + in.dense_stride);
    for (int64_t f = 0; f < shape.F; ++f)
      copy_vector(sparse + f * D, D, scratch + (f + 1) * stride, sparse + in.sparse_stride + f * D);
    fill_square(of_sample + D, shape, square);
    multiply({square, 1, padded(vectors), scratch, stride, vectors, to, to_sparse, D}, vectors, D);
    for (int64_t d = 0; d < D; ++d) to[d] += of_sample[d];
  }
}

}  // namespace
}  // namespace RK_ISA

template <>
const DotInteractionKernels DotInteractionKernels::table<CpuIsa::RK_ISA> = {RK_ISA::forward_scratch, RK_ISA::forward,
                                                                            RK_ISA::backward_scratch, RK_ISA::backward};

}  // namespace rec_kernels
