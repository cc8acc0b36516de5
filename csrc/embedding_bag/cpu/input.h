// Converts the tensors of an embedding_bag call into the plain structs of its kernels.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/cpu/scratch.h"
#include "embedding_bag/cpu/forward.h"
#include "embedding_bag/embedding_bag.h"

namespace rec_kernels {

struct BagInput : BagTensors {
  std::unique_ptr<Part[]> parts;  // parts of all features
  const TablePart* records;       // layout records of the parts; null: one table without a layout
  int64_t cache_ways;             // ways of the layout's row cache
  Scratch<int64_t> mapped_ids;    // owns bags.ids if some feature is hashed

  // Throws for a bad offset, and for a bad id with bounds_check "error".
  void raise(const Bounds& bounds) const;
};

// Checks the bags and every record of the layout.
BagInput read_bags(const BagArguments& bags, const Layout& layout, const LayoutLimits& limits);
// Checks the bags of a call without a layout.
BagInput read_bags(const OneTableBags& bags, const Part& table);

// Returns the counter plus 1; throws if it would overflow.
inline int64_t advanced(const Tensor& counter, const char* name) {
  const int64_t now = *counter.const_data_ptr<int64_t>();
  check_value(now < INT64_MAX, name, " = ", now, " is the last that it can count to");
  return now + 1;
}

}  // namespace rec_kernels
