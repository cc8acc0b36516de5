#include "dense/grouped_projection.h"

#include "core/schema.h"

namespace rec_kernels {
namespace {

// Maximum width of a group or block: far above any embedding, and small enough that sums of products do not overflow.
constexpr int64_t kMostColumns = int64_t{1} << 20;

int64_t length(const std::vector<int64_t>& list) { return static_cast<int64_t>(list.size()); }

int64_t sum_of_dims(const std::vector<int64_t>& dims, const char* name) {
  int64_t sum = 0;
  for (int64_t i = 0; i < length(dims); ++i) {
    const int64_t dim = dims[static_cast<size_t>(i)];
    check_value(dim >= 1 && dim <= kMostColumns, name, "[", i, "] = ", dim, " must be in [1, ", kMostColumns, "]");
    sum += dim;
  }
  return sum;
}

// Checks that outputs are ascending, start at 0 and have no gaps.
void check_outputs(const ProjectionDims& dims) {
  const int64_t groups = length(dims.in_dims), blocks = length(dims.out_dims);
  check_value(length(dims.outputs) == groups, "outputs must have one element for each of the ", groups,
              " in_dims, got ", dims.outputs.size());
  int64_t last = -1;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t output = dims.outputs[static_cast<size_t>(g)];
    const bool follows = output == last + 1 || (output == last && g > 0);
    if (g == 0) check_value(follows, "outputs[0] = ", output, " must be 0");
    check_value(follows, "outputs[", g, "] = ", output, " must be outputs[", g - 1, "] = ", last, " or one more");
    last = output;
  }
  check_value(blocks == last + 1, "out_dims must have one element for each of the ", last + 1,
              " blocks that outputs names, got ", blocks);
}

ProjectionSizes sizes_of(const ProjectionDims& dims) {
  ProjectionSizes sizes{sum_of_dims(dims.in_dims, "in_dims"), sum_of_dims(dims.out_dims, "out_dims"), 0};
  check_outputs(dims);
  for (size_t g = 0; g < dims.in_dims.size(); ++g) {
    const int64_t in = dims.in_dims[g], out = dims.out_dims[static_cast<size_t>(dims.outputs[g])];
    if (in != out) sizes.weights += in * out;
  }
  return sizes;
}

void check_rows(const Tensor& t, int64_t columns, const char* name, const char* dims_name) {
  check(t, name).rank(2).dtype(ScalarType::Float);
  check_value(t.size(1) == columns, name, " must have sum(", dims_name, ") = ", columns, " columns, got shape ",
              shape_of(t));
}

void check_weights(const Tensor& weights, int64_t elements, const Tensor& other, const char* other_name) {
  check(weights, "weights").rank(1).dtype(ScalarType::Float);
  check_value(weights.size(0) == elements, "weights must have ", elements,
              " elements, the matrices of all groups that are not the identity, got ", weights.size(0));
  check(weights, "weights").on_device_of(other, other_name);
}

}  // namespace

ProjectionSizes check_grouped_projection(const Tensor& x, const Tensor& weights, const ProjectionDims& dims) {
  const ProjectionSizes sizes = sizes_of(dims);
  check_rows(x, sizes.in_columns, "x", "in_dims");
  check_weights(weights, sizes.weights, x, "x");
  return sizes;
}

ProjectionSizes check_grouped_projection_backward_input(const Tensor& grad, const Tensor& weights,
                                                        const ProjectionDims& dims) {
  const ProjectionSizes sizes = sizes_of(dims);
  check_rows(grad, sizes.out_columns, "grad", "out_dims");
  check_weights(weights, sizes.weights, grad, "grad");
  return sizes;
}

ProjectionSizes check_grouped_projection_backward_weights(const Tensor& grad, const Tensor& x,
                                                          const ProjectionDims& dims) {
  const ProjectionSizes sizes = sizes_of(dims);
  check_rows(grad, sizes.out_columns, "grad", "out_dims");
  check_rows(x, sizes.in_columns, "x", "in_dims");
  check(x, "x").shape({grad.size(0), sizes.in_columns}).on_device_of(grad, "grad");
  return sizes;
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m, "grouped_projection(Tensor x, Tensor weights, int[] in_dims, int[] out_dims, int[] outputs) -> Tensor");
  define(m,
         "grouped_projection_backward_input(Tensor grad, Tensor weights, int[] in_dims, int[] out_dims, int[] outputs) "
         "-> Tensor");
  define(m,
         "grouped_projection_backward_weights(Tensor grad, Tensor x, int[] in_dims, int[] out_dims, int[] outputs) "
         "-> Tensor");
}

}  // namespace rec_kernels
