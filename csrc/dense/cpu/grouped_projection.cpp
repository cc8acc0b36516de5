// grouped_projection and its gradients on the CPU.
#include "dense/cpu/grouped_projection.h"

#include <algorithm>
#include <vector>

#include "core/boxing.h"
#include "core/cpu/parallel.h"
#include "core/cpu/scratch.h"
#include "dense/grouped_projection.h"
#include "embedding_bag/cpu/sum_rows.h"

namespace rec_kernels {
namespace {

// Minimum multiplications, or elements to copy, per worker: a few microseconds.
constexpr int64_t kWorkerProducts = 1 << 18, kWorkerCopies = 1 << 14;
// Rows per block that is multiplied by all panels: a multiple of every tile height, few enough to stay in the cache
// with the matrices. Matrices of more than kSmallMatrices floats are reloaded for each block, which should then have
// more rows.
constexpr int64_t kFewRows = 48, kManyRows = 192, kSmallMatrices = 1 << 16;
// Pieces of work per worker, for load balance.
constexpr int64_t kPiecesPerWorker = 8;

int64_t padded(int64_t columns) { return ceil_div(columns, kPanelPadding) * kPanelPadding; }

// A group with its offsets in x, in the result and in the weights.
struct Group {
  int64_t x_column, in_dim;
  int64_t out_column, out_dim;
  int64_t weights;
  bool identity() const { return in_dim == out_dim; }
};

std::vector<Group> groups_of(const ProjectionDims& dims) {
  std::vector<Group> groups;
  Group g{};
  int64_t block = 0;
  for (size_t i = 0; i < dims.in_dims.size(); ++i) {
    // A block begins where the previous one ends; `g` is still the previous group.
    if (dims.outputs[i] != block) g.out_column += g.out_dim;
    block = dims.outputs[i];
    g.in_dim = dims.in_dims[i];
    g.out_dim = dims.out_dims[static_cast<size_t>(block)];
    groups.push_back(g);
    g.x_column += g.in_dim;
    if (!g.identity()) g.weights += g.in_dim * g.out_dim;
  }
  return groups;
}

// Source of a term's matrix: element [k, n] of its panel is from[k * down + n * right].
struct MatrixSource {
  const float* from;
  int64_t down, right;
};

// A product of rows for the kernels, and the memory of its packed matrices.
struct Product {
  std::vector<ProjectionPanel> panels;
  std::vector<ProjectionTerm> terms;
  std::vector<MatrixSource> sources;  // per term
  Scratch<float> matrices;

  // Adds panels for columns [column, column + columns) of the result; add_terms(c) adds the terms of the panel at c.
  template <class AddTerms>
  void add_panels(int64_t column, int64_t columns, const AddTerms& add_terms) {
    for (int64_t c = 0; c < columns; c += kPanelColumns) {
      const int64_t here = std::min(kPanelColumns, columns - c), first = static_cast<int64_t>(terms.size());
      add_terms(c);
      const auto last = static_cast<int64_t>(terms.size());
      panels.push_back({column + c, here, padded(here), first, last});
    }
  }
  void add_term(int64_t column, int64_t depth, MatrixSource source) {
    terms.push_back({column, depth, nullptr});
    sources.push_back(source);
  }
  ProjectionTerm& term(int64_t t) { return terms[static_cast<size_t>(t)]; }
};

constexpr MatrixSource kIdentity{nullptr, 0, 0};

Product forward_product(const ProjectionDims& dims, const float* weights) {
  Product p;
  const std::vector<Group> groups = groups_of(dims);
  for (size_t first = 0, last = 0; first < groups.size(); first = last) {
    const Group& block = groups[first];
    while (last < groups.size() && groups[last].out_column == block.out_column) ++last;
    p.add_panels(block.out_column, block.out_dim, [&](int64_t c) {
      for (size_t i = first; i < last; ++i) {
        const Group& g = groups[i];
        if (g.identity()) p.add_term(g.x_column + c, 0, kIdentity);
        else p.add_term(g.x_column, g.in_dim, {weights + g.weights + c * g.in_dim, 1, g.in_dim});
      }
    });
  }
  return p;
}

Product input_product(const ProjectionDims& dims, const float* weights) {
  Product p;
  for (const Group& g : groups_of(dims))
    p.add_panels(g.x_column, g.in_dim, [&](int64_t c) {
      if (g.identity()) p.add_term(g.out_column + c, 0, kIdentity);
      else p.add_term(g.out_column, g.out_dim, {weights + g.weights + c, g.in_dim, 1});
    });
  return p;
}

// Padding columns are computed from zeros and discarded.
void pack_matrix(const MatrixSource& source, const ProjectionTerm& term, const ProjectionPanel& panel) {
  const int64_t behind = panel.padded - panel.columns;
  for (int64_t k = 0; k < term.depth; ++k) {
    float* row = term.matrix + k * panel.padded;
    if (source.right == 1) std::copy_n(source.from + k * source.down, panel.columns, row);
    std::fill_n(row + panel.columns, behind, 0.0f);
  }
  if (source.right == 1) return;
  for (int64_t n = 0; n < panel.columns; ++n)
    for (int64_t k = 0; k < term.depth; ++k)
      term.matrix[k * panel.padded + n] = source.from[n * source.right + k * source.down];
}

// Assigns every term its matrix; returns the total size in floats.
int64_t pack(Product& p) {
  int64_t size = 0;
  for (const ProjectionPanel& panel : p.panels)
    for (int64_t t = panel.first_term; t < panel.last_term; ++t) size += p.term(t).depth * panel.padded;
  p.matrices = Scratch<float>(size);
  float* next = p.matrices.get();
  for (const ProjectionPanel& panel : p.panels)
    for (int64_t t = panel.first_term; t < panel.last_term; ++t) {
      p.term(t).matrix = next;
      next += p.term(t).depth * panel.padded;
    }
  const int64_t num_panels = static_cast<int64_t>(p.panels.size());
  parallel_pieces(num_panels, 1, workers_for(size, kWorkerCopies), [&](int64_t begin, int64_t, int64_t) {
    const ProjectionPanel& panel = p.panels[static_cast<size_t>(begin)];
    for (int64_t t = panel.first_term; t < panel.last_term; ++t)
      pack_matrix(p.sources[static_cast<size_t>(t)], p.term(t), panel);
  });
  return size;
}

// Splits items with these costs into `parts` ranges of about equal cost; returns the start of each, and the end.
std::vector<int64_t> cut(const std::vector<int64_t>& costs, int64_t parts) {
  int64_t total = 0;
  for (const int64_t cost : costs) total += cost;
  std::vector<int64_t> starts{0};
  for (int64_t i = 0, done = 0; i < static_cast<int64_t>(costs.size()); ++i) {
    done += costs[static_cast<size_t>(i)];
    if (done * parts >= total * static_cast<int64_t>(starts.size())) starts.push_back(i + 1);
  }
  return starts;
}

// Cost per panel: multiplications per row, plus the copying of its elements in the same unit.
std::vector<int64_t> costs_of(Product& p) {
  std::vector<int64_t> costs;
  for (const ProjectionPanel& panel : p.panels) {
    int64_t depth = 4;
    for (int64_t t = panel.first_term; t < panel.last_term; ++t) depth += 1 + p.term(t).depth;
    costs.push_back(depth * panel.padded);
  }
  return costs;
}

Tensor multiply(Product&& p, const Tensor& in, int64_t columns) {
  const int64_t rows = in.size(0), in_columns = in.size(1), num_panels = static_cast<int64_t>(p.panels.size());
  Tensor out = new_tensor(in, {rows, columns}, ScalarType::Float);
  if (rows == 0 || num_panels == 0) return out;
  const int64_t size = pack(p), step = size <= kSmallMatrices ? kFewRows : kManyRows;
  const int64_t workers = workers_for(1 + rows * (size + columns) / kWorkerProducts, 1);
  const int64_t wanted = workers == 1 ? 1 : kPiecesPerWorker * workers;
  const int64_t piece = std::max(kFewRows, std::min(kManyRows, rows / wanted / kFewRows * kFewRows));
  const int64_t row_pieces = ceil_div(rows, piece);
  // With few samples, also parallel over panels.
  const std::vector<int64_t> starts = cut(costs_of(p), std::min(num_panels, ceil_div(wanted, row_pieces)));
  const int64_t parts = static_cast<int64_t>(starts.size()) - 1;
  const float* x = in.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const auto project = kernels<GroupedProjectionKernels>().project;
  parallel_pieces(row_pieces * parts, 1, workers, [&](int64_t begin, int64_t, int64_t) {
    const int64_t row = begin / parts * piece;
    const size_t part = static_cast<size_t>(begin % parts);
    project(p.panels.data() + starts[part], starts[part + 1] - starts[part], p.terms.data(), x + row * in_columns,
            in_columns, to + row * columns, columns, std::min(piece, rows - row), step);
  });
  return out;
}

Tensor grouped_projection_cpu(const Tensor& x, const Tensor& weights_in, const std::vector<int64_t>& in_dims,
                              const std::vector<int64_t>& out_dims, const std::vector<int64_t>& outputs) {
  const ProjectionDims dims{in_dims, out_dims, outputs};
  const ProjectionSizes sizes = check_grouped_projection(x, weights_in, dims);
  const Tensor weights = as_contiguous(weights_in);
  return multiply(forward_product(dims, weights.const_data_ptr<float>()), as_contiguous(x), sizes.out_columns);
}

Tensor backward_input_cpu(const Tensor& grad, const Tensor& weights_in, const std::vector<int64_t>& in_dims,
                          const std::vector<int64_t>& out_dims, const std::vector<int64_t>& outputs) {
  const ProjectionDims dims{in_dims, out_dims, outputs};
  const ProjectionSizes sizes = check_grouped_projection_backward_input(grad, weights_in, dims);
  const Tensor weights = as_contiguous(weights_in);
  return multiply(input_product(dims, weights.const_data_ptr<float>()), as_contiguous(grad), sizes.in_columns);
}

// Makes the panels of all matrices.
struct GradientPanels {
  std::vector<GradientPanel> panels;
  std::vector<int64_t> costs;
  int64_t num_sums = 0;
};

GradientPanels gradient_panels(const ProjectionDims& dims) {
  GradientPanels p;
  for (const Group& g : groups_of(dims)) {
    if (g.identity()) continue;
    for (int64_t c = 0; c < g.out_dim; c += kPanelColumns) {
      const int64_t here = std::min(kPanelColumns, g.out_dim - c), wide = padded(here);
      p.panels.push_back({g.x_column, g.in_dim, g.out_column + c, here, wide, p.num_sums, g.weights + c * g.in_dim});
      p.costs.push_back((4 + g.in_dim) * wide);
      p.num_sums += g.in_dim * wide;
    }
  }
  return p;
}

void store_gradient(const GradientPanel& panel, const float* sums, float* out) {
  for (int64_t c = 0; c < panel.columns; ++c)
    for (int64_t k = 0; k < panel.depth; ++k) out[panel.weights + c * panel.depth + k] = sums[k * panel.padded + c];
}

Tensor backward_weights_cpu(const Tensor& grad_in, const Tensor& x_in, const std::vector<int64_t>& in_dims,
                            const std::vector<int64_t>& out_dims, const std::vector<int64_t>& outputs) {
  const ProjectionDims dims{in_dims, out_dims, outputs};
  const ProjectionSizes sizes = check_grouped_projection_backward_weights(grad_in, x_in, dims);
  const int64_t samples = x_in.size(0), in = sizes.in_columns, out_columns = sizes.out_columns;
  if (samples == 0) return new_zeros(x_in, {sizes.weights}, ScalarType::Float);
  const Tensor grad = as_contiguous(grad_in), x = as_contiguous(x_in);
  Tensor out = new_tensor(x, {sizes.weights}, ScalarType::Float);
  const GradientPanels p = gradient_panels(dims);
  const int64_t num_panels = static_cast<int64_t>(p.panels.size()), num_sums = p.num_sums;
  const int64_t workers = workers_for(1 + samples * num_sums / kWorkerProducts, 1);
  const int64_t wanted = workers == 1 ? 1 : kPiecesPerWorker / 2 * workers;
  // Chunks of chunks need no memory between the levels of the sum; chunks allow more workers.
  constexpr int64_t kLong = kSampleChunk * kSampleChunk;
  const int64_t piece = num_panels * ceil_div(samples, kLong) >= wanted ? kLong : kSampleChunk;
  const int64_t count = ceil_div(samples, piece);
  const std::vector<int64_t> starts = cut(p.costs, std::min(num_panels, ceil_div(wanted, count)));
  const int64_t parts = static_cast<int64_t>(starts.size()) - 1;
  const Scratch<float> sums(count * num_sums);
  const float *from = x.const_data_ptr<float>(), *with = grad.const_data_ptr<float>();
  const auto& k = kernels<GroupedProjectionKernels>();
  parallel_pieces(parts * count, 1, workers, [&](int64_t begin, int64_t, int64_t) {
    const int64_t i = begin / parts, first = i * piece, here = std::min(piece, samples - first);
    const size_t part = static_cast<size_t>(begin % parts);
    k.weight_sums(p.panels.data() + starts[part], starts[part + 1] - starts[part], from + first * in, in,
                  with + first * out_columns, out_columns, here, sums.get() + i * num_sums);
  });
  float* to = out.mutable_data_ptr<float>();
  parallel_pieces(num_panels, 1, workers_for(count * num_sums, kWorkerCopies), [&](int64_t begin, int64_t, int64_t) {
    const GradientPanel& panel = p.panels[static_cast<size_t>(begin)];
    float* first = sums.get() + panel.sums;
    sum_chunks(first, count, panel.depth * panel.padded, num_sums, first);
    store_gradient(panel, first, to);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) {
  implement<&grouped_projection_cpu>(m, "grouped_projection");
  implement<&backward_input_cpu>(m, "grouped_projection_backward_input");
  implement<&backward_weights_cpu>(m, "grouped_projection_backward_weights");
}

}  // namespace rec_kernels
