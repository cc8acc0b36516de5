// embedding_bag on the CPU: forward and the gradient of per_sample_weights.
#include <algorithm>
#include <vector>

#include "core/boxing.h"
#include "core/cpu/parallel.h"
#include "core/cpu/scratch.h"
#include "embedding_bag/cpu/cache_input.h"
#include "embedding_bag/cpu/shared_rows.h"
#include "embedding_bag/cpu/split_bags.h"

namespace rec_kernels {
namespace {

PoolArgs pool_args(const Tensor& weights, const BagInput& in) {
  const auto* rows = static_cast<const uint8_t*>(weights.const_data_ptr());
  return {{rows, in.bags, nullptr, RowFormat::kFp32, in.output_dim, {}}, in.parts.get(), in.records};
}

std::tuple<Tensor, Tensor> forward(const Tensor& weights, const BagInput& in, std::optional<ScalarType> dtype,
                                   const CachedPool& cache = {}) {
  const ScalarType type = read_output_dtype(dtype);
  Tensor output = new_tensor(weights, {in.bags.output_rows(), in.output_dim}, type);
  Tensor status = new_tensor(weights, {2}, ScalarType::Long);
  PoolArgs args = pool_args(weights, in);
  args.output = static_cast<uint8_t*>(output.mutable_data_ptr());
  args.output_format = float_format(type);
  const SharedRows shared(in, static_cast<int64_t>(output.element_size()));
  args.bags.shared_rows = shared.rows();
  args.cache = cache;
  const auto pool = kernels<EmbeddingBagKernels>().pool;
  const bool wide = type != ScalarType::Float && in.max_dim > kSumBuffer;
  const Bounds bounds = for_bags(in, [&](int64_t begin, int64_t end, Bounds* found) {
    const Scratch<float> sum = wide ? Scratch<float>(in.max_dim) : Scratch<float>();
    PoolArgs own = args;
    own.wide_sum = sum.get();
    pool(own, begin, end, found);
  });
  in.raise(bounds);
  shared.expand(args.output);
  int64_t* report = status.mutable_data_ptr<int64_t>();
  report[0] = bounds.position;
  report[1] = bounds.skipped;
  return {output, status};
}

std::tuple<Tensor, Tensor> embedding_bag_cpu(const Tensor& weights, const BagArguments& bags, bool,
                                             const CachedRows& cache, std::optional<ScalarType> output_dtype) {
  const Layout layout = read_layout(bags.layout, bags.layout_sizes, bags.values);
  check_weights(weights, bags.values, layout);
  const BagInput in = read_bags(bags, layout, limits_of(layout.num_parts, weights));
  return forward(weights, in, output_dtype, read_cached_rows(cache, in, bags.values));
}

std::tuple<Tensor, Tensor> one_table_cpu(const Tensor& weights, const OneTableBags& bags, bool,
                                         const std::optional<std::string>& format, int64_t embedding_dim,
                                         std::optional<ScalarType> output_dtype) {
  const bool mean = parse_pooling(bags.pooling);
  const BagInput in = read_bags(bags, read_one_table(weights, bags.values, format, embedding_dim, mean));
  return forward(weights, in, output_dtype);
}

// The backward assigns gradients to tables by their location in `weights`, so every part must have the location of one.
void check_locations(const std::vector<Tensor>& tables, const BagInput& in, int64_t element_size) {
  std::vector<TablePart> places;
  int64_t start = 0, row = 0;
  for (const Tensor& t : tables) {
    TablePart place{};
    place.weight_offset = start;
    place.row_offset = row;
    place.num_embeddings = t.size(0);
    place.embedding_dim = t.size(1);
    place.format = static_cast<int64_t>(float_format(t.scalar_type()));
    places.push_back(place);
    start += aligned_bytes(t);
    row += t.size(0);
  }
  for (int64_t i = 0; i < in.bags.num_parts; ++i) {
    const Part& f = in.parts[i];
    auto p = std::partition_point(places.begin(), places.end(),
                                  [&](const TablePart& q) { return q.row_offset < f.row_offset; });
    bool known = false;
    for (; !known && p != places.end() && p->row_offset == f.row_offset; ++p)
      known = p->weight_offset == f.weight_offset && p->num_embeddings == f.num_embeddings &&
              p->embedding_dim == f.embedding_dim && p->format == static_cast<int64_t>(f.format);
    check_value(known, "layout[", i, "]: weight_offset ", f.weight_offset / element_size, " and row_offset ",
                f.row_offset, " (", f.num_embeddings, " x ", f.embedding_dim, ", ", row_format_name(f.format),
                ") are the place of none of the tables");
  }
}

// The tables are views of `weights`, named for autograd's sake; see rec_kernels/ops/embedding_bag_autograd.py.
std::tuple<Tensor, Tensor> embedding_bag_tables_cpu(const Tensor& weights, const std::vector<Tensor>& tables,
                                                    const BagArguments& bags, bool,
                                                    std::optional<ScalarType> output_dtype) {
  const Layout layout = read_layout(bags.layout, bags.layout_sizes, bags.values);
  check_trainable(layout);
  check_weights(weights, bags.values, layout);
  const BagInput in = read_bags(bags, layout, limits_of(layout.num_parts, weights));
  check_tables_of(weights, tables);
  check_locations(tables, in, static_cast<int64_t>(weights.element_size()));
  return forward(weights, in, output_dtype);
}

std::tuple<Tensor, Tensor> embedding_bag_fused_cpu(const Tensor& weights, const OptionalTensor& sum, const Tensor& step,
                                                   const Tensor& lr, const Tensor&, const BagArguments& bags,
                                                   const UpdateArguments& fused, const CachedRows& cache,
                                                   const OptionalTensor& cache_dirty, const OptionalTensor& grad_scale,
                                                   std::optional<ScalarType> output_dtype) {
  // The backward needs these; the forward raises their errors early.
  const Update update = read_update(bags.values, sum, step, lr, fused, grad_scale);
  const Layout layout = read_layout(bags.layout, bags.layout_sizes, bags.values);
  check_weights(weights, bags.values, layout);
  const CacheArguments arguments = cache.with(cache_dirty);
  check_cache(arguments, layout, bags.values, CacheUse::kUpdate);
  const BagInput in = read_bags(bags, layout, limits_of(layout.num_parts, weights, arguments, &update));
  return forward(weights, in, output_dtype, read_cached_rows(cache, in, bags.values));
}

Tensor weight_gradient(const Tensor& grad_in, const Tensor& weights, const BagInput& in, const CachedPool& cache) {
  check_gradient(grad_in, in.values, in.bags.output_rows(), in.output_dim);
  const Tensor grad = as_contiguous(grad_in);
  Tensor out = new_zeros(weights, {in.bags.num_ids}, ScalarType::Float);
  const SharedRows shared(in, sizeof(float));
  shared.sum(grad.const_data_ptr<float>());
  PoolArgs args = pool_args(weights, in);
  args.bags.shared_rows = shared.rows();
  args.cache = cache;
  const float* grad_data = grad.const_data_ptr<float>();
  float* out_data = out.mutable_data_ptr<float>();
  const auto kernel = kernels<EmbeddingBagKernels>().weight_gradient;
  in.raise(for_bags(
      in, [&](int64_t begin, int64_t end, Bounds* found) { kernel(args, grad_data, out_data, begin, end, found); }));
  return out;
}

Tensor per_sample_weights_gradient(const Tensor& grad, const Tensor& weights, const Tensor& values,
                                   const Tensor& offsets, const Tensor& layout_records,
                                   const std::vector<int64_t>& layout_sizes, const OptionalTensor& bag_starts,
                                   const OptionalTensor& inverse, const std::optional<std::vector<int64_t>>& groups,
                                   const OptionalTensor& cache_rows, const OptionalTensor& cache_slots) {
  const OptionalTensor none;
  // The forward has already raised any error: an id out of range has gradient 0.
  const BagArguments bags{values, offsets, layout_records, layout_sizes, none, bag_starts, inverse, groups, "ignore"};
  const Layout layout = read_layout(layout_records, layout_sizes, values);
  check_weights(weights, values, layout);
  const BagInput in = read_bags(bags, layout, limits_of(layout.num_parts, weights));
  return weight_gradient(grad, weights, in, read_cached_rows({cache_rows, cache_slots, none, none}, in, values));
}

Tensor per_sample_weights_gradient_of_table(const Tensor& grad, const Tensor& weights, const Tensor& values,
                                            const Tensor& offsets, const std::string& pooling, bool include_last_offset,
                                            int64_t padding_idx, const std::optional<std::string>& format,
                                            int64_t embedding_dim) {
  const OneTableBags bags{values, offsets, std::nullopt, pooling, include_last_offset, padding_idx, "ignore"};
  const Part table = read_one_table(weights, values, format, embedding_dim, parse_pooling(pooling));
  return weight_gradient(grad, weights, read_bags(bags, table), {});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) {
  implement<&embedding_bag_cpu>(m, "embedding_bag.layout");
  implement<&one_table_cpu>(m, "embedding_bag.table");
  implement<&embedding_bag_tables_cpu>(m, "embedding_bag_tables.layout");
  implement<&embedding_bag_fused_cpu>(m, "embedding_bag_fused.layout");
  implement<&per_sample_weights_gradient>(m, "embedding_bag_backward_per_sample_weights.layout");
  implement<&per_sample_weights_gradient_of_table>(m, "embedding_bag_backward_per_sample_weights.table");
}

}  // namespace rec_kernels
