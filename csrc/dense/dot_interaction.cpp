#include "dense/dot_interaction.h"

#include "core/schema.h"
#include "dense/vectors.h"
#include "rows/row_formats.h"

namespace rec_kernels {

InteractionSizes check_dot_interaction(const Tensor& dense, const Tensor& sparse, bool self_interaction,
                                       const std::string& precision) {
  check_rank(dense, 2, "dense");
  check_float_dtype(dense.scalar_type(), "dense");
  check_columns(dense, "dense");
  check_rank(sparse, 3, "sparse");
  check_dtype(sparse, dense.scalar_type(), "sparse");
  check_value(sparse.size(1) < kMostVectors, "sparse must have fewer than ", kMostVectors,
              " vectors per sample, got shape ", shape_of(sparse));
  check_shape(sparse, {dense.size(0), sparse.size(1), dense.size(1)}, "sparse");
  check_same_device(sparse, dense, "sparse", "dense");
  check_precision(precision);
  const int64_t F = sparse.size(1), vectors = F + 1;
  return {dense.size(0), F, dense.size(1), self_interaction ? vectors * (vectors + 1) / 2 : vectors * F / 2};
}

InteractionSizes check_dot_interaction_backward(const Tensor& grad, const Tensor& dense, const Tensor& sparse,
                                                bool self_interaction, const std::string& precision) {
  const InteractionSizes sizes = check_dot_interaction(dense, sparse, self_interaction, precision);
  check_shape(grad, {sizes.B, sizes.columns()}, "grad");
  check_dtype(grad, dense.scalar_type(), "grad");
  check_same_device(grad, dense, "grad", "dense");
  return sizes;
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m,
         "dot_interaction(Tensor dense, Tensor sparse, bool self_interaction=False, str precision=\"ieee\") -> Tensor");
  define(m,
         "dot_interaction_backward(Tensor grad, Tensor dense, Tensor sparse, bool self_interaction=False, "
         "str precision=\"ieee\") -> (Tensor grad_dense, Tensor grad_sparse)");
}

}  // namespace rec_kernels
