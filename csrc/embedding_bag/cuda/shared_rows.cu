// Bytes moved by hand_out_kernel: one index per sample and group; one element per sample and column, read mostly from
// the L2 cache, and written. One thread per element: accesses are coalesced, and no lane is idle.
#include <algorithm>

#include "core/cuda/words.cuh"
#include "embedding_bag/cuda/shared_rows.cuh"
#include "embedding_bag/cuda/sum_rows.cuh"

namespace rec_kernels {
namespace {

struct ShareArgs {
  Parts parts;
  Bags bags;
  int64_t num_parts, output_dim;
  const int64_t* inverse;  // [G, B]
  int64_t num_groups;
  int64_t* sizes;          // [G]: number of bags of each group; -1: the group has no feature
  int32_t* column_groups;  // [output_dim]: group per column, or -1
  int64_t* status;
};

// Initializes sizes and column_groups, which keep these values if the layout is bad.
__global__ void __launch_bounds__(kThreads) start_kernel(ShareArgs a) {
  for (int64_t g = Group<1>::first(); g < a.num_groups; g += Group<1>::stride()) a.sizes[g] = -1;
  for (int64_t c = Group<1>::first(); c < a.output_dim; c += Group<1>::stride()) a.column_groups[c] = -1;
}

__global__ void __launch_bounds__(kThreads) column_groups_kernel(ShareArgs a) {
  if (*a.status == kBadLayout) return;
  const Group<kWarpSize> warp;
  for (int64_t p = Group<kWarpSize>::first(); p < a.num_parts; p += Group<kWarpSize>::stride()) {
    const Part f = a.parts[p];
    const int64_t group = a.bags.groups[f.feature];
    for (int64_t c = warp.lane; c < f.embedding_dim; c += kWarpSize)
      a.column_groups[f.output_offset + c] = static_cast<int32_t>(group);
    if (group >= 0 && warp.lane == 0) a.sizes[group] = a.bags.starts[f.feature + 1] - a.bags.starts[f.feature];
  }
}

__global__ void __launch_bounds__(kThreads) check_inverse_kernel(ShareArgs a) {
  if (*a.status == kBadLayout) return;
  for (int64_t i = Group<1>::first(); i < a.num_groups * a.bags.batch; i += Group<1>::stride()) {
    const int64_t size = a.sizes[i / a.bags.batch];
    if (size >= 0 && static_cast<uint64_t>(a.inverse[i]) >= static_cast<uint64_t>(size))
      note_bad(a.status, kBadLayout + 1 + a.bags.num_offsets + i);
  }
}

struct HandOutArgs {
  const void* shared;
  void* rows;
  const int64_t *inverse, *sizes;
  const int32_t* column_groups;
  int64_t batch;
  Divisor columns;
  const int64_t* status;
};

template <class Word>
__global__ void __launch_bounds__(kThreads) hand_out_kernel(HandOutArgs a) {
  if (*a.status == kBadLayout) return;
  const int64_t columns = a.columns.value;
  for (int64_t i = Group<1>::first(); i < a.batch * columns; i += Group<1>::stride()) {
    const int64_t sample = a.columns.divide(i), column = i - sample * columns;
    const int64_t group = a.column_groups[column];
    if (group < 0) continue;
    const int64_t row = a.inverse[group * a.batch + sample];
    const bool good = static_cast<uint64_t>(row) < static_cast<uint64_t>(a.sizes[group]);
    store_word(a.rows, i, good ? load_word<Word>(a.shared, row * columns + column) : Word{});
  }
}

}  // namespace

SharedRows::SharedRows(const BagInput& in, ScalarType type, int64_t* status, cudaStream_t stream)
    : in_(in), element_bytes_(type == ScalarType::Float ? 4 : 2), status_(status), stream_(stream) {
  if (!in.groups) return;
  const int64_t batch = in.bags.batch, groups = in.inverse->size(0);
  memory_ = new_tensor(in.values, {batch, in.output_dim}, type);  // a group has at most B rows
  sizes_ = new_tensor(in.values, {groups}, ScalarType::Long);
  column_groups_ = new_tensor(in.values, {in.output_dim}, ScalarType::Int);
  const ShareArgs args{in.parts,
                       in.bags,
                       in.bags.num_parts,
                       in.output_dim,
                       in.inverse->const_data_ptr<int64_t>(),
                       groups,
                       sizes_->mutable_data_ptr<int64_t>(),
                       column_groups_->mutable_data_ptr<int32_t>(),
                       status};
  launch_for(std::max(groups, in.output_dim), 1, stream, start_kernel, args);
  launch_for(in.bags.num_parts, kWarpSize, stream, column_groups_kernel, args);
  if (groups * batch > 0) launch_for(groups * batch, 1, stream, check_inverse_kernel, args);
}

void SharedRows::expand(void* output) const {
  if (!memory_ || in_.bags.batch * in_.output_dim * in_.inverse->size(0) == 0) return;
  const HandOutArgs args{memory_->const_data_ptr(),
                         output,
                         in_.inverse->const_data_ptr<int64_t>(),
                         sizes_->const_data_ptr<int64_t>(),
                         column_groups_->const_data_ptr<int32_t>(),
                         in_.bags.batch,
                         Divisor::of(in_.output_dim),
                         status_};
  const auto kernel = element_bytes_ == 4 ? hand_out_kernel<uint32_t> : hand_out_kernel<uint16_t>;
  launch_for(in_.bags.batch * in_.output_dim, 1, stream_, kernel, args);
}

void SharedRows::sum(const float* grad) const {
  if (!memory_ || in_.bags.batch * in_.output_dim * in_.inverse->size(0) == 0) return;
  const Tensor& inverse = *in_.inverse;
  sum_rows({Integers(inverse), inverse.size(0), in_.bags.batch, in_.bags.batch, sizes_->const_data_ptr<int64_t>()},
           {grad, in_.output_dim, column_groups_->const_data_ptr<int32_t>(), memory_->mutable_data_ptr<float>()},
           in_.values, stream_);
}

}  // namespace rec_kernels
