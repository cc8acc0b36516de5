#include "cpu/embedding_bag_input.h"

#include <algorithm>

#include "cpu/jagged.h"

namespace rec_kernels {
namespace {

// Where features' parts begin, for a layout without partition_starts too.
int64_t part_start(const TableLayout& layout, int64_t feature) {
  return layout.partition_starts ? layout.partition_starts->const_data_ptr<int64_t>()[feature] : feature;
}

// The parts of a layout, one by one, from tensors of sizes and offsets in elements of `weights`.
class FeatureReader {
 public:
  FeatureReader(const TableLayout& layout, int64_t weights, bool mean)
      : layout_(layout), formats_(parse_formats(layout)), weights_(weights), mean_(mean) {}

  // Part i, of feature number `feature`.
  Feature read(int64_t i, int64_t feature, int64_t output_column) const {
    Feature f;
    f.weight_offset = layout_.weight_offsets->const_data_ptr<int64_t>()[i];
    f.row_offset = layout_.row_offsets->const_data_ptr<int64_t>()[i];
    f.num_embeddings = layout_.num_embeddings->const_data_ptr<int64_t>()[i];
    f.embedding_dim = layout_.embedding_dims->const_data_ptr<int64_t>()[i];
    f.output_offset = layout_.output_offsets->const_data_ptr<int64_t>()[i];
    f.table_id = 0;
    f.format = format(i);
    f.mean = layout_.mean ? layout_.mean->const_data_ptr<bool>()[feature] : mean_;
    f.frozen = layout_.frozen && layout_.frozen->const_data_ptr<bool>()[feature];
    f.number = feature;
    check_value(f.embedding_dim >= 1 && f.embedding_dim <= INT32_MAX, "embedding_dims[", i, "] = ", f.embedding_dim,
                " must be in [1, 2^31)");
    f.row_bytes = row_bytes(f.format, f.embedding_dim);
    check(f, i, output_column);
    f.weight_offset *= element_bytes(layout_);
    set_partition(i, &f);
    return f;
  }

 private:
  PartName name(const Feature& f, int64_t i) const {
    return {f.number, layout_.partition_starts ? i - part_start(layout_, f.number) : -1};
  }

  RowFormat format(int64_t i) const {
    if (formats_.empty()) return RowFormat::kFp32;
    const int64_t index = layout_.format_of ? layout_.format_of->const_data_ptr<int64_t>()[i] : 0;
    const auto count = static_cast<int64_t>(formats_.size());
    check_value(index >= 0 && index < count, "format_of[", i, "] = ", index, " must be in [0, ", count,
                "), the number of formats");
    return formats_[static_cast<size_t>(index)];
  }

  void set_partition(int64_t i, Feature* f) const {
    f->partitioned = layout_.partition_starts.has_value();
    f->id_limit = f->num_embeddings;
    f->partition = {};
    f->combine = Combine::kConcat;
    if (!f->partitioned) return;
    const int64_t divisor = layout_.divisors->const_data_ptr<int64_t>()[i];
    const int64_t modulus = layout_.moduli->const_data_ptr<int64_t>()[i];
    const int64_t combine = layout_.combine->const_data_ptr<int64_t>()[f->number];
    f->id_limit = layout_.id_limits->const_data_ptr<int64_t>()[f->number];
    check_value(divisor >= 1, "divisors[", i, "] = ", divisor, " must be at least 1");
    check_value(modulus >= 1, "moduli[", i, "] = ", modulus, " must be at least 1, for a table without rows, too");
    check_value(f->id_limit >= 0, "id_limits[", f->number, "] = ", f->id_limit, " must not be negative");
    check_value(combine >= 0 && combine <= 2, "combine[", f->number, "] = ", combine,
                " must be 0 (concat), 1 (add) or 2 (mult)");
    const int64_t rows = std::min(modulus, Partition::quotients(f->id_limit, divisor));
    check_value(rows <= f->num_embeddings, "num_embeddings[", i, "] = ", f->num_embeddings, " must be ", rows,
                " or more, the rows that divisors[", i, "] = ", divisor, " and moduli[", i, "] = ", modulus,
                " lead to from ids below ", f->id_limit);
    f->partition = Partition::of(divisor, modulus, f->id_limit);
    const bool alone = part_start(layout_, f->number + 1) - part_start(layout_, f->number) == 1;
    f->combine = alone ? Combine::kConcat : static_cast<Combine>(combine);
    f->partitioned = f->partition.divides || f->partition.wraps;
  }

  // A feature's table must lie inside `weights`: the kernels trust what passes here.
  void check(const Feature& f, int64_t i, int64_t output_column) const {
    check_value(f.num_embeddings >= 0, "num_embeddings[", i, "] = ", f.num_embeddings, " must not be negative");
    check_value(f.row_offset >= 0 && f.row_offset <= INT64_MAX - f.num_embeddings, "row_offsets[", i,
                "] = ", f.row_offset, " must be in [0, 2^63 - num_embeddings[", i, "])");
    check_value(f.weight_offset >= 0 && f.weight_offset <= weights_, "weight_offsets[", i, "] = ", f.weight_offset,
                " must be in [0, ", weights_, "], the number of weights");
    check_value(f.format != RowFormat::kFp32 || f.weight_offset * element_bytes(layout_) % 4 == 0, "weight_offsets[", i,
                "] = ", f.weight_offset, " must be a multiple of 4 for format \"fp32\"");
    const int64_t row = f.row_bytes / element_bytes(layout_);
    check_value(f.num_embeddings <= (weights_ - f.weight_offset) / row, "table of ", name(f, i), " (", f.num_embeddings,
                " x ", f.embedding_dim, " at weight_offsets[", i, "] = ", f.weight_offset, ") does not fit in ",
                weights_, " weights");
    check_value(f.output_offset == output_column, "output_offsets[", i, "] = ", f.output_offset, " must be ",
                output_column, why_column(f, i));
  }

  // Why a part's columns begin where they do.
  const char* why_column(const Feature& f, int64_t i) const {
    if (i > part_start(layout_, f.number)) {
      const bool concat = layout_.combine->const_data_ptr<int64_t>()[f.number] == 0;
      return concat ? ", behind the columns of the part before"
                    : ", that of the part before, which it is added to or multiplied with";
    }
    if (layout_.bag_starts && !layout_.groups) return ", as bag_starts is given";
    return layout_.partition_starts ? ", the columns of the features before" : ", the sum of the embedding_dims before";
  }

  const TableLayout& layout_;
  std::vector<RowFormat> formats_;
  int64_t weights_;
  bool mean_;
};

void check_part_starts(const TableLayout& layout, const BagInput& in) {
  const int64_t* starts = layout.partition_starts->const_data_ptr<int64_t>();
  check_value(starts[0] == 0, "partition_starts[0] = ", starts[0], " must be 0");
  for (int64_t f = 1; f <= in.num_features; ++f)
    check_value(starts[f] > starts[f - 1] && starts[f] - starts[f - 1] <= kMaxParts, "partition_starts[", f,
                "] = ", starts[f], " must be 1 to ", kMaxParts, " above the one before it, ", starts[f - 1]);
  check_value(starts[in.num_features] == in.num_parts, "partition_starts[", in.num_features,
              "] = ", starts[in.num_features], " must be ", in.num_parts, ", the number of elements of embedding_dims");
}

// A feature's parts, [first, last): they read different tables, and rows that become one have one shape.
void check_parts(const Feature* features, int64_t first, int64_t last) {
  const Feature& a = features[first];
  for (int64_t i = first + 1; i < last; ++i) {
    const Feature& b = features[i];
    check_value(a.combine == Combine::kConcat || (a.embedding_dim == b.embedding_dim && a.format == b.format),
                "embedding_dims[", i, "] = ", b.embedding_dim, " and format ", row_format_name(b.format), ", of ",
                PartName{b.number, i - first}, ", must be those of its part 0, ", a.embedding_dim, " and ",
                row_format_name(a.format), ": combine[", a.number, "] adds or multiplies them");
    for (int64_t j = first; j < i; ++j)
      check_value(features[j].row_offset != b.row_offset || b.num_embeddings == 0, "row_offsets[", i,
                  "] = ", b.row_offset, ", of ", PartName{b.number, i - first}, ", is that of its part ", j - first,
                  ": the parts of a feature must read different tables");
  }
}

// What the caller says of all features, for a GPU's sake, holds here too.
void check_told(const TableLayout& layout, const BagInput& in) {
  for (int64_t f = 0; f < in.num_features; ++f) {
    const int64_t first = part_start(layout, f), parts = part_start(layout, f + 1) - first;
    check_value(layout.max_parts == 0 || parts <= layout.max_parts, "max_parts = ", layout.max_parts,
                " must be 0 or at least ", parts, ", the parts of feature ", f);
    check_value(layout.multiplies.value_or(true) || in.features[first].combine != Combine::kMult,
                "multiplies is False, but feature ", f, " multiplies its parts: combine[", f, "] = 2");
  }
}

void read_features(const TableLayout& layout, int64_t weights, BagInput* in) {
  if (layout.partition_starts) check_part_starts(layout, *in);
  const FeatureReader reader(layout, weights, in->options.mean);
  const bool own_rows = layout.bag_starts && !layout.groups;  // of every bag
  int64_t column = 0, widest = 0;
  for (int64_t feature = 0; feature < in->num_features; ++feature) {
    const int64_t first = part_start(layout, feature), last = part_start(layout, feature + 1);
    const int64_t before = own_rows ? 0 : column;
    column = before;
    for (int64_t i = first; i < last; ++i) {
      const Feature f = in->features[i] = reader.read(i, feature, column);
      if (f.combine == Combine::kConcat || i + 1 == last) column += f.embedding_dim;
      in->max_dim = std::max(in->max_dim, f.embedding_dim);
      in->multiplies = in->multiplies || f.combine == Combine::kMult;
      in->num_rows = std::max(in->num_rows, f.row_offset + f.num_embeddings);
    }
    widest = std::max(widest, column - before);
    check_parts(in->features.get(), first, last);
  }
  if (layout.partition_starts) check_told(layout, *in);
  if (own_rows)
    check_value(layout.output_dim >= widest, "output_dim = ", layout.output_dim, " must be ", widest,
                ", the most columns of a feature, or more");
  else
    check_value(layout.output_dim == column, "output_dim = ", layout.output_dim, " must be ", column,
                ", the columns of all features");
  check_value(layout.num_rows == 0 || layout.num_rows >= in->num_rows, "num_rows = ", layout.num_rows, " must be 0 or ",
              in->num_rows, ", the most of row_offsets + num_embeddings, or more");
  check_value(layout.max_embedding_dim == 0 || layout.max_embedding_dim >= in->max_dim,
              "max_embedding_dim = ", layout.max_embedding_dim, " must be 0 or ", in->max_dim,
              ", the largest of embedding_dims, or more");
  in->output_dim = layout.output_dim;
}

void check_bag_starts(const Bags& b) {
  const int64_t* starts = b.starts;
  check_value(starts[0] == 0, "bag_starts[0] = ", starts[0], " must be 0");
  for (int64_t f = 1; f <= b.num_features; ++f)
    check_value(starts[f] >= starts[f - 1], "bag_starts[", f, "] = ", starts[f], " is below the one before it, ",
                starts[f - 1]);
  check_value(starts[b.num_features] == b.num_bags, "bag_starts[", b.num_features, "] = ", starts[b.num_features],
              " must be ", b.num_bags, ", the number of bags that offsets describe");
}

// Of features in groups, whose bags samples share, and of the others.
void check_shared_bags(const BagInput& in) {
  const Bags& b = in.bags;
  std::vector<int64_t> first_of(static_cast<size_t>(in.inverse->size(0)), -1);
  const auto count = [&](int64_t f) { return b.starts[f + 1] - b.starts[f]; };
  for (int64_t f = 0; f < b.num_features; ++f) {
    const int64_t group = b.groups[f];
    if (group < 0) {
      check_value(count(f) == b.batch, "bag_starts: feature ", f, " has ", count(f), " bags, and must have ", b.batch,
                  ", one for each sample of inverse: it is in no group");
      continue;
    }
    int64_t& first = first_of[static_cast<size_t>(group)];
    check_value(count(f) <= b.batch, "bag_starts: feature ", f, " has ", count(f), " bags, and inverse only ", b.batch,
                " samples that could have them");
    check_value(first < 0 || count(f) == count(first), "bag_starts: feature ", f, " has ", count(f), " bags, and must ",
                "have as many as feature ", first, ", ", first < 0 ? 0 : count(first), ": both are in group ", group);
    if (first < 0) first = f;
  }
  const auto* inverse = in.inverse->const_data_ptr<int64_t>();
  for (size_t g = 0; g < first_of.size(); ++g) {
    if (first_of[g] < 0) continue;
    const int64_t* numbers = inverse + static_cast<int64_t>(g) * b.batch;
    const int64_t limit = count(first_of[g]);
    const int64_t i = first_bad(b.batch, [numbers, limit](int64_t at) { return is_outside(numbers[at], limit); });
    if (i != kNoBadPosition)
      throw std::out_of_range(join("inverse[", g, ", ", i, "] = ", numbers[i], " is out of range: it must be in [0, ",
                                   limit, "), the bags of feature ", first_of[g], ", which is in group ", g));
  }
}

void read_one_table(const TableLayout& layout, int64_t rows, int64_t columns, BagInput* in) {
  const OneTable table = read_one_table(layout, rows, columns);
  in->features[0] = one_table(table, rows, in->options.mean);
  in->num_rows = rows;
  in->output_dim = in->max_dim = table.embedding_dim;
}

}  // namespace

BagInput read_bags(const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights,
                   const TableLayout& layout, const BagOptions& options, int64_t rows, int64_t columns,
                   bool include_last_offset) {
  const int64_t features = check_bags(values, offsets, per_sample_weights, layout, include_last_offset);
  BagInput in{as_contiguous(values),
              as_contiguous(offsets),
              std::nullopt,
              nullptr,
              features,
              count_parts(layout, features),
              0,
              0,
              0,
              false,
              element_bytes(layout),
              Bags{},
              options,
              {},
              as_contiguous(layout.inverse)};
  in.per_sample_weights = as_contiguous(per_sample_weights);
  in.features.reset(new Feature[static_cast<size_t>(in.num_parts)]);
  if (layout.embedding_dims) {
    read_features(layout, rows, &in);
  } else {
    read_one_table(layout, rows, columns, &in);
  }
  in.bags = read_bags(in.values, in.offsets, in.per_sample_weights, options, layout, features, include_last_offset);
  if (in.bags.starts) check_bag_starts(in.bags);
  if (layout.groups) {
    in.bags.groups = layout.groups->data();
    check_shared_bags(in);
  }
  if (in.bags.num_bags == 0) {  // no bag, and so no kernel, reads the one offset there is
    Bounds bounds;
    bounds.position = in.bags.bad_offset(0, 0);
    in.raise(bounds);
  }
  return in;
}

void set_table_ids(const int64_t* table_ids, BagInput& in) {
  for (int64_t f = 0; table_ids && f < in.num_parts; ++f) {
    check_value(table_ids[f] >= 0 && table_ids[f] < kMaxTableId, "table_ids[", f, "] = ", table_ids[f],
                " must be in [0, ", kMaxTableId, ")");
    in.features[f].table_id = table_ids[f];
  }
}

void BagInput::raise(const Bounds& bounds) const {
  const int64_t position = bounds.position;
  if (position == kNoBadPosition) return;
  if (position < 0) {
    // Every worker stops at a bad offset of its own: name the first of all.
    const int64_t first = bags.bad_offset(0, bags.num_bags), i = -1 - first, bag = i > 0 ? i - 1 : 0;
    const int64_t feature = bags.num_bags ? bags.feature_of(bag) : 0;
    throw_bad_position(
        {first, feature, bag - bags.first_bag(feature), bags.offset(i), bags.num_ids, i > 0 ? bags.offset(i - 1) : 0});
  }
  if (!options.raise) return;
  int64_t low = 0, high = bags.num_bags;  // the last bag that starts at or before the position
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (bags.offset(middle) <= position ? low : high) = middle;
  }
  const int64_t feature = bags.feature_of(low);
  throw_bad_position({position, feature, low - bags.first_bag(feature), bags.id(position),
                      features[bags.first_part(feature)].id_limit, 0});
}

}  // namespace rec_kernels
