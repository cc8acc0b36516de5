// jagged_bucketize: one kernel counts ids per bucket and bag and records each id's index within its bag, a prefix sum
// over the counts gives the offsets, and another kernel scatters. Bytes moved: ids read twice; ids, weights and
// positions written once; a count and an offset per bucket and bag. A group of lanes takes a bag.
#include "core/bits.h"
#include "core/boxing.h"
#include "core/cuda/device_algorithms.h"
#include "jagged/cuda/jagged.cuh"
#include "jagged/jagged_bucketize.h"

namespace rec_kernels {
namespace {

struct BucketArgs {
  Bags bags;
  Integers ids;
  const int64_t* block_sizes;
  Divisor* divisors;  // [F]
  int64_t buckets;
  int bucket_bits;
  const float* weights;  // null: none
  void* offsets;         // [buckets * bags + 1]: counts, then output offsets
  IntegersOut output;
  float* output_weights;
  int64_t* positions;  // per id: index within its bag and bucket, then output position
  int64_t* status;
};

struct Place {
  int64_t bucket, id;
  bool bad;
};

// Bucket and row of an id. A bad id goes where a lookup reports it again.
__device__ __forceinline__ Place place_of(const BucketArgs& a, const Divisor& block, int64_t id) {
  if (id < 0) return {0, id, true};
  const int64_t bucket = block.divide(id);
  if (bucket >= a.buckets) return {a.buckets - 1, id - (a.buckets - 1) * block.value, true};
  return {bucket, id - bucket * block.value, false};
}

// False for bad offsets or block sizes: bags may overlap, but an id has only one position, so all output bags are
// empty. Bad ids are recorded as non-negative positions and do not matter here.
__device__ __forceinline__ bool has_ids(const BucketArgs& a) { return *a.status >= 0; }

// Records bad offsets and block sizes, and sets the counts to 0, before any other kernel.
template <class Offset>
__global__ void __launch_bounds__(kThreads) start_kernel(BucketArgs a) {
  note_offsets(a.bags, a.status);
  auto* counts = static_cast<Offset*>(a.offsets);
  for (int64_t i = Group<1>::first(); i <= a.buckets * a.bags.num_bags; i += Group<1>::stride()) counts[i] = 0;
  for (int64_t f = Group<1>::first(); f < a.bags.num_features; f += Group<1>::stride()) {
    const int64_t size = a.block_sizes[f];
    const bool good = size >= 1 && size <= INT64_MAX / a.buckets;
    if (!good) note_bad(a.status, kBadLayout);
    a.divisors[f] = Divisor::of(good ? size : 1);
  }
}

// Mask of the lanes in `there` that have the same bucket as this lane.
template <int G>
__device__ __forceinline__ unsigned lanes_of_bucket(const BucketArgs& a, const Group<G>& group, unsigned there,
                                                    int64_t bucket) {
  unsigned same = there;
  for (int bit = 0; bit < a.bucket_bits; ++bit) {
    const bool set = bucket >> bit & 1;
    const unsigned having = __ballot_sync(group.mask, set);
    same &= set ? having : ~having;
  }
  return same;
}

// Counts a bag's ids in pieces of one id per lane. Each piece reads the counts of the previous one.
template <int G, class Offset>
__global__ void __launch_bounds__(kThreads) count_kernel(BucketArgs a) {
  if (!has_ids(a)) return;
  const Group<G> group;
  auto* counts = static_cast<Offset*>(a.offsets);
  const unsigned before_me = (1u << threadIdx.x % kWarpSize) - 1;
  for (int64_t bag = Group<G>::first(); bag < a.bags.num_bags; bag += Group<G>::stride()) {
    const Range r = good_range(a.bags, bag);
    if (r.start == r.stop) continue;
    const Divisor block = a.divisors[a.bags.feature_of(bag)];
    for (int64_t begin = r.start; begin < r.stop; begin += G) {
      const int64_t i = begin + group.lane;
      const unsigned there = __ballot_sync(group.mask, i < r.stop);
      const Place place = i < r.stop ? place_of(a, block, a.ids[i]) : Place{};
      const unsigned same = lanes_of_bucket(a, group, there, place.bucket);
      Offset* count = counts + (place.bucket * a.bags.num_bags + bag);
      int64_t counted = 0;
      if (i < r.stop) {
        counted = begin > r.start ? static_cast<int64_t>(*count) : 0;
        a.positions[i] = counted + count_bits(same & before_me);
        if (place.bad) note_left_out(a.status, i);
      }
      __syncwarp(group.mask);
      if (i < r.stop && !(same & before_me)) *count = static_cast<Offset>(counted + count_bits(same));
      __syncwarp(group.mask);
    }
  }
}

// Scatters the ids, in the order of the counting kernel.
template <int G, class Offset>
__global__ void __launch_bounds__(kThreads, kResidentBlocks) fill_kernel(BucketArgs a) {
  const Group<G> group;
  const auto* starts = static_cast<const Offset*>(a.offsets);
  const bool any = has_ids(a);
  for (int64_t bag = Group<G>::first(); any && bag < a.bags.num_bags; bag += Group<G>::stride()) {
    const Range r = good_range(a.bags, bag);
    if (r.start == r.stop) continue;
    const Divisor block = a.divisors[a.bags.feature_of(bag)];
    for (int64_t i = r.start + group.lane; i < r.stop; i += G) {
      const Place place = place_of(a, block, a.ids[i]);
      const int64_t to = starts[place.bucket * a.bags.num_bags + bag] + a.positions[i];
      a.positions[i] = to;
      a.output.put(to, place.id);
      if (a.weights) a.output_weights[to] = a.weights[i];
    }
  }
  // Handles ids outside of all bags, and the output positions that they leave unused.
  const int64_t first = any ? a.bags.offset(0) : 0, last = any ? a.bags.offset(a.bags.num_bags) : 0;
  for (int64_t i = Group<1>::first(); i < first; i += Group<1>::stride()) a.positions[i] = -1;
  for (int64_t i = last + Group<1>::first(); i < a.bags.num_ids; i += Group<1>::stride()) a.positions[i] = -1;
  for (int64_t i = last - first + Group<1>::first(); i < a.bags.num_ids; i += Group<1>::stride()) {
    a.output.put(i, 0);
    if (a.weights) a.output_weights[i] = 0.0f;
  }
}

template <class Offset>
void bucketize(const BucketArgs& a, int64_t all_bags, const Tensor& like, cudaStream_t stream) {
  auto* offsets = static_cast<Offset*>(a.offsets);
  const int64_t bags = a.bags.num_bags, each = bags > 0 ? ceil_div(a.bags.num_ids, bags) : 1;
  launch_for(all_bags + 1, 1, stream, start_kernel<Offset>, a);
  with_lanes(lanes_for(4 * each), [&](auto group) {
    launch_for(bags, group, stream, count_kernel<group, Offset>, a);
    exclusive_sum(offsets, offsets, all_bags + 1, like, stream);
    launch_for(bags, group, stream, fill_kernel<group, Offset>, a);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> jagged_bucketize_cuda(
    const Tensor& values_in, const Tensor& offsets_in, const Tensor& block_sizes_in, int64_t num_buckets,
    const std::vector<int64_t>& strides, const OptionalTensor& weights_in) {
  const std::vector<int64_t> starts =
      check_jagged_bucketize(values_in, offsets_in, block_sizes_in, num_buckets, strides, weights_in);
  const OnDeviceOf device(values_in);
  const cudaStream_t stream = device.stream();
  const Tensor values = as_contiguous(values_in), offsets = as_contiguous(offsets_in),
               block_sizes = as_contiguous(block_sizes_in);
  const OptionalTensor weights = as_contiguous(weights_in);
  const int64_t ids = values.size(0), features = block_sizes.size(0), bags = starts.back();
  const int64_t all_bags = num_buckets * bags, num_offsets = all_bags + 1;
  check_value(all_bags < INT64_C(0xffffffff), "num_buckets = ", num_buckets, " for ", bags,
              " bags: at most 2^32 - 2 bags of all buckets fit in a call on a GPU");
  Tensor output = new_tensor(values, {ids}, values.scalar_type()),
         output_offsets = new_tensor(offsets, {num_offsets}, offsets.scalar_type()),
         output_weights = new_tensor(values, {weights ? ids : 0}, ScalarType::Float),
         positions = new_tensor(values, {ids}, ScalarType::Long), status = new_jagged_status(values, stream);
  const Tensor feature_starts = to_gpu(starts, values, stream);
  DeviceMemory memory(values);
  Bags in = jagged_rows(values, offsets);
  in.num_features = features;
  in.starts = feature_starts.const_data_ptr<int64_t>();
  const BucketArgs args{in,
                        Integers(values),
                        block_sizes.const_data_ptr<int64_t>(),
                        memory.make<Divisor>(features),
                        num_buckets,
                        bit_width(static_cast<uint64_t>(num_buckets - 1)),
                        weights ? weights->const_data_ptr<float>() : nullptr,
                        output_offsets.mutable_data_ptr(),
                        integers_out(output),
                        output_weights.mutable_data_ptr<float>(),
                        positions.mutable_data_ptr<int64_t>(),
                        status.mutable_data_ptr<int64_t>()};
  if (offsets.scalar_type() == ScalarType::Long) bucketize<int64_t>(args, all_bags, values, stream);
  else bucketize<int32_t>(args, all_bags, values, stream);
  return {output, output_offsets, output_weights, positions, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) { implement<&jagged_bucketize_cuda>(m, "jagged_bucketize"); }

}  // namespace rec_kernels
