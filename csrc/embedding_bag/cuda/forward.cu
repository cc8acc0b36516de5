// embedding_bag on the GPU: forward (kernels in pool_table.cu) and the gradient of per_sample_weights.
#include "core/boxing.h"
#include "embedding_bag/cuda/input.cuh"
#include "embedding_bag/cuda/shared_rows.cuh"
#include "row_cache/row_cache.h"

namespace rec_kernels {
namespace {

PoolArgs pool_args(const Tensor& weights, const BagInput& in, const Tensor& status) {
  const Lookup lookup{on_gpu(weights, in.values), in.bags, nullptr, RowFormat::kFp32, in.output_dim, CachedPool{}};
  return {lookup, in.parts, 0, status.mutable_data_ptr<int64_t>()};
}

CachedPool read_cached_rows(const CachedRows& cache, const Tensor& values) {
  if (!check_cached_rows(cache, values)) return {};
  return {cache.rows->const_data_ptr<float>(), cache.slots->const_data_ptr<int64_t>(), cache.rows->numel()};
}

std::tuple<Tensor, Tensor> forward(const Tensor& weights, const BagInput& in, ScalarType type, const CachedPool& cache,
                                   cudaStream_t stream) {
  Tensor output = new_tensor(in.values, {in.bags.output_rows(), in.output_dim}, type);
  Tensor status = new_status(in, limits_of(in.bags.num_parts, weights), in.values, stream);
  const SharedRows shared(in, type, status.mutable_data_ptr<int64_t>(), stream);
  PoolArgs args = pool_args(weights, in, status);
  args.bags.shared_rows = shared.rows();
  args.output = static_cast<uint8_t*>(output.mutable_data_ptr());
  args.output_format = float_format(type);
  args.cache = cache;
  // Also launched without bags: a bad layout may still have output rows, which become NaN.
  for (args.format = 0; args.format < in.parts.num_formats && in.bags.output_rows() > 0; ++args.format) {
    if (cache.slots) launch_pool_cached(args, in.max_dim, stream);
    else launch_pool(args, in.max_dim, stream);
    if (in.parts.mapped) launch_pool_composed(args, in.max_dim, stream);
  }
  shared.expand(args.output);
  return {output, status};
}

std::tuple<Tensor, Tensor> embedding_bag_cuda(const Tensor& weights, const BagArguments& bags, bool,
                                              const CachedRows& cache, std::optional<ScalarType> output_dtype) {
  const ScalarType type = read_output_dtype(output_dtype);
  const Layout layout = read_layout(bags.layout, bags.layout_sizes, bags.values);
  check_weights(weights, bags.values, layout);
  const OnDeviceOf device(bags.values);
  const BagInput in = read_bags(bags, layout, device.stream());
  return forward(weights, in, type, read_cached_rows(cache, bags.values), device.stream());
}

std::tuple<Tensor, Tensor> one_table_cuda(const Tensor& weights, const OneTableBags& bags, bool,
                                          const std::optional<std::string>& format, int64_t embedding_dim,
                                          std::optional<ScalarType> output_dtype) {
  const ScalarType type = read_output_dtype(output_dtype);
  const Part table = read_one_table(weights, bags.values, format, embedding_dim, parse_pooling(bags.pooling));
  const OnDeviceOf device(bags.values);
  return forward(weights, read_bags(bags, table), type, {}, device.stream());
}

std::tuple<Tensor, Tensor> embedding_bag_tables_cuda(const Tensor& weights, const std::vector<Tensor>& tables,
                                                     const BagArguments& bags, bool,
                                                     std::optional<ScalarType> output_dtype) {
  const Layout layout = read_layout(bags.layout, bags.layout_sizes, bags.values);
  check_trainable(layout);
  check_weights(weights, bags.values, layout);
  check_tables_of(weights, tables);
  // The gradients of tables are on the device of the values.
  check(weights, "weights").on_device_of(bags.values, "values");
  const OptionalTensor none;
  return embedding_bag_cuda(weights, bags, false, {none, none, none, none}, output_dtype);
}

std::tuple<Tensor, Tensor> embedding_bag_fused_cuda(const Tensor& weights, const OptionalTensor& sum,
                                                    const Tensor& step, const Tensor& lr, const Tensor&,
                                                    const BagArguments& bags, const UpdateArguments& fused,
                                                    const CachedRows& cache, const OptionalTensor& cache_dirty,
                                                    const OptionalTensor& grad_scale,
                                                    std::optional<ScalarType> output_dtype) {
  // The backward needs these; the forward raises their errors early.
  read_update(bags.values, sum, step, lr, fused, grad_scale);
  check_cache(cache.with(cache_dirty), read_layout(bags.layout, bags.layout_sizes, bags.values), bags.values,
              CacheUse::kUpdate);
  return embedding_bag_cuda(weights, bags, false, cache, output_dtype);
}

Tensor weight_gradient(const Tensor& grad_in, const Tensor& weights, const BagInput& in, const CachedPool& cache,
                       cudaStream_t stream) {
  check_gradient(grad_in, in.values, in.bags.output_rows(), in.output_dim);
  const Tensor grad = as_contiguous(grad_in);
  Tensor out = new_zeros(in.values, {in.bags.num_ids}, ScalarType::Float);
  Tensor status = new_status(in, limits_of(in.bags.num_parts, weights), in.values, stream);
  const SharedRows shared(in, ScalarType::Float, status.mutable_data_ptr<int64_t>(), stream);
  shared.sum(grad.const_data_ptr<float>());
  PoolArgs args = pool_args(weights, in, status);
  args.bags.shared_rows = shared.rows();
  args.cache = cache;
  const auto* grad_data = grad.const_data_ptr<float>();
  auto* out_data = out.mutable_data_ptr<float>();
  for (args.format = 0; args.format < in.parts.num_formats && in.bags.num_bags > 0; ++args.format)
    launch_weight_gradient(args, in.max_dim, grad_data, out_data, stream);
  if (in.parts.most_parts > 1 && in.bags.num_bags > 0)
    launch_composed_weight_gradient(args, in.max_dim, grad_data, out_data, stream);
  return out;
}

Tensor per_sample_weights_gradient(const Tensor& grad, const Tensor& weights, const Tensor& values,
                                   const Tensor& offsets, const Tensor& records,
                                   const std::vector<int64_t>& layout_sizes, const OptionalTensor& bag_starts,
                                   const OptionalTensor& inverse, const std::optional<std::vector<int64_t>>& groups,
                                   const OptionalTensor& cache_rows, const OptionalTensor& cache_slots) {
  const OptionalTensor none;
  // The forward has already reported ids out of range, whose gradient is 0.
  const BagArguments bags{values, offsets, records, layout_sizes, none, bag_starts, inverse, groups, "ignore"};
  const Layout layout = read_layout(records, layout_sizes, values);
  check_weights(weights, values, layout);
  const OnDeviceOf device(values);
  return weight_gradient(grad, weights, read_bags(bags, layout, device.stream()),
                         read_cached_rows({cache_rows, cache_slots, none, none}, values), device.stream());
}

Tensor per_sample_weights_gradient_of_table(const Tensor& grad, const Tensor& weights, const Tensor& values,
                                            const Tensor& offsets, const std::string& pooling, bool include_last_offset,
                                            int64_t padding_idx, const std::optional<std::string>& format,
                                            int64_t embedding_dim) {
  const OneTableBags bags{values, offsets, std::nullopt, pooling, include_last_offset, padding_idx, "ignore"};
  const Part table = read_one_table(weights, values, format, embedding_dim, parse_pooling(pooling));
  const OnDeviceOf device(values);
  return weight_gradient(grad, weights, read_bags(bags, table), {}, device.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) {
  implement<&embedding_bag_cuda>(m, "embedding_bag.layout");
  implement<&one_table_cuda>(m, "embedding_bag.table");
  implement<&embedding_bag_tables_cuda>(m, "embedding_bag_tables.layout");
  implement<&embedding_bag_fused_cuda>(m, "embedding_bag_fused.layout");
  implement<&per_sample_weights_gradient>(m, "embedding_bag_backward_per_sample_weights.layout");
  implement<&per_sample_weights_gradient_of_table>(m, "embedding_bag_backward_per_sample_weights.table");
}

}  // namespace rec_kernels
