// Compiled once per instruction set: no torch header and no std template here (core/host_device.h says why).
//
// A tile of sums stays in registers while its terms are accumulated: each step loads a few registers of one operand and
// multiplies them by broadcast elements of the other.
#include "core/cpu/simd.h"
#include "dense/cpu/grouped_projection.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// Maximum tile size, registers across and elements down: its sums and one row of operands use all registers.
#if defined(__AVX512F__)
constexpr int kMostAcross = 4;
#else
constexpr int kMostAcross = 2;
#endif
constexpr int most_down(int across) { return across == kMostAcross ? 6 : 8; }

// Loads N registers at p; the last one has `lanes` lanes.
template <int N>
RK_HOST_DEVICE void load_lanes(const float* p, int lanes, Vec* v) {
  for (int i = 0; i < N - 1; ++i) v[i] = Vec::load(p + i * W);
  v[N - 1] = lanes == W ? Vec::load(p + (N - 1) * W) : Vec::load_partial(p + (N - 1) * W, lanes);
}

// Number of registers for a panel's columns from `column` on, at most a tile's, and the lanes of the last one.
struct Across {
  int registers, lanes;
};
Across across_from(int64_t column, int64_t columns) {
  const int64_t rest = columns - column, here = rest < kMostAcross * W ? rest : kMostAcross * W;
  const int registers = static_cast<int>(ceil_div(here, W));
  return {registers, static_cast<int>(here) - (registers - 1) * W};
}

// A tile of the product.
struct ProductTile {
  const ProjectionTerm *first, *last;
  int64_t column, padded;  // column within the panel, padded width of the panel
  int lanes;
  const float* x;
  int64_t x_stride;
  float* out;
  int64_t out_stride;
  const float* next;  // memory to prefetch, a share per row
  int64_t next_stride;
};

template <int N, int Rows>
void project_tile(const ProductTile& t) {
  Vec sum[Rows][N], operand[N];
  for (int r = 0; r < Rows; ++r)
    for (int i = 0; i < N; ++i) sum[r][i] = Vec::broadcast(0.0f);
  for (const ProjectionTerm* term = t.first; term < t.last; ++term) {
    const float* x = t.x + term->column;
    if (term->depth == 0) {
      for (int r = 0; r < Rows; ++r) {
        load_lanes<N>(x + r * t.x_stride + t.column, t.lanes, operand);
        for (int i = 0; i < N; ++i) sum[r][i] = sum[r][i] + operand[i];
      }
      continue;
    }
    const float* matrix = term->matrix + t.column;
    for (int64_t k = 0; k < term->depth; ++k, matrix += t.padded) {
      for (int i = 0; i < N; ++i) operand[i] = Vec::load(matrix + i * W);
      for (int r = 0; r < Rows; ++r) {
        const Vec element = Vec::broadcast(x[r * t.x_stride + k]);
        for (int i = 0; i < N; ++i) sum[r][i] = fused_multiply_add(element, operand[i], sum[r][i]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    float* out = t.out + r * t.out_stride;
    for (int i = 0; i < N - 1; ++i) sum[r][i].store(out + i * W);
    if (t.lanes == W) sum[r][N - 1].store(out + (N - 1) * W);
    else sum[r][N - 1].store_partial(out + (N - 1) * W, t.lanes);
  }
}

template <int N, int Rows>
void project_last_rows(const ProductTile& t, int64_t rows) {
  if constexpr (Rows > 0) {
    if (rows == Rows) project_tile<N, Rows>(t);
    else project_last_rows<N, Rows - 1>(t, rows);
  }
}

template <int N>
void project_rows(int registers, ProductTile t, int64_t rows) {
  if constexpr (N > 1) {
    if (registers < N) return project_rows<N - 1>(registers, t, rows);
  }
  constexpr int kRows = most_down(N);
  for (; rows >= kRows; rows -= kRows) {
    if (t.next_stride) prefetch_bytes(t.next, kRows * t.next_stride * 4);
    t.next += kRows * t.next_stride;
    // Also prefetches output lines if several: they are too far from the previous row for the hardware prefetcher.
    for (int r = 0; N > 1 && r < kRows; ++r)
      for (int i = 0; i < N; ++i) prefetch_line(t.out + (kRows + r) * t.out_stride + i * W);
    project_tile<N, kRows>(t);
    t.x += kRows * t.x_stride;
    t.out += kRows * t.out_stride;
  }
  project_last_rows<N, kRows - 1>(t, rows);
}

void project(const ProjectionPanel* panels, int64_t count, const ProjectionTerm* terms, const float* x,
             int64_t x_stride, float* out, int64_t out_stride, int64_t rows, int64_t step) {
  // During a step, each panel prefetches its share of the next step's rows, which are consecutive.
  const int64_t share = ceil_div(x_stride, count);
  for (int64_t r = 0; r < rows; r += step, x += step * x_stride, out += step * out_stride) {
    const int64_t here = rows - r < step ? rows - r : step;
    const float* next = x + step * x_stride;
    for (const ProjectionPanel* p = panels; p < panels + count; ++p, next += step * share)
      for (int64_t c = 0; c < p->columns; c += kMostAcross * W) {
        const Across across = across_from(c, p->columns);
        ProductTile tile{terms + p->first_term,
                         terms + p->last_term,
                         c,
                         p->padded,
                         across.lanes,
                         x,
                         x_stride,
                         out + p->column + c,
                         out_stride,
                         next,
                         c == 0 && r + step < rows ? share : 0};
        project_rows<kMostAcross>(across.registers, tile, here);
      }
  }
}

// A chunk of samples and a tile of sums.
struct GradientTile {
  const float* x;
  int64_t x_stride;
  const float* grad;
  int64_t grad_stride;
  int lanes;
  int64_t samples;
  float* sums;
  int64_t padded;
  bool first;       // first chunk, which starts the sums
  bool fetch_grad;  // prefetch the next chunk's gradient
};

template <int N, int Depth>
void gradient_tile(const GradientTile& t) {
  Vec sum[Depth][N], operand[N];
  const float *x = t.x, *grad = t.grad;
  load_lanes<N>(grad, t.lanes, operand);
  for (int k = 0; k < Depth; ++k)
    for (int i = 0; i < N; ++i) sum[k][i] = Vec::broadcast(x[k]) * operand[i];
  for (int64_t b = 1; b < t.samples; ++b) {
    x += t.x_stride;
    grad += t.grad_stride;
    prefetch_line(x + kSampleChunk * t.x_stride);
    if (t.fetch_grad)
      for (int i = 0; i < N; ++i) prefetch_line(grad + kSampleChunk * t.grad_stride + i * W);
    load_lanes<N>(grad, t.lanes, operand);
    for (int k = 0; k < Depth; ++k) {
      const Vec element = Vec::broadcast(x[k]);
      for (int i = 0; i < N; ++i) sum[k][i] = fused_multiply_add(element, operand[i], sum[k][i]);
    }
  }
  for (int k = 0; k < Depth; ++k)
    for (int i = 0; i < N; ++i) {
      float* to = t.sums + k * t.padded + i * W;
      (t.first ? sum[k][i] : Vec::load(to) + sum[k][i]).store(to);
    }
}

template <int N, int Depth>
void last_gradient_tile(const GradientTile& t, int64_t depth) {
  if constexpr (Depth > 0) {
    if (depth == Depth) gradient_tile<N, Depth>(t);
    else last_gradient_tile<N, Depth - 1>(t, depth);
  }
}

template <int N>
void gradient_tiles(int registers, GradientTile t, int64_t depth) {
  if constexpr (N > 1) {
    if (registers < N) return gradient_tiles<N - 1>(registers, t, depth);
  }
  constexpr int kDepth = most_down(N);
  for (; depth >= kDepth; depth -= kDepth) {
    gradient_tile<N, kDepth>(t);
    t.x += kDepth;
    t.sums += kDepth * t.padded;
    t.fetch_grad = false;
  }
  last_gradient_tile<N, kDepth - 1>(t, depth);
}

void weight_sums(const GradientPanel* panels, int64_t count, const float* x, int64_t x_stride, const float* grad,
                 int64_t grad_stride, int64_t samples, float* sums) {
  for (int64_t b = 0; b < samples;
       b += kSampleChunk, x += kSampleChunk * x_stride, grad += kSampleChunk * grad_stride) {
    const int64_t here = samples - b < kSampleChunk ? samples - b : kSampleChunk;
    for (const GradientPanel* p = panels; p < panels + count; ++p)
      for (int64_t c = 0; c < p->columns; c += kMostAcross * W) {
        const Across across = across_from(c, p->columns);
        const GradientTile tile{
            x + p->x_column, x_stride, grad + p->grad_column + c, grad_stride, across.lanes, here, sums + p->sums + c,
            p->padded,       b == 0,   b + kSampleChunk < samples};
        gradient_tiles<kMostAcross>(across.registers, tile, p->depth);
      }
  }
}

}  // namespace
}  // namespace RK_ISA

template <>
const GroupedProjectionKernels GroupedProjectionKernels::table<CpuIsa::RK_ISA> = {RK_ISA::project, RK_ISA::weight_sums};

}  // namespace rec_kernels
