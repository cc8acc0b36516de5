// Checks that dot_interaction and factorization_machine share.
#pragma once

#include <string>

#include "core/stable.h"

namespace rec_kernels {

// Maximum vectors per sample, and columns per vector: far above any model.
constexpr int64_t kMostVectors = int64_t{1} << 20, kMostColumns = int64_t{1} << 20;

// Throws std::invalid_argument for an unknown precision of products.
inline void check_precision(const std::string& precision) { parse_choice(precision, "precision", "ieee", "tf32"); }

// Throws std::invalid_argument for vectors with too few or too many columns.
inline void check_columns(const Tensor& t, const char* name) {
  const int64_t columns = t.size(t.dim() - 1);
  check_value(columns >= 1 && columns <= kMostColumns, name, " must have 1 to ", kMostColumns, " columns, got shape ",
              shape_of(t));
}

}  // namespace rec_kernels
