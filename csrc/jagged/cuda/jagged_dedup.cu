// jagged_dedup: hashes samples, inserts them into an open-addressing table per group, which compares samples of equal
// hash, and numbers the first samples. Bytes moved: ids (and weights) twice, to hash and to compare, and one or two
// table slots per sample. A group of lanes takes a sample.
#include "core/bits.h"
#include "core/boxing.h"
#include "core/cuda/device_algorithms.h"
#include "jagged/cuda/jagged.cuh"
#include "jagged/jagged_dedup.h"

namespace rec_kernels {
namespace {

// A used slot holds a sample index, in the end that of the first equal sample.
constexpr int32_t kEmpty = INT32_MAX;

struct DedupArgs {
  Bags bags;
  Integers ids;
  const float* weights;          // null: none
  const int64_t* member_starts;  // [G + 1]: group g has features members[member_starts[g]], ...
  const int64_t* members;
  int64_t groups, batch;
  uint64_t hash_mask;
  uint64_t* hashes;   // [G * B]
  int32_t* table;     // [G, slots]
  int64_t slots;      // a power of two; at least half stay empty
  uint32_t* slot_of;  // [G * B]
  int64_t* status;

  __device__ __forceinline__ uint32_t bits_of_weight(int64_t i) const {
    return reinterpret_cast<const uint32_t*>(weights)[i];
  }
  __device__ __forceinline__ Range ids_of(int64_t member, int64_t sample) const {
    return good_range(bags, members[member] * batch + sample);
  }
  __device__ __forceinline__ Range members_in(int64_t g) const { return {member_starts[g], member_starts[g + 1]}; }
  // The first sample of group g that equals sample i, which is counted over all groups.
  __device__ __forceinline__ int32_t first_of(int64_t g, int64_t i) const { return table[g * slots + slot_of[i]]; }
};

// Checks the offsets, empties the table and hashes the samples. A hash is a sum, so that lanes can add in any order.
// Terms depend on the position of the id and have odd multipliers.
template <int G>
__global__ void __launch_bounds__(kThreads) hash_kernel(DedupArgs a) {
  note_offsets(a.bags, a.status);
  for (int64_t i = Group<1>::first(); i < a.groups * a.slots; i += Group<1>::stride()) a.table[i] = kEmpty;
  const Group<G> group;
  for (int64_t i = Group<G>::first(); i < a.groups * a.batch; i += Group<G>::stride()) {
    const int64_t g = i / a.batch, sample = i - g * a.batch;
    const auto of_feature = [](int64_t member) { return static_cast<uint64_t>(member) * UINT64_C(0x9e3779b97f4a7c15); };
    const Range members = a.members_in(g);
    uint64_t hash = 0;
    for (int64_t begin = members.start; begin < members.stop; begin += G) {
      // Each lane reads the offsets of one member.
      const int64_t mine = begin + group.lane, left = members.stop - begin;
      const Range r = mine < members.stop ? a.ids_of(mine, sample) : Range{0, 0};
      if (mine < members.stop) hash += fmix64(of_feature(mine) ^ static_cast<uint64_t>(r.stop - r.start));
      for (int m = 0; m < left && m < G; ++m) {
        const int64_t start = group.broadcast(r.start, m), stop = group.broadcast(r.stop, m);
        for (int64_t k = start + group.lane; k < stop; k += G) {
          uint64_t term = of_feature(begin + m) + static_cast<uint64_t>(k - start + 1) * UINT64_C(0xd1342543de82ef95);
          if (a.weights) term += a.bits_of_weight(k) * UINT64_C(0xaf251af3b0f025b5);
          hash += fmix64(fmix64(static_cast<uint64_t>(a.ids[k])) + term);
        }
      }
    }
    hash = group.sum(hash);
    if (group.lane == 0) a.hashes[i] = fmix64(hash) & a.hash_mask;
  }
}

// True, on every lane, if two samples are equal in group g.
template <int G>
__device__ bool look_alike(const DedupArgs& a, const Group<G>& group, int64_t g, int64_t one, int64_t other) {
  const Range members = a.members_in(g);
  for (int64_t begin = members.start; begin < members.stop; begin += G) {
    const int64_t mine = begin + group.lane, left = members.stop - begin;
    const Range x = mine < members.stop ? a.ids_of(mine, one) : Range{0, 0};
    const Range y = mine < members.stop ? a.ids_of(mine, other) : Range{0, 0};
    if (__any_sync(group.mask, x.stop - x.start != y.stop - y.start)) return false;
    for (int m = 0; m < left && m < G; ++m) {
      const int64_t start = group.broadcast(x.start, m), stop = group.broadcast(x.stop, m);
      const int64_t to_other = group.broadcast(y.start, m) - start;
      for (int64_t first = start; first < stop; first += G) {
        const int64_t k = first + group.lane;
        bool differ = false;
        if (k < stop) {
          differ = a.ids[k] != a.ids[k + to_other];
          if (a.weights) differ = differ || a.bits_of_weight(k) != a.bits_of_weight(k + to_other);
        }
        if (__any_sync(group.mask, differ)) return false;
      }
    }
  }
  return true;
}

// Returns the sample in a slot, after inserting `sample` if the slot is empty.
__device__ __forceinline__ int32_t look_or_take(int32_t* slot, int32_t sample) {
  // A used slot never becomes empty, so a stale read only costs another look.
  const int32_t seen = *static_cast<volatile int32_t*>(slot);
  if (seen != kEmpty) return seen;
  const int32_t before = atomicCAS(slot, kEmpty, sample);
  return before == kEmpty ? sample : before;
}

// Equal samples find the same slot: they probe the same sequence, and slots are never freed.
template <int G>
__global__ void __launch_bounds__(kThreads, kResidentBlocks) insert_kernel(DedupArgs a) {
  const Group<G> group;
  for (int64_t i = Group<G>::first(); i < a.groups * a.batch; i += Group<G>::stride()) {
    const int64_t g = i / a.batch, sample = i - g * a.batch;
    const uint64_t hash = a.hashes[i];
    int64_t slot = static_cast<int64_t>(hash) & (a.slots - 1);
    for (;;) {
      int32_t* place = a.table + g * a.slots + slot;
      int32_t found = 0;
      if (group.lane == 0) found = look_or_take(place, static_cast<int32_t>(sample));
      found = group.broadcast(found, 0);
      if (found == sample) break;
      if (a.hashes[g * a.batch + found] == hash && look_alike(a, group, g, sample, found)) {
        if (group.lane == 0 && sample < found) atomicMin(place, static_cast<int32_t>(sample));
        break;
      }
      slot = (slot + 1) & (a.slots - 1);
    }
    if (group.lane == 0) a.slot_of[i] = static_cast<uint32_t>(slot);
  }
}

// 1 for the first of equal samples; 0 after the last sample. Branch-free, so that a thread of the prefix sum loads the
// slots of all its samples before it uses the first.
struct FirstOnes {
  DedupArgs a;

  __device__ __forceinline__ uint32_t operator()(uint32_t i) const {
    const auto batch = static_cast<uint32_t>(a.batch), count = static_cast<uint32_t>(a.groups) * batch;
    const uint32_t there = i < count ? i : 0, g = there / batch;
    const bool is_first = a.first_of(g, there) == static_cast<int32_t>(there - g * batch);
    return static_cast<uint32_t>(i < count) & static_cast<uint32_t>(is_first);
  }
};

// before[i]: number of first samples before sample i.
__global__ void __launch_bounds__(kThreads)
    number_kernel(DedupArgs a, const uint32_t* before, int64_t* rows, int64_t* inverse, int64_t* counts) {
  for (int64_t i = Group<1>::first(); i < a.groups * a.batch; i += Group<1>::stride()) {
    const int64_t g = i / a.batch, sample = i - g * a.batch, first = a.first_of(g, i);
    const uint32_t begin = before[g * a.batch];
    const int64_t number = before[g * a.batch + first] - begin, count = before[(g + 1) * a.batch] - begin;
    inverse[i] = number;
    if (first == sample) rows[g * a.batch + number] = sample;
    if (sample >= count) rows[i] = -1;
    if (sample == 0) counts[g] = count;
  }
}

__global__ void __launch_bounds__(kThreads) note_offsets_kernel(Bags bags, int64_t* status) {
  note_offsets(bags, status);
}

// Returns member_starts [G + 1] followed by members.
std::vector<int64_t> members_of(const std::vector<int64_t>& groups, int64_t count) {
  std::vector<int64_t> out(static_cast<size_t>(count + 1));
  for (const int64_t g : groups)
    if (g >= 0) ++out[g + 1];
  for (int64_t g = 0; g < count; ++g) out[g + 1] += out[g];
  std::vector<int64_t> next(out.begin(), out.end());
  out.resize(out.size() + static_cast<size_t>(out.back()));
  for (size_t f = 0; f < groups.size(); ++f)
    if (groups[f] >= 0) out[count + 1 + next[groups[f]]++] = static_cast<int64_t>(f);
  return out;
}

struct Distinct {
  Tensor rows, inverse, counts;
};

// Launches the kernels, for at least one sample and one group.
void dedup(DedupArgs a, const Distinct& out, const Tensor& like, cudaStream_t stream) {
  const int64_t samples = a.groups * a.batch;
  check_value(a.batch < kEmpty && samples < INT64_C(0xffffffff), "offsets describe ", a.batch, " samples, of ",
              a.groups, " groups; at most 2^31 - 2 fit in a call on a GPU, and 2^32 - 2 of all groups together");
  for (a.slots = 2; a.slots < 2 * a.batch;) a.slots *= 2;
  DeviceMemory memory(like);
  a.hashes = memory.make<uint64_t>(samples);
  a.table = memory.make<int32_t>(a.groups * a.slots);
  a.slot_of = memory.make<uint32_t>(samples);
  auto* before = memory.make<uint32_t>(samples + 1);
  with_lanes(lanes_for(4 * ceil_div(a.bags.num_ids, a.bags.num_bags)), [&](auto group) {
    launch_for(samples, group, stream, hash_kernel<group>, a);
    launch_for(samples, group, stream, insert_kernel<group>, a);
  });
  exclusive_sum(Computed<FirstOnes>{{a}}, before, samples + 1, like, stream);
  launch_for(samples, 1, stream, number_kernel, a, before, out.rows.mutable_data_ptr<int64_t>(),
             out.inverse.mutable_data_ptr<int64_t>(), out.counts.mutable_data_ptr<int64_t>());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> jagged_dedup_cuda(const Tensor& values_in, const Tensor& offsets_in,
                                                             const std::vector<int64_t>& groups,
                                                             const OptionalTensor& weights_in, int64_t hash_bits) {
  const DedupSizes sizes = check_jagged_dedup(values_in, offsets_in, groups, weights_in, hash_bits);
  const OnDeviceOf device(values_in);
  const cudaStream_t stream = device.stream();
  const Tensor values = as_contiguous(values_in), offsets = as_contiguous(offsets_in);
  const OptionalTensor weights = as_contiguous(weights_in);
  const bool any = sizes.groups * sizes.batch > 0;
  const Distinct out{
      new_tensor(values, {sizes.groups, sizes.batch}, ScalarType::Long),
      new_tensor(values, {sizes.groups, sizes.batch}, ScalarType::Long),
      any ? new_tensor(values, {sizes.groups}, ScalarType::Long) : new_zeros(values, {sizes.groups}, ScalarType::Long)};
  const Tensor status = new_jagged_status(values, stream);
  const Bags bags = jagged_rows(values, offsets);
  auto* noted = status.mutable_data_ptr<int64_t>();
  if (!any) {
    launch_for(bags.num_bags + 1, 1, stream, note_offsets_kernel, bags, noted);
    return {out.rows, out.inverse, out.counts, status};
  }
  const Tensor members = to_gpu(members_of(groups, sizes.groups), values, stream);
  const auto* member_starts = members.const_data_ptr<int64_t>();
  const DedupArgs args{bags,
                       Integers(values),
                       weights ? weights->const_data_ptr<float>() : nullptr,
                       member_starts,
                       member_starts + sizes.groups + 1,
                       sizes.groups,
                       sizes.batch,
                       hash_bits == 64 ? UINT64_MAX : (UINT64_C(1) << hash_bits) - 1,
                       nullptr,
                       nullptr,
                       0,
                       nullptr,
                       noted};
  dedup(args, out, values, stream);
  return {out.rows, out.inverse, out.counts, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) { implement<&jagged_dedup_cuda>(m, "jagged_dedup"); }

}  // namespace rec_kernels
