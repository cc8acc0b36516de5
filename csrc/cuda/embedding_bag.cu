// embedding_bag on the GPU: forward (kernels in embedding_bag_pool.cu) and the gradient of per_sample_weights.
#include "core/boxing.h"
#include "cuda/embedding_bag_pool.cuh"
#include "cuda/shared_rows.cuh"
#include "ops/row_cache.h"

namespace rec_kernels {
namespace {

// A warp takes a bag: out[i] = (grad of the bag) . (row of id i), times 1 / n for mean.
template <class Format>
__global__ void __launch_bounds__(kThreads) weight_gradient_kernel(PoolArgs a, const float* grad, float* out) {
  if (*a.status == kBadLayout) return;
  const Group<kWarpSize> warp;
  for (int64_t bag = Group<kWarpSize>::first(); bag < a.bags.num_bags; bag += Group<kWarpSize>::stride()) {
    const int64_t feature = a.bags.feature_of(bag), part = a.bags.first_part(feature);
    if (!a.features.has_format(part, a.format) || !a.features.is_plain(part)) continue;
    const Feature f = a.features[part];
    const int64_t D = f.embedding_dim;
    const float* g = grad + a.bags.output_row(bag, feature) * a.output_dim + f.output_offset;
    write_dots(a, f, range_of(a.bags, bag, a.status), warp.lane, out, [&](int64_t id, int64_t i) {
      if (const float* cached = a.cached_row(part, D, i)) return warp_row_dot(g, cached, D, warp.lane);
      const uint8_t* row = a.weights + f.weight_offset + id * Format::row_bytes(D);
      const ColumnReader<Format> reader(row, D, columns_aligned<Format>(row, D));
      return warp_dot(g, D, warp.lane, [&](int64_t c) { return reader.read(c); });
    });
  }
}

PoolArgs pool_args(const Tensor& weights, const BagInput& in, const Tensor& status) {
  return {on_gpu(weights, in.values),         in.features, 0, in.bags, nullptr, RowFormat::kFp32, in.output_dim,
          status.mutable_data_ptr<int64_t>(), CachedPool{}};
}

CachedPool read_cached_rows(const CachedRows& cache, const TableLayout& layout, const Tensor& values) {
  if (!check_cached_rows(cache, layout, values)) return {};
  return {cache.rows->const_data_ptr<float>(), cache.offsets->const_data_ptr<int64_t>(),
          cache.slots->const_data_ptr<int64_t>(), cache.rows->numel()};
}

std::tuple<Tensor, Tensor> forward(const Tensor& weights, const BagInput& in, ScalarType type, const CachedPool& cache,
                                   cudaStream_t stream) {
  Tensor output = new_tensor(in.values, {in.bags.output_rows(), in.output_dim}, type);
  Tensor status = new_status(in, weights.numel(), false, in.values, stream);
  const SharedRows shared(in, output.mutable_data_ptr(), type, status.mutable_data_ptr<int64_t>(), stream);
  PoolArgs args = pool_args(weights, in, status);
  args.bags.row_shifts = shared.row_shifts();
  args.output = output.mutable_data_ptr();
  args.output_format = float_format(type);
  args.cache = cache;
  // Also where there are no bags, and rows that are then of a bad layout.
  for (args.format = 0; args.format < in.features.num_formats && in.bags.output_rows() > 0; ++args.format) {
    if (cache.slots) launch_pool_cached(args, in.max_dim, stream);
    else launch_pool(args, in.max_dim, stream);
    if (in.features.parts) launch_pool_composed(args, in.max_dim, stream);
  }
  shared.expand();
  return {output, status};
}

BagInput read_input(const Tensor& weights, const Tensor& values, const Tensor& offsets,
                    const OptionalTensor& per_sample_weights, const TableLayout& layout, const BagOptions& options,
                    bool include_last_offset, cudaStream_t stream) {
  return read_bags(values, offsets, per_sample_weights, layout, options, weights.size(0),
                   layout.embedding_dims ? 1 : weights.size(1), include_last_offset, stream);
}

std::tuple<Tensor, Tensor> embedding_bag_cuda(const Tensor& weights, const Tensor& values, const Tensor& offsets,
                                              const OptionalTensor& per_sample_weights, const TableLayout& layout,
                                              const BagReading& reading, bool, bool include_last_offset,
                                              const OptionalTensor& cache_rows, const OptionalTensor& cache_offsets,
                                              const OptionalTensor& cache_slots, const OptionalTensor&,
                                              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                              int64_t, std::optional<ScalarType> output_dtype) {
  const BagOptions options = parse_bag_options(reading);
  const ScalarType type = read_output_dtype(output_dtype);
  check_weights(weights, values, layout);
  const OnDeviceOf device(values);
  const BagInput in =
      read_input(weights, values, offsets, per_sample_weights, layout, options, include_last_offset, device.stream());
  return forward(weights, in, type, read_cached_rows({cache_rows, cache_offsets, cache_slots}, layout, values),
                 device.stream());
}

std::tuple<Tensor, Tensor> embedding_bag_tables_cuda(const Tensor& weights, const std::vector<Tensor>& tables,
                                                     const Tensor& values, const Tensor& offsets,
                                                     const OptionalTensor& per_sample_weights,
                                                     const TableLayout& layout, const BagReading& reading, bool,
                                                     std::optional<ScalarType> output_dtype) {
  int64_t start = 0;
  for (const Tensor& t : tables) {
    check_rank(t, 2, "tables");
    start += ceil_div(t.numel(), kTableAlignment) * kTableAlignment;
  }
  check_value(weights.numel() == start, "weights must have ", start,
              " elements, the tables one after the other at multiples of ", kTableAlignment, ", got ", weights.numel());
  check_value(!layout.formats, "formats must be None: embedding_bag_tables is for float32 tables");
  check_same_device(weights, values, "weights", "values");  // gradients of tables are where the values are
  const OptionalTensor none;
  check_value(layout.embedding_dims.has_value(),
              "embedding_dims is missing: embedding_bag_tables needs the layout arguments");
  return embedding_bag_cuda(weights, values, offsets, per_sample_weights, layout, reading, false, true, none, none,
                            none, none, none, none, none, 0, output_dtype);
}

std::tuple<Tensor, Tensor> embedding_bag_fused_cuda(
    const Tensor& weights, const OptionalTensor& sum, const Tensor& step, const Tensor& lr, const Tensor&,
    const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights, const TableLayout& layout,
    const BagReading& reading, const UpdateArguments& fused, const OptionalTensor& cache_rows,
    const OptionalTensor& cache_offsets, const OptionalTensor& cache_slots, const OptionalTensor& cache_tags,
    const OptionalTensor& cache_marks, const OptionalTensor& cache_dirty, const OptionalTensor& cache_sets,
    const OptionalTensor& cache_set_starts, int64_t cache_ways, const OptionalTensor& grad_scale,
    std::optional<ScalarType> output_dtype) {
  read_update(values, layout, sum, step, lr, fused, grad_scale);  // for the backward, but errors come now
  check_cache(
      {cache_rows, cache_offsets, cache_tags, cache_marks, cache_dirty, cache_sets, cache_set_starts, cache_ways},
      layout, values, CacheUse::kUpdate);
  return embedding_bag_cuda(weights, values, offsets, per_sample_weights, layout, reading, false, true, cache_rows,
                            cache_offsets, cache_slots, cache_tags, cache_marks, cache_sets, cache_set_starts,
                            cache_ways, output_dtype);
}

Tensor per_sample_weights_gradient(const Tensor& grad_in, const Tensor& weights, const Tensor& values,
                                   const Tensor& offsets, const TableLayout& layout, const BagReading& reading,
                                   const OptionalTensor& cache_rows, const OptionalTensor& cache_offsets,
                                   const OptionalTensor& cache_slots) {
  const BagOptions options = parse_bag_options(reading);
  check_weights(weights, values, layout);
  const OnDeviceOf device(values);
  const BagInput in = read_input(weights, values, offsets, std::nullopt, layout, options, true, device.stream());
  check_gradient(grad_in, values, in.bags.output_rows(), in.output_dim);
  const Tensor grad = as_contiguous(grad_in);
  Tensor out = new_zeros(values, {in.bags.num_ids}, ScalarType::Float);
  Tensor status = new_status(in, weights.numel(), false, values, device.stream());
  const SharedRows shared(in, grad.const_data_ptr(), ScalarType::Float, status.mutable_data_ptr<int64_t>(),
                          device.stream());
  shared.sum();
  PoolArgs args = pool_args(weights, in, status);
  args.bags.row_shifts = shared.row_shifts();
  args.cache = read_cached_rows({cache_rows, cache_offsets, cache_slots}, layout, values);
  for (args.format = 0; args.format < in.features.num_formats && in.bags.num_bags > 0; ++args.format)
    with_bag_format(in.features.formats[args.format], [&](auto format) {
      launch(weight_gradient_kernel<decltype(format)>, blocks_for_bags(in.bags.num_bags, kWarpSize), dim3(kThreads), 0,
             device.stream(), args, grad.const_data_ptr<float>(), out.mutable_data_ptr<float>());
    });
  if (in.features.parts && in.bags.num_bags > 0)
    launch_composed_weight_gradient(args, grad.const_data_ptr<float>(), out.mutable_data_ptr<float>(), device.stream());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) {
  implement<&embedding_bag_cuda>(m, "embedding_bag");
  implement<&embedding_bag_tables_cuda>(m, "embedding_bag_tables");
  implement<&embedding_bag_fused_cuda>(m, "embedding_bag_fused");
  implement<&per_sample_weights_gradient>(m, "embedding_bag_backward_per_sample_weights");
}

}  // namespace rec_kernels
