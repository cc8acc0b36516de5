// Backward of embedding_bag: each row's gradient summed once, in the order of docs/numerics.md, then stored (dense,
// sparse) or used at once to update the row (fused optimizers). No float atomics, no row is written twice.
//
// A group of lanes takes a row (a run of sorted occurrences), a lane four neighbouring columns. Rows with more than
// kChunk occurrences spread over the machine chunk by chunk first. Bytes moved: the gradient of every occurrence read,
// every touched row and its state read and written once.
#include <type_traits>
#include <vector>

#include "core/device_algorithms.h"
#include "cuda/embedding_bag_backward.cuh"
#include "optimizers/rowwise_adagrad.h"
#include "optimizers/sgd.h"

namespace rec_kernels {
namespace {

// Blocks of 4 * 32 columns that a warp keeps in registers; wider rows are summed twice.
constexpr int kMaxBlocks = 4;
// Blocks that look for long runs among the chunks: several for every multiprocessor of a large GPU.
constexpr int64_t kLongRunBlocks = kMostBlocks < 1024 ? kMostBlocks : 1024;

// A target is what becomes of a row's gradient: expect() before its sum is known, open() once, put() for its columns.
struct DenseTarget {
  static constexpr bool kNeedsMeanSquare = false;
  float* gradient;

  __device__ void expect(const Feature&, int64_t, int) const {}
  __device__ float open(const Feature&, int64_t, int64_t, float) const { return 0.0f; }
  __device__ float* place(const Feature& f, int64_t row, int64_t) const {
    return gradient + f.weight_offset + (row - f.row_offset) * f.embedding_dim;
  }
  __device__ static Vec4 put(const float*, int64_t, int64_t, bool, const Vec4& g, float) { return g; }
};

struct SparseTarget {
  static constexpr bool kNeedsMeanSquare = false;
  int64_t* rows;               // of each run
  const int64_t* first_float;  // of each run
  float* gradients;

  __device__ float open(const Feature& f, int64_t row, int64_t run, float) const {
    rows[run] = row - f.row_offset;
    return 0.0f;
  }
  __device__ void expect(const Feature&, int64_t, int) const {}
  __device__ float* place(const Feature&, int64_t, int64_t run) const { return gradients + first_float[run]; }
  __device__ static Vec4 put(const float*, int64_t, int64_t, bool, const Vec4& g, float) { return g; }
};

template <class Optimizer>
struct UpdateTarget {
  static constexpr bool kNeedsMeanSquare = Optimizer::kNeedsMeanSquare;
  float* weights;
  float* sum;
  const float* lr;
  float eps;

  // The row and its state come from memory, after several reads in a row of what to sum: ask for them first.
  __device__ void expect(const Feature& f, int64_t row, int lane) const {
    if (4 * lane < f.embedding_dim) prefetch(place(f, row, 0) + 4 * lane);
    if (kNeedsMeanSquare && lane == 0) prefetch(sum + row);
  }
  __device__ float open(const Feature&, int64_t row, int64_t, float mean_square) const {
    return Optimizer::make(*lr, eps, sum).prepare(row, mean_square);
  }
  __device__ float* place(const Feature& f, int64_t row, int64_t) const {
    return weights + f.weight_offset + (row - f.row_offset) * f.embedding_dim;
  }
  __device__ static Vec4 put(const float* row, int64_t c, int64_t D, bool aligned, const Vec4& g, float factor) {
    Vec4 w = load_columns(row, c, D, aligned);
    for (int j = 0; j < 4; ++j) w.v[j] = Optimizer::update(w.v[j], g.v[j], factor);
    return w;
  }
};

// Sums a row's gradient and gives it to the target.
template <int G, int kBlocks, class Target, class Sum>
__device__ __forceinline__ void finish_row(const SumArgs& a, const Target& target, const Group<G>& group,
                                           const Feature& f, int64_t row, int64_t run, const Sum& sum) {
  constexpr int64_t kWidth = kBlocks * 4 * G;
  const int64_t D = f.embedding_dim;
  const float inverse = a.grad_scale ? 1.0f / *a.grad_scale : 1.0f;
  target.expect(f, row, group.lane);
  Vec4 g[kBlocks];
  const auto sum_scaled = [&](int64_t column) {
    sum(column, g);
    if (inverse == 1.0f) return;
    for (int k = 0; k < kBlocks; ++k)
      for (int j = 0; j < 4; ++j) g[k].v[j] = g[k].v[j] * inverse;
  };
  // Row statistics: lane l owns partials 4l .. 4l+3 of 128; rows that a smaller group takes have no others.
  float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int64_t column = 0; column < D && (Target::kNeedsMeanSquare || column == 0); column += kWidth) {
    sum_scaled(column);
    for (int k = 0; k < kBlocks; ++k)
      for (int j = 0; j < 4; ++j)
        if (column + (k * G + group.lane) * 4 + j < D) s[j] = fused_multiply_add(g[k].v[j], g[k].v[j], s[j]);
  }
  float square_sum = (s[0] + s[1]) + (s[2] + s[3]);
  for (int distance = G / 2; distance > 0; distance /= 2)
    square_sum += __shfl_xor_sync(group.mask, square_sum, distance, G);
  float factor = 0.0f;
  if (group.lane == 0) factor = target.open(f, row, run, square_sum / static_cast<float>(D));
  factor = group.broadcast(factor, 0);
  float* out = target.place(f, row, run);
  const bool aligned = rows_aligned(out, D);
  for (int64_t column = 0; column < D; column += kWidth) {
    if (D > kWidth) sum_scaled(column);
    for (int k = 0; k < kBlocks; ++k) {
      const int64_t c = column + (k * G + group.lane) * 4;
      store_columns(out, c, D, aligned, Target::put(out, c, D, aligned, g[k], factor));
    }
  }
}

__device__ __forceinline__ Feature feature_of_run(const SumArgs& a, int64_t run) {
  const uint32_t bag = a.runs.bag(a.runs.payloads[a.runs.starts[run]]);
  return a.features[bag / static_cast<uint32_t>(a.batch)];
}

// Runs of at most kChunk occurrences.
template <int G, int kBlocks, class Target>
__global__ void __launch_bounds__(kThreads) finish_short_kernel(SumArgs a, Target target) {
  if (a.skip.now()) return;
  const Group<G> group;
  for (int64_t run = Group<G>::first(); run < *a.runs.num_runs; run += Group<G>::stride()) {
    const int64_t start = a.runs.starts[run], count = a.runs.count(run);
    if (count > kChunk) continue;
    const Feature f = feature_of_run(a, run);
    const OccurrenceSum<G, kBlocks> sum{a, group, start, count, f.embedding_dim};
    finish_row<G, kBlocks>(a, target, group, f, static_cast<int64_t>(a.runs.keys[start]), run, sum);
  }
}

// The long run that chunk `chunk` belongs to: the last whose first chunk is not behind it.
__device__ __forceinline__ int64_t run_of_chunk(const Runs& runs, uint32_t chunk) {
  int64_t low = 0, high = *runs.num_runs;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (runs.chunk_starts[middle] <= chunk) low = middle;
    else high = middle;
  }
  return low;
}

// Sums the chunks of the long runs, a group to a chunk.
template <int G, int kBlocks>
__global__ void __launch_bounds__(kThreads) sum_chunks_kernel(SumArgs a) {
  if (a.skip.now()) return;
  const Group<G> group;
  const int64_t chunks = a.runs.chunk_starts[*a.runs.num_runs];
  for (int64_t chunk = Group<G>::first(); chunk < chunks; chunk += Group<G>::stride()) {
    const int64_t run = run_of_chunk(a.runs, static_cast<uint32_t>(chunk));
    if (group.lane == 0) a.owners[chunk] = static_cast<uint32_t>(run);
    const int64_t done = (chunk - a.runs.chunk_starts[run]) * kChunk, left = a.runs.count(run) - done;
    const int64_t D = feature_of_run(a, run).embedding_dim;
    const OccurrenceSum<G, kBlocks> sum{a, group, a.runs.starts[run] + done, left < kChunk ? left : kChunk, D};
    float* out = a.partials + chunk * a.max_dim;
    for (int64_t column = 0; column < D; column += kBlocks * 4 * G) {
      Vec4 g[kBlocks];
      sum(column, g);
      for (int k = 0; k < kBlocks; ++k)
        store_columns(out, column + (k * G + group.lane) * 4, D, rows_aligned(out, D) && a.max_dim % 4 == 0, g[k]);
    }
  }
}

// A block takes a long run: sums of chunks of its chunk sums until at most kChunk are left, then as a short run.
template <int G, int kBlocks, class Target>
__global__ void __launch_bounds__(kThreads) finish_long_kernel(SumArgs a, Target target) {
  if (a.skip.now()) return;
  const Group<G> group;
  const int mine = threadIdx.x / G, groups = blockDim.x / G;
  const uint32_t chunks = a.runs.chunk_starts[*a.runs.num_runs];
  for (uint32_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int64_t run = a.owners[chunk];
    if (a.runs.chunk_starts[run] != chunk) continue;
    const Feature f = feature_of_run(a, run);
    const int64_t D = f.embedding_dim;
    int64_t count = ceil_div(a.runs.count(run), kChunk);
    float* from = a.partials + int64_t{chunk} * a.max_dim;
    // Half as far: a run has at least two chunks, and what their sums need is at most half of them.
    float* to = a.next_partials + int64_t{chunk / 2} * a.max_dim;
    while (count > kChunk) {
      for (int64_t first = mine * kChunk; first < count; first += groups * kChunk) {
        const int64_t left = count - first;
        const PartialSum<G, kBlocks> sum{group, from + first * a.max_dim, left < kChunk ? left : kChunk, a.max_dim, D};
        float* out = to + first / kChunk * a.max_dim;
        for (int64_t column = 0; column < D; column += kBlocks * 4 * G) {
          Vec4 g[kBlocks];
          sum(column, g);
          for (int k = 0; k < kBlocks; ++k)
            store_columns(out, column + (k * G + group.lane) * 4, D, rows_aligned(out, D), g[k]);
        }
      }
      __syncthreads();
      float* sums = to;
      to = from;
      from = sums;
      count = ceil_div(count, kChunk);
    }
    if (mine == 0) {
      const PartialSum<G, kBlocks> sum{group, from, count, a.max_dim, D};
      finish_row<G, kBlocks>(a, target, group, f, static_cast<int64_t>(a.runs.keys[a.runs.starts[run]]), run, sum);
    }
    __syncthreads();  // the next run of this block may use the same memory
  }
}

__global__ void advance_step_kernel(Skip skip, int64_t* step) {
  if (!skip.now()) ++*step;
}

template <int G, int kBlocks, class Target>
void launch_finish(const SumArgs& a, const Target& target, cudaStream_t stream) {
  launch(finish_short_kernel<G, kBlocks, Target>, blocks_for(a.runs.most_runs, G), dim3(kThreads), 0, stream, a,
         target);
  if (a.runs.most_runs <= kChunk) return;  // too few occurrences for a long run
  launch(sum_chunks_kernel<G, kBlocks>, blocks_for(a.runs.most_chunks, G), dim3(kThreads), 0, stream, a);
  launch(finish_long_kernel<G, kBlocks, Target>, blocks_for(a.runs.most_chunks, kThreads, kLongRunBlocks),
         dim3(kThreads), 0, stream, a, target);
}

template <class Target>
void finish_all(const BagInput& in, SumArgs args, const Target& target, const Tensor& like, cudaStream_t stream) {
  if (in.bags.num_ids == 0 || in.bags.num_bags == 0) return;
  const bool may_be_long = in.bags.num_ids > kChunk;
  const int64_t rows = may_be_long ? args.runs.most_chunks : 0;
  const Tensor partials = new_tensor(like, {rows * in.max_dim}, ScalarType::Float);
  const Tensor next = new_tensor(like, {(rows / 2 + 1) * in.max_dim}, ScalarType::Float);
  args.partials = partials.mutable_data_ptr<float>();
  args.next_partials = next.mutable_data_ptr<float>();
  const Tensor owners = new_tensor(like, {rows * 4}, ScalarType::Byte);
  args.owners = static_cast<uint32_t*>(owners.mutable_data_ptr());
  args.max_dim = in.max_dim;
  const int lanes = lanes_for(in.max_dim);
  with_lanes(lanes, [&](auto group) {
    constexpr int G = decltype(group)::value;
    const int64_t blocks = ceil_div(in.max_dim, 4 * G);
    if constexpr (G < kWarpSize) {
      launch_finish<G, 1>(args, target, stream);
    } else {
      if (blocks == 1) launch_finish<G, 1>(args, target, stream);
      else if (blocks == 2) launch_finish<G, 2>(args, target, stream);
      else launch_finish<G, kMaxBlocks>(args, target, stream);
    }
  });
}

SumArgs sum_args(const BagInput& in, const SortedOccurrences& o, const Tensor& grad, const float* grad_scale,
                 const Skip& skip) {
  return {o.runs,
          in.features,
          in.bags.batch,
          grad.const_data_ptr<float>(),
          in.output_dim,
          grad_scale,
          skip,
          nullptr,
          nullptr,
          nullptr,
          0};
}

BagInput read_bags_for(const std::vector<int64_t>& weights_shape, const Tensor& values, const Tensor& offsets,
                       const OptionalTensor& per_sample_weights, const TableLayout& layout, const BagOptions& options,
                       cudaStream_t stream) {
  const WeightsShape shape = read_weights_shape(weights_shape, layout);
  return read_bags(values, offsets, per_sample_weights, layout, options, shape.rows, shape.columns, true, stream);
}

int64_t floats_of(const std::vector<int64_t>& shape) {
  int64_t floats = 1;
  for (const int64_t size : shape) floats *= size;
  return floats;
}

Tensor backward_dense(const Tensor& grad_in, const std::vector<int64_t>& weights_shape, const Tensor& values,
                      const Tensor& offsets, const OptionalTensor& per_sample_weights,
                      const OptionalTensor& weight_offsets, const OptionalTensor& row_offsets,
                      const OptionalTensor& num_embeddings, const OptionalTensor& embedding_dims,
                      const OptionalTensor& output_offsets, const OptionalTensor& mean, int64_t output_dim,
                      int64_t num_rows, int64_t max_embedding_dim, const std::string& pooling, int64_t padding_idx,
                      const std::string& bounds_check) {
  const TableLayout layout{weight_offsets, row_offsets, num_embeddings, embedding_dims,   output_offsets,
                           mean,           output_dim,  num_rows,       max_embedding_dim};
  const BagOptions options = parse_bag_options(pooling, padding_idx, bounds_check);
  check_same_device(grad_in, values, "grad", "values");
  const OnDeviceOf device(values);
  const BagInput in =
      read_bags_for(weights_shape, values, offsets, per_sample_weights, layout, options, device.stream());
  check_gradient(grad_in, values, in.bags.batch, in.output_dim);
  const Tensor grad = as_contiguous(grad_in),
               status = new_status(in, floats_of(weights_shape), true, grad, device.stream());
  const SortedOccurrences o = sort_occurrences(in, status.mutable_data_ptr<int64_t>(), grad, device.stream());
  Tensor out = torch::stable::new_zeros(grad, {weights_shape.data(), weights_shape.size()}, ScalarType::Float);
  const Skip skip{nullptr, status.const_data_ptr<int64_t>(), nullptr, false};
  finish_all(in, sum_args(in, o, grad, nullptr, skip), DenseTarget{out.mutable_data_ptr<float>()}, grad,
             device.stream());
  return out;
}

// Columns of each run, and behind the last run nothing.
__global__ void __launch_bounds__(kThreads) run_dims_kernel(SumArgs a, int64_t* dims) {
  for (int64_t r = Group<1>::first(); r <= a.runs.most_runs; r += Group<1>::stride())
    dims[r] = r < *a.runs.num_runs ? feature_of_run(a, r).embedding_dim : 0;
}

// Runs whose row is below `row`.
__device__ int64_t runs_below(const Runs& runs, int64_t row) {
  int64_t low = 0, high = *runs.num_runs;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (static_cast<int64_t>(runs.keys[runs.starts[middle]]) < row) low = middle + 1;
    else high = middle;
  }
  return low;
}

__global__ void row_counts_kernel(SumArgs a, int64_t features, int64_t* counts) {
  for (int64_t f = Group<1>::first(); f < features; f += Group<1>::stride()) {
    const Feature table = a.features[f];
    counts[f] = runs_below(a.runs, table.row_offset + table.num_embeddings) - runs_below(a.runs, table.row_offset);
  }
}

std::tuple<Tensor, Tensor, Tensor> backward_sparse(
    const Tensor& grad_in, const std::vector<int64_t>& weights_shape, const Tensor& values, const Tensor& offsets,
    const OptionalTensor& per_sample_weights, const OptionalTensor& weight_offsets, const OptionalTensor& row_offsets,
    const OptionalTensor& num_embeddings, const OptionalTensor& embedding_dims, const OptionalTensor& output_offsets,
    const OptionalTensor& mean, int64_t output_dim, int64_t num_rows, int64_t max_embedding_dim,
    const std::string& pooling, int64_t padding_idx, const std::string& bounds_check) {
  const TableLayout layout{weight_offsets, row_offsets, num_embeddings, embedding_dims,   output_offsets,
                           mean,           output_dim,  num_rows,       max_embedding_dim};
  const BagOptions options = parse_bag_options(pooling, padding_idx, bounds_check);
  check_same_device(grad_in, values, "grad", "values");
  const OnDeviceOf device(values);
  const cudaStream_t stream = device.stream();
  const BagInput in = read_bags_for(weights_shape, values, offsets, per_sample_weights, layout, options, stream);
  check_gradient(grad_in, values, in.bags.batch, in.output_dim);
  const Tensor grad = as_contiguous(grad_in), status = new_status(in, floats_of(weights_shape), true, grad, stream);
  const SortedOccurrences o = sort_occurrences(in, status.mutable_data_ptr<int64_t>(), grad, stream);
  const SumArgs args = sum_args(in, o, grad, nullptr, {});
  // The shape of a sparse gradient is data: this waits for the GPU, as torch's own does.
  int64_t bad = 0, num_runs = 0, floats = 0;
  copy_to_host(&bad, status.const_data_ptr<int64_t>(), sizeof bad, stream);
  check_value(bad >= 0, "the layout or the offsets are not valid");
  const int64_t most = o.runs.most_runs;
  Tensor dims = new_tensor(grad, {most + 1}, ScalarType::Long), first = new_tensor(grad, {most + 1}, ScalarType::Long);
  launch(run_dims_kernel, blocks_for(most + 1, 1), dim3(kThreads), 0, stream, args, dims.mutable_data_ptr<int64_t>());
  exclusive_sum(dims.const_data_ptr<int64_t>(), first.mutable_data_ptr<int64_t>(), most + 1, grad, stream);
  copy_to_host(&num_runs, o.runs.num_runs, sizeof num_runs, stream);
  copy_to_host(&floats, first.const_data_ptr<int64_t>() + most, sizeof floats, stream);
  Tensor rows = new_tensor(grad, {num_runs}, ScalarType::Long);
  Tensor row_grads = new_tensor(grad, {floats}, ScalarType::Float);
  Tensor row_counts = new_tensor(grad, {in.num_features}, ScalarType::Long);
  launch(row_counts_kernel, blocks_for(in.num_features, 1), dim3(kThreads), 0, stream, args, in.num_features,
         row_counts.mutable_data_ptr<int64_t>());
  const SparseTarget target{rows.mutable_data_ptr<int64_t>(), first.const_data_ptr<int64_t>(),
                            row_grads.mutable_data_ptr<float>()};
  finish_all(in, args, target, grad, stream);
  return {rows, row_grads, row_counts};
}

void backward_fused(const Tensor& weights, const OptionalTensor& sum, const Tensor& step, const Tensor& lr,
                    const Tensor& grad_in, const Tensor& values, const Tensor& offsets,
                    const OptionalTensor& per_sample_weights, const OptionalTensor& weight_offsets,
                    const OptionalTensor& row_offsets, const OptionalTensor& num_embeddings,
                    const OptionalTensor& embedding_dims, const OptionalTensor& output_offsets,
                    const OptionalTensor& mean, int64_t output_dim, int64_t num_rows, int64_t max_embedding_dim,
                    const std::string& pooling, int64_t padding_idx, const std::string& bounds_check,
                    const std::string& optimizer_name, double eps, const OptionalTensor& status,
                    const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  const TableLayout layout{weight_offsets, row_offsets, num_embeddings, embedding_dims,   output_offsets,
                           mean,           output_dim,  num_rows,       max_embedding_dim};
  const BagOptions options = parse_bag_options(pooling, padding_idx, bounds_check);
  const Optimizer optimizer = parse_optimizer(optimizer_name);
  check_update(weights, sum, step, lr, optimizer);
  check_weights(weights, values, layout);
  const OnDeviceOf device(weights);
  const cudaStream_t stream = device.stream();
  const BagInput in = read_bags(values, offsets, per_sample_weights, layout, options, weights.size(0),
                                layout.embedding_dims ? 1 : weights.size(1), true, stream);
  check_gradient(grad_in, values, in.bags.batch, in.output_dim);
  check_value(!sum || sum->numel() >= in.num_rows, "sum must have one element per row (", in.num_rows, "), got ",
              sum ? sum->numel() : 0);
  const float* scale = optional_scalar(grad_scale, weights, "grad_scale");
  const float* overflow = optional_scalar(found_inf, weights, "found_inf");
  const Tensor grad = as_contiguous(grad_in), own_status = new_status(in, weights.numel(), true, grad, stream);
  const SortedOccurrences o = sort_occurrences(in, own_status.mutable_data_ptr<int64_t>(), grad, stream);
  const Skip skip{optional_status(status, weights), own_status.const_data_ptr<int64_t>(), overflow, options.raise};
  const SumArgs args = sum_args(in, o, grad, scale, skip);
  float* w = weights.mutable_data_ptr<float>();
  const float* rate = lr.const_data_ptr<float>();
  const auto e = static_cast<float>(eps);
  if (optimizer == Optimizer::kSgd) finish_all(in, args, UpdateTarget<Sgd>{w, nullptr, rate, e}, grad, stream);
  else finish_all(in, args, UpdateTarget<RowwiseAdagrad>{w, sum->mutable_data_ptr<float>(), rate, e}, grad, stream);
  launch(advance_step_kernel, dim3(1), dim3(1), 0, stream, skip, step.mutable_data_ptr<int64_t>());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) {
  m.impl("embedding_bag_backward_dense", TORCH_BOX(&backward_dense));
  m.impl("embedding_bag_backward_sparse", TORCH_BOX(&backward_sparse));
  m.impl("embedding_bag_backward_fused_", TORCH_BOX(&backward_fused));
}

}  // namespace rec_kernels
