// Backward of embedding_bag: sums each row's gradient in the order of docs/numerics.md, then stores it (dense, sparse)
// or updates the row (fused optimizers). No float atomics; no row is written twice.
#include "core/boxing.h"
#include "core/cuda/device_algorithms.h"
#include "embedding_bag/cuda/cache_input.cuh"
#include "embedding_bag/cuda/shared_rows.cuh"
#include "embedding_bag/cuda/targets_elementwise.cuh"
#include "rows/cuda/writer.cuh"

namespace rec_kernels {
namespace {

// Gradients to be returned: dense, indexed by row, or sparse, indexed by run.
struct StoredTarget {
  static constexpr bool kElementwise = false, kEncodes = false, kUpdates = false;
  float* gradients;
  int64_t* rows;               // row index per run; null: dense
  const int64_t* first_float;  // start in `gradients` per run

  __device__ static bool needs_mean_square() { return false; }
  __device__ static float state_before(int64_t) { return 0.0f; }
  __device__ void expect(int64_t, const Part&, int64_t, PrefetchLanes) const {}
  __device__ float open(const Part& f, int64_t row, int64_t run, float, float, bool stores) const {
    if (rows && stores) rows[run] = row - f.row_offset;
    return 0.0f;
  }
  __device__ float* place(const Part& f, int64_t row, int64_t run) const {
    return gradients + (rows ? first_float[run] : f.weight_offset / 4 + (row - f.row_offset) * f.embedding_dim);
  }
  __device__ static Vec4 read(const Part&, int64_t, int64_t) { return {}; }
  __device__ static Vec4 updated(const Part&, const Vec4&, const Vec4& g, float) { return g; }
};

// Dense gradients of fp16 or bf16 rows, in the format of the rows.
struct HalfGradients {
  static constexpr bool kElementwise = false, kEncodes = true, kUpdates = false;
  uint8_t* gradients;

  __device__ static bool needs_mean_square() { return false; }
  __device__ static float state_before(int64_t) { return 0.0f; }
  __device__ void expect(int64_t, const Part&, int64_t, PrefetchLanes) const {}
  __device__ static float open(const Part&, int64_t, int64_t, float, float, bool) { return 0.0f; }
  __device__ static Vec4 read(const Part&, int64_t, int64_t) { return {}; }
  // x: the gradient of all columns; for a wider row, gradient() computes it block by block into x.
  template <int G, int kBlocks, class Gradient>
  __device__ __forceinline__ void put_row(const Part& f, int64_t row, float, const Group<G>& group, Vec4 (&x)[kBlocks],
                                          const Gradient& gradient) const {
    const int64_t D = f.embedding_dim;
    uint8_t* out = gradients + f.weight_offset + (row - f.row_offset) * Fp16::row_bytes(D);
    for (int64_t column = 0; column < columns_behind<kBlocks, G>(D); column += kBlocks * 4 * G) {
      if (is_wider<G, kBlocks>(D)) gradient(column, true, [](int64_t) { return Vec4{}; });
#pragma unroll
      for (int k = 0; k < kBlocks; ++k)
        store_halves(out, column + (k * G + group.lane) * 4, D, f.format == RowFormat::kFp16, x[k]);
    }
  }
};

struct UpdateTarget {
  static constexpr bool kElementwise = false, kEncodes = false, kUpdates = true;
  RowUpdate u;

  // Prefetches the row and its state, which are needed after several dependent reads of terms.
  __device__ void expect(int64_t, const Part& f, int64_t row, PrefetchLanes lanes) const {
    lanes.bytes(place(f, row, 0), 4 * f.embedding_dim);
    if (u.is_adagrad()) lanes.one(u.state.sum + row);
  }
  __device__ bool needs_mean_square() const { return u.is_adagrad(); }
  __device__ float state_before(int64_t row) const { return u.state_before(row); }
  __device__ float open(const Part& f, int64_t row, int64_t, float before, float mean_square, bool stores) const {
    return u.factor(f, row, before, mean_square, stores);
  }
  __device__ float* place(const Part& f, int64_t row, int64_t) const {
    return reinterpret_cast<float*>(u.weights + f.weight_offset) + (row - f.row_offset) * f.embedding_dim;
  }
  __device__ Vec4 read(const Part& f, int64_t row, int64_t c) const {
    const float* w = place(f, row, 0);
    return load_columns(w, c, f.embedding_dim, rows_aligned(w, f.embedding_dim));
  }
  __device__ Vec4 updated(const Part& f, Vec4 w, const Vec4& g, float factor) const {
    if (u.shrinks_weights) w = u.shrunk(w, f);
    for (int j = 0; j < 4; ++j) w.v[j] = moved(w.v[j], g.v[j], factor);
    return w;
  }
};

__global__ void advance_step_kernel(Skip skip, Update update, int64_t* step, BetaPowers* powers) {
  if (skip.now()) return;
  ++*step;
  if (powers) *powers = update.powers();
}

SumArgs sum_args(const BagInput& in, const SortedOccurrences& o, const Tensor& grad, const uint8_t* rows,
                 const float* grad_scale, const Skip& skip) {
  return {o.runs,        in.parts,   rows, 0,       in.bags, grad.const_data_ptr<float>(),
          in.output_dim, grad_scale, skip, nullptr, 0,       CachedRuns{}};
}

// Sums the chunks of runs, hierarchically until at most kChunk sums per run are left. Returns the memory of the sums.
Tensor sum_chunks(const BagInput& in, SumArgs* args, const Tensor& like, cudaStream_t stream) {
  const int64_t rows = args->runs.most_chunks;
  Tensor sums = new_tensor(like, {rows * in.max_dim}, ScalarType::Float);
  args->partials = sums.mutable_data_ptr<float>();
  args->max_dim = in.max_dim;
  if (rows == 0) return sums;
  with_widths(in.max_dim, [&](auto group, auto blocks) {
    launch_for(args->runs.most_chunks, group, stream, sum_chunks_kernel<group, blocks>, *args);
  });
  for (args->format = 0; args->format < in.parts.num_formats && in.multiplies; ++args->format)
    launch_product_sums(*args, stream);
  args->format = 0;
  if (args->runs.most_runs <= kMostOfGroup) return sums;  // no run can be longer
  with_few_widths(in.max_dim, [&](auto group, auto blocks) {
    launch(sum_chunk_sums_kernel<group, blocks>, capped_grid(kLongRunBlocks, rows, kThreads), dim3(kThreads), 0, stream,
           *args);
  });
  return sums;
}

template <class Target>
void finish_floats(const SumArgs& args, const Target& target, cudaStream_t stream) {
  with_few_lanes<Target::kElementwise ? 2 : kMaxBlocks>(
      args.max_dim, [&](auto group, auto blocks) { launch_finish<group, blocks>(args, target, stream); });
}

// Stores gradients to be returned: dense, each table's in its format, or sparse, as floats.
void store_all(const BagInput& in, SumArgs args, const StoredTarget& target, const Tensor& like, cudaStream_t stream) {
  if (in.bags.num_ids == 0 || in.bags.num_bags == 0) return;
  const Tensor sums = sum_chunks(in, &args, like, stream);
  for (args.format = 0; args.format < in.parts.num_formats; ++args.format) {
    if (target.rows || in.parts.formats[args.format] == RowFormat::kFp32) finish_floats(args, target, stream);
    else finish_few_widths(args, HalfGradients{reinterpret_cast<uint8_t*>(target.gradients)}, stream);
  }
}

// Updates float32 rows, or rows in cache slots, which are floats.
void update_floats(const SumArgs& args, const RowUpdate& update, cudaStream_t stream) {
  if (is_elementwise(update.optimizer)) finish_floats(args, ElementwiseTarget<UpdateTarget>{{update}}, stream);
  else finish_floats(args, UpdateTarget{update}, stream);
}

void update_encoded(const SumArgs& args, const RowUpdate& update, cudaStream_t stream) {
  with_bag_format(args.parts.formats[args.format], [&](auto format) {
    using Format = decltype(format);
    if constexpr (!std::is_same<Format, Fp32>::value) finish_encoded<Format>(args, update, stream);
  });
}

// Finds each run's slot in the cache and marks it dirty.
__global__ void __launch_bounds__(kThreads) slots_of_runs_kernel(SumArgs a, CacheTensors cache, int64_t* slots) {
  if (a.skip.now()) return;
  for (int64_t run = Group<1>::first(); run < *a.runs.num_runs; run += Group<1>::stride()) {
    const CachePlace place = place_of(cache, a.parts, part_of_run(a.runs, a.bags, run));
    const int64_t slot = place.sets ? cache.view().slot_of(place, a.runs.row(run)) : -1;
    slots[run] = slot;
    if (slot >= 0) cache.dirty[slot] = 1;
  }
}

void update_all(const BagInput& in, SumArgs args, RowUpdate update, const CacheTensors& cache, const Tensor& like,
                cudaStream_t stream) {
  if (in.bags.num_ids == 0 || in.bags.num_bags == 0) return;
  const Tensor sums = sum_chunks(in, &args, like, stream);
  const Tensor slots = new_tensor(like, {cache.tags ? args.runs.most_runs : 0}, ScalarType::Long);
  if (cache.tags) {
    launch_for(args.runs.most_runs, 1, stream, slots_of_runs_kernel, args, cache, slots.mutable_data_ptr<int64_t>());
    args.cache = {slots.const_data_ptr<int64_t>(), false};
  }
  for (args.format = 0; args.format < in.parts.num_formats; ++args.format) {
    if (in.parts.formats[args.format] != RowFormat::kFp32) update_encoded(args, update, stream);
    else update_floats(args, update, stream);
  }
  if (!cache.tags) return;
  args.cache.hot = true;
  update.weights = reinterpret_cast<uint8_t*>(cache.rows);
  update_floats(args, update, stream);
}

// Sums the gradients of deduplicated bags and points the input to them.
SharedRows sum_shared(const Tensor& grad, const Tensor& status, BagInput* in, cudaStream_t stream) {
  SharedRows shared(*in, ScalarType::Float, status.mutable_data_ptr<int64_t>(), stream);
  shared.sum(grad.const_data_ptr<float>());
  in->bags.shared_rows = shared.rows();
  return shared;
}

// Input of a gradient of tables of floats: those in `weights`, which products read, or one float32 table of a shape.
struct GradientInput {
  BagInput in;
  LayoutLimits limits;
  const uint8_t* rows;  // null: nothing is multiplied
};

GradientInput read_gradient(const Tensor& grad, const Tensor& weights, const BagArguments& bags, cudaStream_t stream) {
  const Layout layout = read_layout(bags.layout, bags.layout_sizes, bags.values);
  check_trainable(layout);
  check_weights(weights, bags.values, layout);
  check(grad, "grad").on_device_of(bags.values, "values");
  BagInput in = read_bags(bags, layout, stream);
  check_gradient(grad, bags.values, in.bags.output_rows(), in.output_dim);
  const auto* rows = in.multiplies ? on_gpu(weights, bags.values) : nullptr;
  return {std::move(in), limits_of(layout.num_parts, weights), rows};
}
GradientInput read_gradient(const Tensor& grad, const Shape& shape, const OneTableBags& bags, cudaStream_t) {
  check(grad, "grad").on_device_of(bags.values, "values");
  BagInput in = read_bags(bags, read_one_table(shape, parse_pooling(bags.pooling)));
  check_gradient(grad, bags.values, in.bags.output_rows(), in.output_dim);
  return {std::move(in), {}, nullptr};
}

template <class Weights, class Arguments>
Tensor backward_dense(const Tensor& grad_in, const Weights& weights, const Arguments& bags) {
  const OnDeviceOf device(bags.values);
  const cudaStream_t stream = device.stream();
  auto [in, limits, rows] = read_gradient(grad_in, weights, bags, stream);
  const Tensor grad = as_contiguous(grad_in), status = new_status(in, limits, grad, stream, true);
  const SharedRows shared = sum_shared(grad, status, &in, stream);
  const SortedOccurrences o = sort_occurrences(in, status.mutable_data_ptr<int64_t>(), grad, stream);
  Tensor out = new_zeros(grad, sizes_of(weights), type_of(weights));
  const Skip skip{nullptr, status.const_data_ptr<int64_t>(), nullptr, false};
  const StoredTarget target{static_cast<float*>(out.mutable_data_ptr()), nullptr, nullptr};
  store_all(in, sum_args(in, o, grad, rows, nullptr, skip), target, grad, stream);
  return out;
}

// Writes the width of each run, and 0 after the last run; all 0 for a bad layout or bad offsets.
__global__ void __launch_bounds__(kThreads) run_dims_kernel(SumArgs a, const int64_t* status, int64_t* dims) {
  const int64_t runs = *status < 0 ? 0 : *a.runs.num_runs;
  for (int64_t r = Group<1>::first(); r <= a.runs.most_runs; r += Group<1>::stride())
    dims[r] = r < runs ? a.parts[part_of_run(a.runs, a.bags, r)].embedding_dim : 0;
}

// Number of runs with a row less than `row`.
__device__ int64_t runs_below(const Runs& runs, int64_t row) {
  return first_behind(0, *runs.num_runs, [&](int64_t run) { return runs.row(run) >= row; });
}

// Sizes of a sparse gradient, copied to the host.
struct SparseSizes {
  int64_t status, runs, floats;
};

// Writes the number of runs of each part's table to `counts`. `dims`: total width of all runs.
__global__ void __launch_bounds__(kThreads) row_counts_kernel(SumArgs a, const int64_t* status, const int64_t* dims,
                                                              int64_t parts, int64_t* counts, SparseSizes* sizes) {
  if (Group<1>::first() == 0) *sizes = {*status, *a.runs.num_runs, *dims};
  if (*status < 0) return;
  for (int64_t p = Group<1>::first(); p < parts; p += Group<1>::stride()) {
    const Part table = a.parts[p];
    counts[p] = runs_below(a.runs, table.row_offset + table.num_embeddings) - runs_below(a.runs, table.row_offset);
  }
}

template <class Weights, class Arguments>
std::tuple<Tensor, Tensor, Tensor> backward_sparse(const Tensor& grad_in, const Weights& weights,
                                                   const Arguments& bags) {
  const OnDeviceOf device(bags.values);
  const cudaStream_t stream = device.stream();
  auto [in, limits, products] = read_gradient(grad_in, weights, bags, stream);
  const Tensor grad = as_contiguous(grad_in), status = new_status(in, limits, grad, stream, true);
  const SharedRows shared = sum_shared(grad, status, &in, stream);
  const SortedOccurrences o = sort_occurrences(in, status.mutable_data_ptr<int64_t>(), grad, stream);
  const SumArgs args = sum_args(in, o, grad, products, nullptr, {});
  const int64_t most = o.runs.most_runs, *noted = status.const_data_ptr<int64_t>();
  Tensor dims = new_tensor(grad, {most + 1}, ScalarType::Long), first = new_tensor(grad, {most + 1}, ScalarType::Long);
  launch_for(most + 1, 1, stream, run_dims_kernel, args, noted, dims.mutable_data_ptr<int64_t>());
  exclusive_sum(dims.const_data_ptr<int64_t>(), first.mutable_data_ptr<int64_t>(), most + 1, grad, stream);
  Tensor row_counts = new_tensor(grad, {in.bags.num_parts}, ScalarType::Long);
  const Tensor sizes_memory = new_tensor(grad, {sizeof(SparseSizes)}, ScalarType::Byte);
  auto* device_sizes = static_cast<SparseSizes*>(sizes_memory.mutable_data_ptr());
  launch_for(in.bags.num_parts, 1, stream, row_counts_kernel, args, noted, first.const_data_ptr<int64_t>() + most,
             in.bags.num_parts, row_counts.mutable_data_ptr<int64_t>(), device_sizes);
  // The shape of a sparse gradient depends on data, so this synchronizes with the GPU once.
  SparseSizes sizes{};
  copy_to_host(&sizes, device_sizes, sizeof sizes, stream);
  check_value(sizes.status >= 0, "the layout, the offsets or inverse are not valid");
  Tensor rows = new_tensor(grad, {sizes.runs}, ScalarType::Long);
  Tensor row_grads = new_tensor(grad, {sizes.floats}, ScalarType::Float);
  const StoredTarget target{row_grads.mutable_data_ptr<float>(), rows.mutable_data_ptr<int64_t>(),
                            first.const_data_ptr<int64_t>()};
  store_all(in, args, target, grad, stream);
  return {rows, row_grads, row_counts};
}

void backward_fused(const Tensor& weights, const OptionalTensor& sum, const Tensor& step, const Tensor& lr,
                    const Tensor& grad_in, const BagArguments& bags, const UpdateArguments& fused,
                    const OptionalTensor& status, const OptionalTensor& grad_scale, const OptionalTensor& found_inf,
                    const CachedRows& cached, const OptionalTensor& cache_dirty) {
  const Tensor& values = bags.values;
  RowUpdate update{read_update(values, sum, step, lr, fused, grad_scale), nullptr};
  const Layout layout = read_layout(bags.layout, bags.layout_sizes, values);
  update.records = layout.parts;
  check_weights(weights, values, layout);
  const OnDeviceOf device(values);
  const cudaStream_t stream = device.stream();
  BagInput in = read_bags(bags, layout, stream);
  check_gradient(grad_in, values, in.bags.output_rows(), in.output_dim);
  check_row_state(update, in.num_rows);
  const float* overflow = optional_scalar(found_inf, values, "found_inf");
  const CacheArguments arguments = cached.with(cache_dirty);
  const CacheTensors cache = read_cache(arguments, layout, values);
  if (cached.slots) check_slots_of_ids(*cached.slots, values);
  const LayoutLimits limits = limits_of(in.bags.num_parts, weights, arguments, &update);
  const Tensor grad = as_contiguous(grad_in), own_status = new_status(in, limits, grad, stream, true);
  const SharedRows shared = sum_shared(grad, own_status, &in, stream);
  const SortedOccurrences o = sort_occurrences(in, own_status.mutable_data_ptr<int64_t>(), grad, stream);
  const Skip skip{optional_status(status, values), own_status.const_data_ptr<int64_t>(), overflow, in.raises};
  update.weights = on_gpu(weights, values);
  const SumArgs args = sum_args(in, o, grad, in.multiplies ? update.weights : nullptr, update.grad_scale, skip);
  update_all(in, args, update, cache, grad, stream);
  auto* powers = fused.beta_powers ? static_cast<BetaPowers*>(fused.beta_powers->mutable_data_ptr()) : nullptr;
  launch_one(stream, advance_step_kernel, skip, static_cast<const Update&>(update), step.mutable_data_ptr<int64_t>(),
             powers);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) {
  implement<&backward_dense<Tensor, BagArguments>>(m, "embedding_bag_backward_dense.layout");
  implement<&backward_dense<Shape, OneTableBags>>(m, "embedding_bag_backward_dense.table");
  implement<&backward_sparse<Tensor, BagArguments>>(m, "embedding_bag_backward_sparse.layout");
  implement<&backward_sparse<Shape, OneTableBags>>(m, "embedding_bag_backward_sparse.table");
  implement<&backward_fused>(m, "embedding_bag_backward_fused_.layout");
}

}  // namespace rec_kernels
