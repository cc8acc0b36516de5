// From the tensors of an embedding_bag call to the plain structs that its kernels read.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/embedding_bag.h"
#include "ops/embedding_bag.h"

namespace rec_kernels {

// How messages name a part: "feature 3"; in a call with partition_starts "part 1 of feature 3".
struct PartName {
  int64_t feature, part;  // within its feature; -1: without partition_starts

  operator std::string() const {
    const std::string name = join("feature ", feature);
    return part >= 0 ? join("part ", part, " of ", name) : name;
  }
};

// Owns what the structs point to (contiguous copies where the caller's tensors were not).
struct BagInput {
  Tensor values;
  Tensor offsets;
  OptionalTensor per_sample_weights;
  std::unique_ptr<Feature[]> features;  // their parts
  int64_t num_features;
  int64_t num_parts;
  int64_t num_rows;  // linear rows: above every row number
  int64_t output_dim;
  int64_t max_dim;
  bool multiplies;        // whether a feature multiplies rows of its parts
  int64_t element_bytes;  // of `weights`
  Bags bags;
  BagOptions options;
  std::vector<int64_t> moment_offsets;  // of the parts' tables in state for every element; empty: there is none
  OptionalTensor inverse;               // [G, B], with bags.groups: which bag of a group each sample has

  PartName name(int64_t part) const {
    const int64_t feature = features[part].number;
    return {feature, bags.part_starts ? part - bags.first_part(feature) : -1};
  }
  // Throws for a bad position when the caller asked for it.
  void raise(const Bounds& bounds) const;
};

// `rows` and `columns` describe the single table of a call without a layout; with one, rows is the number of elements
// of `weights` and columns is ignored. Without include_last_offset, offsets name where bags start and the last one ends
// with the ids, as torch has it. Every feature's range is checked against it.
BagInput read_bags(const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights,
                   const TableLayout& layout, const BagOptions& options, int64_t rows, int64_t columns,
                   bool include_last_offset = true);

// Gives the parts the numbers of their tables; null: 0.
void set_table_ids(const int64_t* table_ids, BagInput& in);

inline BagInput read_bags(const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights,
                          const TableLayout& layout, const BagOptions& options, const Tensor& weights,
                          bool include_last_offset = true) {
  check_weights(weights, values, layout);
  return read_bags(values, offsets, per_sample_weights, layout, options, weights.size(0),
                   layout.embedding_dims ? 1 : weights.size(1), include_last_offset);
}

// What a counter is after a call that advances it.
inline int64_t advanced(const Tensor& counter, const char* name) {
  const int64_t now = *counter.const_data_ptr<int64_t>();
  check_value(now < INT64_MAX, name, " = ", now, " is the last that it can count to");
  return now + 1;
}

}  // namespace rec_kernels
