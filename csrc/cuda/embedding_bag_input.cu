// From the tensors of an embedding_bag call to what its CUDA kernels read. Nothing is read back from the GPU, except
// for layouts that leave out num_rows and max_embedding_dim.
#include <algorithm>
#include <vector>

#include "cuda/embedding_bag.cuh"

namespace rec_kernels {
namespace {

std::vector<int64_t> to_host(const OptionalTensor& t, cudaStream_t stream) {
  std::vector<int64_t> out(static_cast<size_t>(t->numel()));
  copy_to_host(out.data(), t->const_data_ptr(), out.size() * sizeof(int64_t), stream);
  return out;
}

void read_layout(const TableLayout& layout, BagInput* in, cudaStream_t stream) {
  in->features = {layout.weight_offsets->const_data_ptr<int64_t>(),
                  layout.row_offsets->const_data_ptr<int64_t>(),
                  layout.num_embeddings->const_data_ptr<int64_t>(),
                  layout.embedding_dims->const_data_ptr<int64_t>(),
                  layout.output_offsets->const_data_ptr<int64_t>(),
                  layout.mean ? layout.mean->const_data_ptr<bool>() : nullptr,
                  {0, 0, 0, 0, 0, in->options.mean}};
  in->output_dim = layout.output_dim;
  in->max_dim = layout.max_embedding_dim;
  in->num_rows = layout.num_rows;
  if (in->max_dim > 0 && in->num_rows > 0) return;
  const std::vector<int64_t> dims = to_host(layout.embedding_dims, stream), rows = to_host(layout.row_offsets, stream),
                             sizes = to_host(layout.num_embeddings, stream);
  for (size_t f = 0; f < dims.size(); ++f) {
    in->max_dim = std::max(in->max_dim, dims[f]);
    in->num_rows = std::max(in->num_rows, rows[f] + sizes[f]);
  }
}

// Unsigned: the numbers of a bad layout may be anything.
__device__ bool overlap(uint64_t a, uint64_t size_a, uint64_t b, uint64_t size_b) {
  return a < b + size_b && b < a + size_a;
}

// Two features' tables are one and the same, or apart in rows and in weights.
__device__ bool share_all_or_nothing(const Feature& a, const Feature& b) {
  if (a.num_embeddings <= 0 || b.num_embeddings <= 0) return true;  // occupies nothing
  const uint64_t rows_a = a.num_embeddings, rows_b = b.num_embeddings;
  const bool sizes = rows_a == rows_b && a.embedding_dim == b.embedding_dim;
  if (sizes && a.row_offset == b.row_offset && a.weight_offset == b.weight_offset) return true;
  return !overlap(a.row_offset, rows_a, b.row_offset, rows_b) &&
         !overlap(a.weight_offset, rows_a * static_cast<uint64_t>(a.embedding_dim), b.weight_offset,
                  rows_b * static_cast<uint64_t>(b.embedding_dim));
}

// One block. A feature's table must lie inside `weights`, its rows and columns within what the host was told: the other
// kernels trust what passes here, and do nothing where something does not.
__global__ void __launch_bounds__(kThreads)
    start_kernel(Features features, int64_t num_features, int64_t weights, int64_t output_dim, int64_t num_rows,
                 int64_t max_dim, bool updates, int64_t* status) {
  if (threadIdx.x == 0) {
    status[0] = kNoBadPosition;
    status[1] = 0;
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; features.embedding_dims && i < num_features; i += blockDim.x) {
    const Feature f = features[i];
    const bool sizes = f.embedding_dim >= 1 && f.embedding_dim <= max_dim && f.num_embeddings >= 0;
    const bool rows = f.row_offset >= 0 && f.num_embeddings <= num_rows && f.row_offset <= num_rows - f.num_embeddings;
    const bool inside = sizes && f.weight_offset >= 0 && f.weight_offset <= weights &&
                        f.num_embeddings <= (weights - f.weight_offset) / f.embedding_dim;
    const int64_t column = i > 0 ? features.output_offsets[i - 1] + features.embedding_dims[i - 1] : 0;
    const bool last = i < num_features - 1 || f.output_offset + f.embedding_dim == output_dim;
    bool apart = true;
    for (int64_t j = 0; updates && j < i; ++j) apart = apart && share_all_or_nothing(f, features[j]);
    if (!rows || !inside || f.output_offset != column || !last || !apart) note_bad(status, kBadLayout);
  }
}

}  // namespace

BagInput read_bags(const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights,
                   const TableLayout& layout, const BagOptions& options, int64_t rows, int64_t columns,
                   bool include_last_offset, cudaStream_t stream) {
  const int64_t features = check_bags(values, offsets, per_sample_weights, layout, include_last_offset);
  BagInput in{
      as_contiguous(values),      as_contiguous(offsets), std::nullopt, Features{}, Bags{}, options, features, 0, 0, 0,
      options.mean || layout.mean};
  if (per_sample_weights) in.per_sample_weights = as_contiguous(*per_sample_weights);
  if (layout.embedding_dims) {
    read_layout(layout, &in, stream);
  } else {
    check_value(columns >= 1, "weights must have at least one column, got shape [", rows, ", ", columns, "]");
    in.features.one = {0, 0, rows, columns, 0, options.mean};
    in.output_dim = in.max_dim = columns;
    in.num_rows = rows;
  }
  in.bags = read_bags(in.values, in.offsets, in.per_sample_weights, options, features, include_last_offset);
  return in;
}

Tensor new_status(const BagInput& in, int64_t weights, bool updates, const Tensor& like, cudaStream_t stream) {
  Tensor status = new_tensor(like, {2}, ScalarType::Long);
  launch(start_kernel, dim3(1), dim3(kThreads), 0, stream, in.features, in.num_features, weights, in.output_dim,
         in.num_rows, in.max_dim, updates, status.mutable_data_ptr<int64_t>());
  return status;
}

}  // namespace rec_kernels
