// Forward of embedding_bag, and the gradient of per_sample_weights.
//
// A group of lanes takes a bag, a lane four neighbouring columns (one 16-byte load where rows are aligned). The group
// loads its ids together, one to a lane, and passes them around; kInFlight rows are on their way at any time. Rows are
// added in ascending position. Bytes moved: every row read once per occurrence, the ids, the output written once.
#include <type_traits>

#include "cuda/embedding_bag.cuh"

namespace rec_kernels {
namespace {

// Rows a group has on their way: 4 x 16 bytes x 2048 threads cover the latency of an H200's memory; more cost
// registers.
constexpr int kInFlight = 4;
// Blocks of 4 * 32 columns of a row that a warp keeps in registers before it goes through the ids again.
constexpr int kMaxBlocks = 4;

struct PoolArgs {
  const float* weights;
  Features features;
  Bags bags;
  float* output;
  int64_t output_dim;
  int64_t* status;
};

// Ids [begin, begin + G) of a bag, one to a lane: the row's first float (or -1: the id does not count) and its factor.
template <int G>
struct IdsOfLanes {
  int64_t row;
  float factor;

  __device__ __forceinline__ IdsOfLanes(const PoolArgs& a, const Feature& f, const Group<G>& group, int64_t begin,
                                        int64_t stop, bool report)
      : row(-1), factor(1.0f) {
    const int64_t i = begin + group.lane;
    if (i >= stop) return;
    const int64_t id = a.bags.id(i);
    if (!a.bags.in_range(id, f)) {
      if (!report) return;
      note_bad(a.status, i);
      atomicAdd(reinterpret_cast<unsigned long long*>(a.status + 1), 1ull);
    } else if (id != a.bags.padding_idx) {
      row = f.weight_offset + id * f.embedding_dim;
      if (a.bags.per_sample_weights) factor = a.bags.per_sample_weights[i];
    }
  }
};

// Columns [column, column + kBlocks * 4 * G) of one bag.
template <int G, int kBlocks, bool kWeighted>
__device__ __forceinline__ void pool_columns(const PoolArgs& a, const Feature& f, const Group<G>& group, Range ids,
                                             int64_t sample, int64_t column) {
  const int64_t D = f.embedding_dim, first = column + 4 * group.lane;
  const bool aligned = rows_aligned(a.weights + f.weight_offset, D);
  Vec4 sum[kBlocks] = {};
  int64_t counted = 0;
  for (int64_t begin = ids.start; begin < ids.stop; begin += G) {
    const IdsOfLanes<G> mine(a, f, group, begin, ids.stop, column == 0);
    const int here = static_cast<int>(ids.stop - begin < G ? ids.stop - begin : G);
    for (int next = 0; next < here; next += kInFlight) {
      int64_t row[kInFlight];
      float factor[kInFlight];
      Vec4 x[kInFlight][kBlocks];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        // Lanes past the last id hold no row, and the number of the last lane is never passed.
        row[u] = group.broadcast(mine.row, next + u);
        factor[u] = kWeighted ? group.broadcast(mine.factor, next + u) : 1.0f;
#pragma unroll
        for (int k = 0; k < kBlocks; ++k)
          if (row[u] >= 0) x[u][k] = load_columns(a.weights + row[u], first + k * 4 * G, D, aligned);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (row[u] < 0) continue;
        ++counted;
#pragma unroll
        for (int k = 0; k < kBlocks; ++k)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sum[k].v[j] =
                kWeighted ? fused_multiply_add(factor[u], x[u][k].v[j], sum[k].v[j]) : sum[k].v[j] + x[u][k].v[j];
      }
    }
  }
  float* out = a.output + sample * a.output_dim + f.output_offset;
  const bool out_aligned = rows_aligned(out, D) && a.output_dim % 4 == 0;
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    if (f.mean && counted > 1)
      for (int j = 0; j < 4; ++j) sum[k].v[j] = sum[k].v[j] / static_cast<float>(counted);
    store_columns(out, first + k * 4 * G, D, out_aligned, sum[k]);
  }
}

template <int G, int kBlocks, bool kWeighted>
__global__ void __launch_bounds__(kThreads) pool_kernel(PoolArgs a) {
  if (*a.status == kBadLayout) {  // nothing can be looked up
    const int64_t size = a.bags.batch * a.output_dim;
    for (int64_t i = Group<1>::first(); i < size; i += Group<1>::stride()) a.output[i] = __builtin_nanf("");
    return;
  }
  const Group<G> group;
  for (int64_t bag = Group<G>::first(); bag < a.bags.num_bags; bag += Group<G>::stride()) {
    const Feature f = a.features[bag / a.bags.batch];
    const Range ids = range_of(a.bags, bag, a.status);
    for (int64_t column = 0; column < f.embedding_dim; column += kBlocks * 4 * G)
      pool_columns<G, kBlocks, kWeighted>(a, f, group, ids, bag % a.bags.batch, column);
  }
}

// A warp takes a bag: out[i] = (grad of the bag) . (row of id i), times 1 / n for mean.
__global__ void __launch_bounds__(kThreads) weight_gradient_kernel(PoolArgs a, const float* grad, float* out) {
  if (*a.status == kBadLayout) return;
  const Group<kWarpSize> warp;
  for (int64_t bag = Group<kWarpSize>::first(); bag < a.bags.num_bags; bag += Group<kWarpSize>::stride()) {
    const Feature f = a.features[bag / a.bags.batch];
    const Range ids = range_of(a.bags, bag, a.status);
    const float* g = grad + bag % a.bags.batch * a.output_dim + f.output_offset;
    int64_t counted = 0;
    for (int64_t i = ids.start; i < ids.stop; ++i) {
      const int64_t id = a.bags.id(i);
      counted += a.bags.in_range(id, f) && id != a.bags.padding_idx;
    }
    const float each = f.mean && counted > 1 ? 1.0f / static_cast<float>(counted) : 1.0f;
    for (int64_t i = ids.start; i < ids.stop; ++i) {
      const int64_t id = a.bags.id(i);
      float dot = 0.0f;
      if (a.bags.in_range(id, f) && id != a.bags.padding_idx)
        dot = warp_row_dot(g, a.weights + f.weight_offset + id * f.embedding_dim, f.embedding_dim, warp.lane);
      else if (!a.bags.in_range(id, f) && warp.lane == 0) note_bad(a.status, i);
      if (warp.lane == 0) out[i] = f.mean && counted > 1 ? dot * each : dot;
    }
  }
}

template <bool kWeighted>
void launch_pool(const PoolArgs& a, int64_t max_dim, cudaStream_t stream) {
  const int lanes = lanes_for(max_dim);
  const int64_t blocks = ceil_div(max_dim, 4 * lanes);
  with_lanes(lanes, [&](auto group) {
    constexpr int G = decltype(group)::value;
    const dim3 grid = blocks_for(a.bags.num_bags, G);
    if constexpr (G < kWarpSize) {
      launch(pool_kernel<G, 1, kWeighted>, grid, dim3(kThreads), 0, stream, a);
    } else {
      if (blocks == 1) launch(pool_kernel<G, 1, kWeighted>, grid, dim3(kThreads), 0, stream, a);
      else if (blocks == 2) launch(pool_kernel<G, 2, kWeighted>, grid, dim3(kThreads), 0, stream, a);
      else launch(pool_kernel<G, kMaxBlocks, kWeighted>, grid, dim3(kThreads), 0, stream, a);
    }
  });
}

std::tuple<Tensor, Tensor> forward(const Tensor& weights, const BagInput& in, cudaStream_t stream) {
  Tensor output = new_tensor(weights, {in.bags.batch, in.output_dim}, ScalarType::Float);
  Tensor status = new_status(in, weights.numel(), false, weights, stream);
  const PoolArgs args{weights.const_data_ptr<float>(),  in.features,   in.bags,
                      output.mutable_data_ptr<float>(), in.output_dim, status.mutable_data_ptr<int64_t>()};
  if (in.bags.num_bags > 0) {
    if (in.bags.per_sample_weights) launch_pool<true>(args, in.max_dim, stream);
    else launch_pool<false>(args, in.max_dim, stream);
  }
  return {output, status};
}

BagInput read_input(const Tensor& weights, const Tensor& values, const Tensor& offsets,
                    const OptionalTensor& per_sample_weights, const TableLayout& layout, const BagOptions& options,
                    bool include_last_offset, cudaStream_t stream) {
  return read_bags(values, offsets, per_sample_weights, layout, options, weights.size(0),
                   layout.embedding_dims ? 1 : weights.size(1), include_last_offset, stream);
}

std::tuple<Tensor, Tensor> embedding_bag_cuda(
    const Tensor& weights, const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights,
    const OptionalTensor& weight_offsets, const OptionalTensor& row_offsets, const OptionalTensor& num_embeddings,
    const OptionalTensor& embedding_dims, const OptionalTensor& output_offsets, const OptionalTensor& mean,
    int64_t output_dim, int64_t num_rows, int64_t max_embedding_dim, const std::string& pooling, int64_t padding_idx,
    const std::string& bounds_check, bool, bool include_last_offset) {
  const TableLayout layout{weight_offsets, row_offsets, num_embeddings, embedding_dims,   output_offsets,
                           mean,           output_dim,  num_rows,       max_embedding_dim};
  const BagOptions options = parse_bag_options(pooling, padding_idx, bounds_check);
  check_weights(weights, values, layout);
  const OnDeviceOf device(weights);
  return forward(
      weights,
      read_input(weights, values, offsets, per_sample_weights, layout, options, include_last_offset, device.stream()),
      device.stream());
}

std::tuple<Tensor, Tensor> embedding_bag_tables_cuda(
    const Tensor& weights, const std::vector<Tensor>& tables, const Tensor& values, const Tensor& offsets,
    const OptionalTensor& per_sample_weights, const OptionalTensor& weight_offsets, const OptionalTensor& row_offsets,
    const OptionalTensor& num_embeddings, const OptionalTensor& embedding_dims, const OptionalTensor& output_offsets,
    const OptionalTensor& mean, int64_t output_dim, int64_t num_rows, int64_t max_embedding_dim,
    const std::string& pooling, int64_t padding_idx, const std::string& bounds_check, bool) {
  int64_t start = 0;
  for (const Tensor& t : tables) {
    check_rank(t, 2, "tables");
    start += ceil_div(t.numel(), kTableAlignment) * kTableAlignment;
  }
  check_value(weights.numel() == start, "weights must have ", start,
              " elements, the tables one after the other at multiples of ", kTableAlignment, ", got ", weights.numel());
  check_value(embedding_dims.has_value(), "embedding_dims is missing: embedding_bag_tables needs the layout arguments");
  return embedding_bag_cuda(weights, values, offsets, per_sample_weights, weight_offsets, row_offsets, num_embeddings,
                            embedding_dims, output_offsets, mean, output_dim, num_rows, max_embedding_dim, pooling,
                            padding_idx, bounds_check, false, true);
}

std::tuple<Tensor, Tensor> embedding_bag_fused_cuda(
    const Tensor& weights, const OptionalTensor& sum, const Tensor& step, const Tensor& lr, const Tensor&,
    const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights,
    const OptionalTensor& weight_offsets, const OptionalTensor& row_offsets, const OptionalTensor& num_embeddings,
    const OptionalTensor& embedding_dims, const OptionalTensor& output_offsets, const OptionalTensor& mean,
    int64_t output_dim, int64_t num_rows, int64_t max_embedding_dim, const std::string& pooling, int64_t padding_idx,
    const std::string& bounds_check, const std::string& optimizer, double) {
  check_update(weights, sum, step, lr, parse_optimizer(optimizer));
  return embedding_bag_cuda(weights, values, offsets, per_sample_weights, weight_offsets, row_offsets, num_embeddings,
                            embedding_dims, output_offsets, mean, output_dim, num_rows, max_embedding_dim, pooling,
                            padding_idx, bounds_check, false, true);
}

Tensor per_sample_weights_gradient(const Tensor& grad_in, const Tensor& weights, const Tensor& values,
                                   const Tensor& offsets, const OptionalTensor& weight_offsets,
                                   const OptionalTensor& row_offsets, const OptionalTensor& num_embeddings,
                                   const OptionalTensor& embedding_dims, const OptionalTensor& output_offsets,
                                   const OptionalTensor& mean, int64_t output_dim, int64_t num_rows,
                                   int64_t max_embedding_dim, const std::string& pooling, int64_t padding_idx,
                                   const std::string& bounds_check) {
  const TableLayout layout{weight_offsets, row_offsets, num_embeddings, embedding_dims,   output_offsets,
                           mean,           output_dim,  num_rows,       max_embedding_dim};
  const BagOptions options = parse_bag_options(pooling, padding_idx, bounds_check);
  check_weights(weights, values, layout);
  const OnDeviceOf device(weights);
  const BagInput in = read_input(weights, values, offsets, std::nullopt, layout, options, true, device.stream());
  check_gradient(grad_in, values, in.bags.batch, in.output_dim);
  const Tensor grad = as_contiguous(grad_in);
  Tensor out = torch::stable::new_zeros(weights, {&in.bags.num_ids, 1}, ScalarType::Float);
  Tensor status = new_status(in, weights.numel(), false, weights, device.stream());
  const PoolArgs args{weights.const_data_ptr<float>(),   in.features, in.bags, nullptr, in.output_dim,
                      status.mutable_data_ptr<int64_t>()};
  if (in.bags.num_bags > 0)
    launch(weight_gradient_kernel, blocks_for(in.bags.num_bags, kWarpSize), dim3(kThreads), 0, device.stream(), args,
           grad.const_data_ptr<float>(), out.mutable_data_ptr<float>());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) {
  m.impl("embedding_bag", TORCH_BOX(&embedding_bag_cuda));
  m.impl("embedding_bag_tables", TORCH_BOX(&embedding_bag_tables_cuda));
  m.impl("embedding_bag_fused", TORCH_BOX(&embedding_bag_fused_cuda));
  m.impl("embedding_bag_backward_per_sample_weights", TORCH_BOX(&per_sample_weights_gradient));
}

}  // namespace rec_kernels
