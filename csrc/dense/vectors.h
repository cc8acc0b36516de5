// Shared parts of the ops on the vectors of samples: dot_interaction, factorization_machine.
#pragma once

#include <string>

#include "core/stable.h"

namespace rec_kernels {

// Most vectors of a sample, and columns of a vector: far above any model's.
constexpr int64_t kMostVectors = int64_t{1} << 20, kMostColumns = int64_t{1} << 20;

// Throws std::invalid_argument for a precision of products that a GPU does not have.
inline void check_precision(const std::string& precision) { parse_choice(precision, "precision", "ieee", "tf32"); }

// Throws std::invalid_argument for a tensor whose vectors have too few columns, or too many.
inline void check_columns(const Tensor& t, const char* name) {
  const int64_t columns = t.size(t.dim() - 1);
  check_value(columns >= 1 && columns <= kMostColumns, name, " must have 1 to ", kMostColumns, " columns, got shape ",
              shape_of(t));
}

}  // namespace rec_kernels
