#include "dense/dot_interaction.h"

#include "core/schema.h"
#include "dense/vectors.h"
#include "rows/row_formats.h"

namespace rec_kernels {

InteractionSizes check_dot_interaction(const Tensor& dense, const Tensor& sparse, bool self_interaction,
                                       const std::string& precision) {
  check(dense, "dense").rank(2);
  check_float_dtype(dense.scalar_type(), "dense");
  check_columns(dense, "dense");
  check(sparse, "sparse").rank(3).dtype(dense.scalar_type());
  check_value(sparse.size(1) < kMostVectors, "sparse must have fewer than ", kMostVectors,
              " vectors per sample, got shape ", shape_of(sparse));
  check(sparse, "sparse").shape({dense.size(0), sparse.size(1), dense.size(1)}).on_device_of(dense, "dense");
  check_precision(precision);
  const int64_t F = sparse.size(1), vectors = F + 1;
  return {dense.size(0), F, dense.size(1), self_interaction ? vectors * (vectors + 1) / 2 : vectors * F / 2};
}

InteractionSizes check_dot_interaction_backward(const Tensor& grad, const Tensor& dense, const Tensor& sparse,
                                                bool self_interaction, const std::string& precision) {
  const InteractionSizes sizes = check_dot_interaction(dense, sparse, self_interaction, precision);
  check(grad, "grad").shape({sizes.B, sizes.columns()}).dtype(dense.scalar_type()).on_device_of(dense, "dense");
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
