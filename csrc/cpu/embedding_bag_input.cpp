#include "cpu/embedding_bag_input.h"

namespace rec_kernels {
namespace {

Feature read_feature(const TableLayout& l, int64_t i, bool mean) {
  return {l.weight_offsets->const_data_ptr<int64_t>()[i], l.row_offsets->const_data_ptr<int64_t>()[i],
          l.num_embeddings->const_data_ptr<int64_t>()[i], l.embedding_dims->const_data_ptr<int64_t>()[i],
          l.output_offsets->const_data_ptr<int64_t>()[i], l.mean ? l.mean->const_data_ptr<bool>()[i] : mean};
}

// A feature's table must lie inside `weights`: the kernels trust what passes here.
void check_feature(const Feature& f, int64_t i, int64_t weights, int64_t output_column) {
  check_value(f.embedding_dim >= 1 && f.embedding_dim <= INT32_MAX, "embedding_dims[", i, "] = ", f.embedding_dim,
              " must be in [1, 2^31)");
  check_value(f.num_embeddings >= 0, "num_embeddings[", i, "] = ", f.num_embeddings, " must not be negative");
  check_value(f.row_offset >= 0 && f.row_offset <= INT64_MAX - f.num_embeddings, "row_offsets[", i,
              "] = ", f.row_offset, " must be in [0, 2^63 - num_embeddings[", i, "])");
  check_value(f.weight_offset >= 0 && f.weight_offset <= weights, "weight_offsets[", i, "] = ", f.weight_offset,
              " must be in [0, ", weights, "], the number of weights");
  check_value(f.num_embeddings <= (weights - f.weight_offset) / f.embedding_dim, "table of feature ", i, " (",
              f.num_embeddings, " x ", f.embedding_dim, " at weight_offsets[", i, "] = ", f.weight_offset,
              ") does not fit in ", weights, " weights");
  check_value(f.output_offset == output_column, "output_offsets[", i, "] = ", f.output_offset, " must be ",
              output_column, ", the sum of the embedding_dims before");
}

void read_features(const TableLayout& layout, int64_t weights, BagInput* in) {
  int64_t column = 0;
  for (int64_t i = 0; i < in->num_features; ++i) {
    const Feature f = in->features[i] = read_feature(layout, i, in->options.mean);
    check_feature(f, i, weights, column);
    column += f.embedding_dim;
    in->max_dim = f.embedding_dim > in->max_dim ? f.embedding_dim : in->max_dim;
    in->num_rows = f.row_offset + f.num_embeddings > in->num_rows ? f.row_offset + f.num_embeddings : in->num_rows;
  }
  check_value(column == layout.output_dim, "output_dim = ", layout.output_dim, " must be ", column,
              ", the sum of embedding_dims");
  check_value(layout.num_rows == 0 || layout.num_rows >= in->num_rows, "num_rows = ", layout.num_rows, " must be 0 or ",
              in->num_rows, ", the most of row_offsets + num_embeddings, or more");
  check_value(layout.max_embedding_dim == 0 || layout.max_embedding_dim >= in->max_dim,
              "max_embedding_dim = ", layout.max_embedding_dim, " must be 0 or ", in->max_dim,
              ", the largest of embedding_dims, or more");
  in->output_dim = column;
}

}  // namespace

BagInput read_bags(const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights,
                   const TableLayout& layout, const BagOptions& options, int64_t rows, int64_t columns,
                   bool include_last_offset) {
  const int64_t features = check_bags(values, offsets, per_sample_weights, layout, include_last_offset);
  BagInput in{as_contiguous(values), as_contiguous(offsets), std::nullopt, nullptr, features, 0, 0, 0, Bags{}, options};
  if (per_sample_weights) in.per_sample_weights = as_contiguous(*per_sample_weights);
  in.features.reset(new Feature[static_cast<size_t>(features)]);
  if (layout.embedding_dims) {
    read_features(layout, rows, &in);
  } else {
    check_value(columns >= 1, "weights must have at least one column, got shape [", rows, ", ", columns, "]");
    in.features[0] = {0, 0, rows, columns, 0, options.mean};
    in.num_rows = rows;
    in.output_dim = in.max_dim = columns;
  }
  in.bags = read_bags(in.values, in.offsets, in.per_sample_weights, options, features, include_last_offset);
  return in;
}

void BagInput::raise(const Bounds& bounds) const {
  const int64_t position = bounds.position;
  if (position == kNoBadPosition) return;
  if (position < 0) {
    // Every worker stops at a bad offset of its own: name the first of all.
    const int64_t first = bags.bad_offset(0, bags.num_bags), i = -1 - first, bag = i > 0 ? i - 1 : 0;
    throw_bad_position({first, bags.batch ? bag / bags.batch : 0, bags.batch ? bag % bags.batch : 0, bags.offset(i),
                        bags.num_ids, i > 0 ? bags.offset(i - 1) : 0});
  }
  if (!options.raise) return;
  int64_t low = 0, high = bags.num_bags;  // the last bag that starts at or before the position
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (bags.offset(middle) <= position ? low : high) = middle;
  }
  const int64_t feature = low / bags.batch;
  throw_bad_position({position, feature, low % bags.batch, bags.id(position), features[feature].num_embeddings, 0});
}

}  // namespace rec_kernels
