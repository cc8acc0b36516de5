#include "embedding_bag/embedding_bag.h"

#include <algorithm>

#include "core/schema.h"

namespace rec_kernels {
namespace {

void check_sizes(const LayoutSizes& s, int64_t parts) {
  const auto check_size = [&](bool ok, const int64_t& value, const char* allowed) {
    check_value(ok, "layout_sizes[", &value - &s.num_features, "] = ", value, " must be ", allowed,
                "; rec_kernels.table_layout makes layout and layout_sizes");
  };
  check_size(s.num_features >= 0 && s.num_features <= parts && (s.num_features > 0) == (parts > 0), s.num_features,
             "the number of features, of which each has a row of layout or several");
  check_size(parts > 0 ? s.output_dim > 0 : s.output_dim == 0, s.output_dim,
             "the columns of all features, 0 without any");
  check_size(s.widest_feature >= 0, s.widest_feature, "at least 0");
  check_size(s.num_rows >= 0, s.num_rows, "at least 0");
  check_size(s.max_embedding_dim >= (parts > 0) && s.max_embedding_dim <= INT32_MAX, s.max_embedding_dim,
             "in [1, 2^31)");
  check_size(s.most_parts >= 1 && s.most_parts <= kMaxParts, s.most_parts, "in [1, 4]");
  check_size(s.cache_ways >= 0 && s.cache_ways <= kMaxWays, s.cache_ways, "in [0, 1024]");
  int64_t known = 0;
  for (int f = 0; f < kNumRowFormats; ++f)
    if (is_bag_format(static_cast<RowFormat>(f))) known |= INT64_C(1) << f;
  check_size(s.formats != 0 && (s.formats & ~known) == 0, s.formats, "a bit for each format of the tables");
  check_size(s.flags >= 0 && s.flags < 64, s.flags,
             "flags: 1 mean, 2 multiplies, 4 bytes, 8 ids are mapped, 16 some are padding, 32 every integer is one");
  check_size(!(s.flags & kMultiplies) || s.most_parts > 1, s.flags,
             "without 2 (multiplies), as no feature has several parts");
}

void check_groups(const BagArguments& bags, int64_t features) {
  check_value(bags.inverse.has_value() == bags.groups.has_value(), "inverse and groups must be given together");
  if (!bags.inverse) return;
  check_value(bags.bag_starts.has_value(), "bag_starts is missing: inverse and groups mean nothing without it");
  const Tensor& inverse = *bags.inverse;
  check(inverse, "inverse").rank(2).dtype(ScalarType::Long).on_device_of(bags.values, "values");
  const std::vector<int64_t>& groups = *bags.groups;
  check_value(static_cast<int64_t>(groups.size()) == features, "groups must have an element for each of the ", features,
              " features, got ", groups.size());
  for (size_t f = 0; f < groups.size(); ++f)
    check_value(groups[f] >= -1 && groups[f] < inverse.size(0), "groups[", f, "] = ", groups[f], " must be in [0, ",
                inverse.size(0), "), the rows of inverse, or -1");
}

void check_jagged(const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights) {
  check(values, "values").rank(1).integer();
  check(offsets, "offsets").rank(1).integer().on_device_of(values, "values");
  if (!per_sample_weights) return;
  check(*per_sample_weights, "per_sample_weights")
      .shape({values.numel()})
      .dtype(ScalarType::Float)
      .on_device_of(values, "values");
}

// Checks the arguments that both kinds of bags share, and makes tensors contiguous.
template <class Arguments>
BagTensors check_tensors(const Arguments& bags, int64_t num_bags) {
  check_value(num_bags < INT64_C(0xffffffff), "offsets describe ", num_bags, " bags; at most 2^32 - 2 fit in a call");
  const bool raises = bags.bounds_check == "error", ignores = bags.bounds_check == "ignore";
  check_value(raises || ignores || bags.bounds_check == "none",
              "bounds_check must be \"error\", \"ignore\" or \"none\", got \"", bags.bounds_check, "\"");
  BagTensors out{as_contiguous(bags.values), as_contiguous(bags.offsets), as_contiguous(bags.per_sample_weights)};
  out.raises = raises;
  Bags& b = out.bags;
  b.ids = out.values.const_data_ptr();
  b.offsets = out.offsets.const_data_ptr();
  if (out.per_sample_weights) b.per_sample_weights = out.per_sample_weights->const_data_ptr<float>();
  b.num_ids = out.values.numel();
  b.num_offsets = out.offsets.numel();
  b.num_bags = num_bags;
  b.ids64 = out.values.scalar_type() == ScalarType::Long;
  b.offsets64 = out.offsets.scalar_type() == ScalarType::Long;
  b.check_ids = raises || ignores;
  return out;
}

Part make_table_part(RowFormat format, int64_t rows, int64_t D, bool mean) {
  Part f{};
  f.num_embeddings = f.id_limit = rows;
  f.embedding_dim = D;
  f.row_bytes = row_bytes(format, D);
  f.format = format;
  f.mean = mean;
  return f;
}

void check_table_shape(const std::vector<int64_t>& shape) {
  check_value(shape.size() == 2, "weights_shape must have 2 elements, got ", shape.size());
  check_value(shape[0] >= 0 && shape[1] >= 1, "weights must have at least one column, got shape [", shape[0], ", ",
              shape[1], "]");
  check_value(shape[1] <= INT32_MAX, "weights must have fewer than 2^31 columns, got shape [", shape[0], ", ", shape[1],
              "]");
}

// Kernels read aligned floats, but a slice of bytes, or memory of another library, may start at any address.
void check_floats_aligned(const Tensor& weights) {
  const auto past = reinterpret_cast<uintptr_t>(weights.const_data_ptr()) % alignof(float);
  check_value(past == 0, "weights must start at a multiple of ", alignof(float),
              " bytes, as its rows are float32; it starts ", past, " bytes past one: a clone of it does not");
}

}  // namespace

Layout read_layout(const Tensor& layout, const std::vector<int64_t>& sizes, const Tensor& values) {
  check(layout, "layout")
      .rank(2)
      .shape({layout.size(0), kLayoutColumns})
      .dtype(ScalarType::Long)
      .contiguous()
      .on_device_of(values, "values");
  check_value(sizes.size() == kLayoutSizes, "layout_sizes must have ", kLayoutSizes, " elements, got ", sizes.size());
  Layout out{static_cast<const TablePart*>(layout.const_data_ptr()), layout.size(0), {}};
  std::copy(sizes.begin(), sizes.end(), &out.sizes.num_features);
  check_sizes(out.sizes, out.num_parts);
  return out;
}

void throw_layout_fault(const Layout& layout, const LayoutLimits& limits, int64_t i, LayoutFault fault) {
  const TablePart& p = layout.parts[i];
  const std::string table = join("a table of ", p.num_embeddings, " x ", p.embedding_dim);
  if (fault == LayoutFault::kWeights)
    throw_value_error(join("layout[", i, "]: ", table, " (", row_format_name(static_cast<RowFormat>(p.format)),
                           ") at byte ", p.weight_offset, " does not fit in weights of ", limits.weight_bytes,
                           " bytes"));
  if (fault == LayoutFault::kState)
    throw_value_error(join("layout[", i, "]: the state of ", table, " at state_offset ", p.state_offset,
                           " does not fit in optimizer state of ", limits.state_elements, " elements"));
  const char* const texts[] = {
      "",
      "feature and part_start must name the features in order, each with its parts side by side",
      "embedding_dim must be at least 1, and at most what layout_sizes says",
      "format must be one of those that layout_sizes names",
      "row_offset and num_embeddings must describe rows below layout_sizes' num_rows",
      "",
      "column and part_column must be those behind the part before, and end where layout_sizes says",
      "id_limit, divisor and modulus must lead to rows of the table; where they map ids, and where padding_idx is not "
      "-1, layout_sizes must know",
      "id_limit, padding_idx, combine, mean and frozen must be those of the feature's first part; they, and "
      "multiplied, must be "
      "known to layout_sizes",
      "table_id must be in [0, 65536), and below the number of learning rates where lr is one for each table",
      "first_row and table_rows must be those of a shard in a table of at most 2^44 rows, first_column a multiple of 4",
      "",
      "cache_sets, cache_first_set and cache_row_offset must lie in the cache, and be 0 for a feature of several parts",
      "by_row must name the parts by their rows; two parts must read one table or have no row in common, those of one "
      "feature the latter",
  };
  throw_value_error(join("layout[", i, "]: ", texts[static_cast<int>(fault)],
                         "; rec_kernels.table_layout makes layout and layout_sizes"));
}

BagTensors check_bags(const BagArguments& bags, const Layout& layout) {
  check_jagged(bags.values, bags.offsets, bags.per_sample_weights);
  check_value(bags.offsets.numel() >= 1, "offsets must have num_features * batch + 1 elements, got none");
  const LayoutSizes& sizes = layout.sizes;
  const int64_t features = sizes.num_features, count = bags.offsets.numel() - 1;
  check_groups(bags, features);
  if (bags.bag_starts)
    check(*bags.bag_starts, "bag_starts")
        .shape({features + 1})
        .dtype(ScalarType::Long)
        .contiguous()
        .on_device_of(bags.values, "values");
  else
    check_value(features == 0 ? count == 0 : count % features == 0,
                "offsets must have num_features * batch + 1 elements, got ", count + 1, " for ", features, " features");
  BagTensors out = check_tensors(bags, count);
  out.inverse = as_contiguous(bags.inverse);
  out.num_rows = sizes.num_rows;
  out.max_dim = sizes.max_embedding_dim;
  out.any_mean = (sizes.flags & kAnyMean) != 0;
  out.multiplies = (sizes.flags & kMultiplies) != 0;
  Bags& b = out.bags;
  b.num_features = features;
  b.batch = bags.inverse ? bags.inverse->size(1) : features ? count / features : 0;
  b.own_rows = bags.bag_starts && !bags.groups;
  b.starts = bags.bag_starts ? bags.bag_starts->const_data_ptr<int64_t>() : nullptr;
  b.parts = sizes.most_parts > 1 ? layout.parts : nullptr;
  b.num_parts = layout.num_parts;
  b.pads = (sizes.flags & kPads) != 0;
  b.padding_idx = -1;
  out.output_dim = b.own_rows ? sizes.widest_feature : sizes.output_dim;
  return out;
}

BagTensors check_bags(const OneTableBags& bags, const Part& table) {
  check_jagged(bags.values, bags.offsets, bags.per_sample_weights);
  const int64_t extra = bags.include_last_offset ? 1 : 0;
  check_value(bags.offsets.numel() >= extra, "offsets must have batch + 1 elements, got none");
  check_value(bags.padding_idx >= -1, "padding_idx = ", bags.padding_idx, " must be an id of the table, or -1: none");
  BagTensors out = check_tensors(bags, bags.offsets.numel() - extra);
  out.num_rows = table.num_embeddings;
  out.output_dim = out.max_dim = table.embedding_dim;
  out.any_mean = table.mean;
  out.bags.num_features = out.bags.num_parts = 1;
  out.bags.batch = out.bags.num_bags;
  out.bags.padding_idx = bags.padding_idx;
  return out;
}

Part read_one_table(const Tensor& weights, const Tensor& values, const std::optional<std::string>& format,
                    int64_t embedding_dim, bool mean) {
  check(weights, "weights").rank(2).contiguous().on_device_of(values, "values");
  const int64_t rows = weights.size(0), columns = weights.size(1);
  check_value(format.has_value() == (embedding_dim != 0), "format and embedding_dim must be given together");
  if (!format) {
    check_float_dtype(weights.scalar_type(), "weights");
    if (weights.scalar_type() == ScalarType::Float) check_floats_aligned(weights);
    check_table_shape({rows, columns});
    return make_table_part(float_format(weights.scalar_type()), rows, columns, mean);
  }
  check(weights, "weights").dtype(ScalarType::Byte);
  const RowFormat known = parse_row_format(*format, "format");
  check_value(is_bag_format(known), "format = \"", *format,
              "\" must be one of fp32, fp16, bf16, int8, int4, mx9, mx6, mx4");
  check_value(embedding_dim >= 1 && embedding_dim <= INT32_MAX, "embedding_dim = ", embedding_dim,
              " must be in [1, 2^31)");
  if (known == RowFormat::kFp32) check_floats_aligned(weights);
  const Part f = make_table_part(known, rows, embedding_dim, mean);
  check_value(columns == f.row_bytes, "weights must have rows of ", f.row_bytes, " bytes for format \"", *format,
              "\" and embedding_dim = ", embedding_dim, ", got ", columns);
  return f;
}

Part read_one_table(const std::vector<int64_t>& shape, bool mean) {
  check_table_shape(shape);
  return make_table_part(RowFormat::kFp32, shape[0], shape[1], mean);
}

void check_weights(const Tensor& weights, const Tensor& values, const Layout& layout) {
  check(weights, "weights").dtype(layout.sizes.flags & kBytes ? ScalarType::Byte : ScalarType::Float).contiguous();
  // Host weights with values on a GPU: on_gpu() of embedding_bag/cuda/input.cuh checks that the GPU can read them.
  if (!weights.is_cpu() || !values.is_cuda()) check(weights, "weights").on_device_of(values, "values");
  check(weights, "weights").rank(1);
  if (layout.sizes.formats >> static_cast<int>(RowFormat::kFp32) & 1) check_floats_aligned(weights);
}

void check_tables_of(const Tensor& weights, const std::vector<Tensor>& tables) {
  const auto size = static_cast<int64_t>(weights.element_size());
  int64_t end = 0;  // in bytes
  for (size_t i = 0; i < tables.size(); ++i) {
    const Tensor& t = tables[i];
    const std::string name = "tables[" + std::to_string(i) + "]";
    check(t, name.c_str()).rank(2).on_device_of(weights, "weights");
    if (size == 1) check_float_dtype(t.scalar_type(), name.c_str());
    else check(t, name.c_str()).dtype(ScalarType::Float);
    end += aligned_bytes(t);
  }
  check_value(weights.numel() * size == end, "weights must have ", end / size,
              " elements, the tables one after the other at multiples of ", kTableAlignment / size, ", got ",
              weights.numel());
}

void check_trainable(const Layout& layout) {
  int64_t floats = 0;
  for (const RowFormat f : {RowFormat::kFp32, RowFormat::kFp16, RowFormat::kBf16}) floats |= 1 << static_cast<int>(f);
  check_value(!(layout.sizes.formats & ~floats),
              "weights must have rows of fp32, fp16 or bf16 only: rows of other formats have no gradient that torch "
              "could take; they are trained by a fused update");
}

void check_gradient(const Tensor& grad, const Tensor& values, int64_t rows, int64_t output_dim) {
  check(grad, "grad").shape({rows, output_dim}).dtype(ScalarType::Float).on_device_of(values, "values");
}

const float* optional_scalar(const OptionalTensor& t, const Tensor& values, const char* name) {
  if (!t) return nullptr;
  check_value(t->numel() == 1, name, " must have one element, got shape ", shape_of(*t));
  check(*t, name).dtype(ScalarType::Float).on_device_of(values, "values");
  return t->const_data_ptr<float>();
}

const int64_t* optional_status(const OptionalTensor& status, const Tensor& values) {
  if (!status) return nullptr;
  check(*status, "status").shape({2}).dtype(ScalarType::Long).on_device_of(values, "values");
  return status->const_data_ptr<int64_t>();
}

void throw_bad_position(const BadPosition& bad) {
  if (bad.position >= 0)
    throw std::out_of_range(join("values[", bad.position, "] = ", bad.value, " (feature ", bad.feature, ", bag ",
                                 bad.bag, ") is out of range: ids of this feature must be in [0, ", bad.limit, ")"));
  const int64_t i = -1 - bad.position;
  const std::string where = join("offsets[", i, "] = ", bad.value, " (feature ", bad.feature, ", bag ", bad.bag, ")");
  if (i > 0 && bad.value < bad.previous)
    throw_value_error(join(where, " is below the offset before it, ", bad.previous));
  throw_value_error(join(where, " must be in [0, ", bad.limit, "], the number of values"));
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  const std::string bags =
      "Tensor values, Tensor offsets, Tensor layout, int[] layout_sizes, Tensor? per_sample_weights=None, Tensor? "
      "bag_starts=None, Tensor? inverse=None, int[]? groups=None, str bounds_check=\"error\"";
  const std::string table =
      "Tensor values, Tensor offsets, Tensor? per_sample_weights=None, str pooling=\"sum\", bool "
      "include_last_offset=True, int padding_idx=-1, str bounds_check=\"error\"";
  const std::string cached =
      ", Tensor? cache_rows=None, Tensor? cache_slots=None, Tensor? cache_tags=None, Tensor? cache_marks=None";
  const std::string output = ", ScalarType? output_dtype=None) -> (Tensor output, Tensor status)";
  const std::string sparse = ") -> (Tensor rows, Tensor row_grads, Tensor row_counts)";
  // Optimizer arguments of the update, which mutates the state, and of the forward, which passes it to autograd.
  const auto optimizer = [](const char* d, const char* e, const char* f) {
    return join(
        ", str optimizer=\"rowwise_adagrad\", float eps=1e-08, float beta1=0.9, float beta2=0.999, float "
        "weight_decay=0.0, str weight_decay_mode=\"l2\", float? clip_grad_value=None, float? clip_grad_norm=None, "
        "Tensor",
        d, "? exp_avg=None, Tensor", e, "? exp_avg_sq=None, Tensor", f,
        "? beta_powers=None, str rounding=\"stochastic\", Tensor? seed=None");
  };
  define(m, "embedding_bag.layout(Tensor weights, " + bags + ", bool sparse=False" + cached + output);
  define(m, "embedding_bag_tables.layout(Tensor weights, Tensor[] tables, " + bags + ", bool sparse=False" + output);
  define(m, "embedding_bag_fused.layout(Tensor weights, Tensor? sum, Tensor step, Tensor lr, Tensor token, " + bags +
                optimizer("", "", "") + cached + ", Tensor? cache_dirty=None, Tensor? grad_scale=None" + output);
  define(m,
         "embedding_bag_backward_fused_.layout(Tensor(a!) weights, Tensor(b!)? sum, Tensor(c!) step, Tensor lr, Tensor "
         "grad, " +
             bags + optimizer("(d!)", "(e!)", "(f!)") +
             ", Tensor? status=None, Tensor? grad_scale=None, Tensor? found_inf=None, Tensor(g!)? cache_rows=None, "
             "Tensor? cache_slots=None, Tensor? cache_tags=None, Tensor? cache_marks=None, Tensor(h!)? "
             "cache_dirty=None) -> ()");
  define(m, "embedding_bag_backward_dense.layout(Tensor grad, Tensor weights, " + bags + ") -> Tensor");
  define(m, "embedding_bag_backward_sparse.layout(Tensor grad, Tensor weights, " + bags + sparse);
  define(m,
         "embedding_bag_backward_per_sample_weights.layout(Tensor grad, Tensor weights, Tensor values, Tensor offsets, "
         "Tensor layout, int[] layout_sizes, Tensor? bag_starts=None, Tensor? inverse=None, int[]? groups=None, "
         "Tensor? cache_rows=None, Tensor? cache_slots=None) -> Tensor");
  define(m, "embedding_bag.table(Tensor weights, " + table +
                ", bool sparse=False, str? format=None, SymInt embedding_dim=0" + output);
  define(m, "embedding_bag_backward_dense.table(Tensor grad, SymInt[] weights_shape, " + table + ") -> Tensor");
  define(m, "embedding_bag_backward_sparse.table(Tensor grad, SymInt[] weights_shape, " + table + sparse);
  define(m,
         "embedding_bag_backward_per_sample_weights.table(Tensor grad, Tensor weights, Tensor values, Tensor offsets, "
         "str pooling=\"sum\", bool include_last_offset=True, int padding_idx=-1, str? format=None, SymInt "
         "embedding_dim=0) -> Tensor");
}

}  // namespace rec_kernels
