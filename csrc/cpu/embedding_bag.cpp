// embedding_bag on the CPU: forward and the gradient of per_sample_weights.
#include <algorithm>
#include <vector>

#include "core/boxing.h"
#include "core/parallel.h"
#include "cpu/for_bags.h"
#include "cpu/row_cache_input.h"
#include "cpu/shared_rows.h"

namespace rec_kernels {
namespace {

PoolArgs pool_args(const Tensor& weights, const BagInput& in) {
  return {in.features.get(), in.bags, static_cast<const uint8_t*>(weights.const_data_ptr()), nullptr, in.output_dim,
          RowFormat::kFp32,  {}};
}

std::tuple<Tensor, Tensor> forward(const Tensor& weights, const BagInput& in, std::optional<ScalarType> dtype,
                                   const CachedPool& cache = {}) {
  const ScalarType type = read_output_dtype(dtype);
  Tensor output = new_tensor(weights, {in.bags.output_rows(), in.output_dim}, type);
  Tensor status = new_tensor(weights, {2}, ScalarType::Long);
  PoolArgs args = pool_args(weights, in);
  args.output = output.mutable_data_ptr();
  args.output_format = float_format(type);
  const SharedRows shared(in, args.output, static_cast<int64_t>(output.element_size()));
  args.bags.row_shifts = shared.row_shifts();
  args.cache = cache;
  const auto pool = kernels<EmbeddingBagKernels>().pool;
  const Bounds bounds = for_bags(in, [&](int64_t begin, int64_t end, Bounds* found) { pool(args, begin, end, found); });
  in.raise(bounds);
  shared.expand(args.output);
  int64_t* report = status.mutable_data_ptr<int64_t>();
  report[0] = bounds.position;
  report[1] = bounds.skipped;
  return {output, status};
}

std::tuple<Tensor, Tensor> embedding_bag_cpu(const Tensor& weights, const Tensor& values, const Tensor& offsets,
                                             const OptionalTensor& per_sample_weights, const TableLayout& layout,
                                             const BagReading& reading, bool, bool include_last_offset,
                                             const OptionalTensor& cache_rows, const OptionalTensor& cache_offsets,
                                             const OptionalTensor& cache_slots, const OptionalTensor&,
                                             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                             int64_t, std::optional<ScalarType> output_dtype) {
  const BagOptions options = parse_bag_options(reading);
  const BagInput in = read_bags(values, offsets, per_sample_weights, layout, options, weights, include_last_offset);
  return forward(weights, in, output_dtype,
                 read_cached_rows({cache_rows, cache_offsets, cache_slots}, layout, in, values));
}

// The backward hands out gradients by the tables' places in `weights`, so every feature must name one of these places.
void check_tables(const Tensor& weights, const std::vector<Tensor>& tables, const BagInput& in) {
  std::vector<Feature> places;
  int64_t start = 0, row = 0;
  for (const Tensor& t : tables) {
    check_rank(t, 2, "tables");
    places.push_back(one_table({RowFormat::kFp32, t.size(1), 4 * t.size(1)}, t.size(0), false));
    places.back().weight_offset = 4 * start;
    places.back().row_offset = row;
    start += ceil_div(t.numel(), kTableAlignment) * kTableAlignment;
    row += t.size(0);
  }
  check_value(weights.numel() == start, "weights must have ", start,
              " elements, the tables one after the other at multiples of ", kTableAlignment, ", got ", weights.numel());
  for (int64_t i = 0; i < in.num_parts; ++i) {
    const Feature& f = in.features[i];
    auto p = std::partition_point(places.begin(), places.end(),
                                  [&](const Feature& q) { return q.row_offset < f.row_offset; });
    bool known = false;
    for (; !known && p != places.end() && p->row_offset == f.row_offset; ++p)
      known = p->weight_offset == f.weight_offset && p->num_embeddings == f.num_embeddings &&
              p->embedding_dim == f.embedding_dim;
    check_value(known, "weight_offsets[", i, "] = ", f.weight_offset / 4, ", row_offsets[", i, "] = ", f.row_offset,
                " (", f.num_embeddings, " x ", f.embedding_dim, ") is the place of none of the tables");
  }
}

// The tables are views of `weights`, named for autograd's sake; see rec_kernels/ops/embedding_bag_autograd.py.
std::tuple<Tensor, Tensor> embedding_bag_tables_cpu(const Tensor& weights, const std::vector<Tensor>& tables,
                                                    const Tensor& values, const Tensor& offsets,
                                                    const OptionalTensor& per_sample_weights, const TableLayout& layout,
                                                    const BagReading& reading, bool,
                                                    std::optional<ScalarType> output_dtype) {
  check_value(layout.embedding_dims.has_value(),
              "embedding_dims is missing: embedding_bag_tables needs the layout arguments");
  const BagOptions options = parse_bag_options(reading);
  check_value(!layout.formats, "formats must be None: embedding_bag_tables is for float32 tables");
  const BagInput in = read_bags(values, offsets, per_sample_weights, layout, options, weights);
  check_tables(weights, tables, in);
  return forward(weights, in, output_dtype);
}

std::tuple<Tensor, Tensor> embedding_bag_fused_cpu(
    const Tensor& weights, const OptionalTensor& sum, const Tensor& step, const Tensor& lr, const Tensor&,
    const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights, const TableLayout& layout,
    const BagReading& reading, const UpdateArguments& fused, const OptionalTensor& cache_rows,
    const OptionalTensor& cache_offsets, const OptionalTensor& cache_slots, const OptionalTensor& cache_tags,
    const OptionalTensor& cache_marks, const OptionalTensor& cache_dirty, const OptionalTensor& cache_sets,
    const OptionalTensor& cache_set_starts, int64_t cache_ways, const OptionalTensor& grad_scale,
    std::optional<ScalarType> output_dtype) {
  const BagOptions options = parse_bag_options(reading);
  read_update(values, layout, sum, step, lr, fused, grad_scale);  // for the backward, but errors come now
  const BagInput in = read_bags(values, offsets, per_sample_weights, layout, options, weights);
  read_cache(
      {cache_rows, cache_offsets, cache_tags, cache_marks, cache_dirty, cache_sets, cache_set_starts, cache_ways},
      layout, in, values);
  return forward(weights, in, output_dtype,
                 read_cached_rows({cache_rows, cache_offsets, cache_slots}, layout, in, values));
}

Tensor per_sample_weights_gradient(const Tensor& grad_in, const Tensor& weights, const Tensor& values,
                                   const Tensor& offsets, const TableLayout& layout, const BagReading& reading,
                                   const OptionalTensor& cache_rows, const OptionalTensor& cache_offsets,
                                   const OptionalTensor& cache_slots) {
  const BagOptions options = parse_bag_options(reading);
  const BagInput in = read_bags(values, offsets, std::nullopt, layout, options, weights);
  check_gradient(grad_in, values, in.bags.output_rows(), in.output_dim);
  const Tensor grad = as_contiguous(grad_in);
  Tensor out = new_zeros(weights, {in.bags.num_ids}, ScalarType::Float);
  const SharedRows shared(in, grad.const_data_ptr(), sizeof(float));
  shared.sum(grad.const_data_ptr<float>());
  PoolArgs args = pool_args(weights, in);
  args.bags.row_shifts = shared.row_shifts();
  args.cache = read_cached_rows({cache_rows, cache_offsets, cache_slots}, layout, in, values);
  const float* grad_data = grad.const_data_ptr<float>();
  float* out_data = out.mutable_data_ptr<float>();
  const auto kernel = kernels<EmbeddingBagKernels>().weight_gradient;
  in.raise(for_bags(
      in, [&](int64_t begin, int64_t end, Bounds* found) { kernel(args, grad_data, out_data, begin, end, found); }));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) {
  implement<&embedding_bag_cpu>(m, "embedding_bag");
  implement<&embedding_bag_tables_cpu>(m, "embedding_bag_tables");
  implement<&embedding_bag_fused_cpu>(m, "embedding_bag_fused");
  implement<&per_sample_weights_gradient>(m, "embedding_bag_backward_per_sample_weights");
}

}  // namespace rec_kernels
