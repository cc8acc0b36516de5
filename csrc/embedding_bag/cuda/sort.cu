// Every id of a call as an entry (linear row, bag) for each of its parts, sorted by row, and cut into runs of one row.
#include <algorithm>
#include <vector>

#include "core/bits.h"
#include "core/cuda/device_algorithms.h"
#include "embedding_bag/cuda/sort.cuh"

namespace rec_kernels {
namespace {

struct EntryArgs {
  Parts parts;
  Bags bags;
  uint64_t* keys;
  uint32_t* payloads;
  uint32_t* bag_of;
  float* coefficients;
  const float** gradients;
  const float* grad;
  int64_t output_dim;
  uint64_t left_out;  // key of entries that do not count: above every row
  int64_t* status;
};

__device__ bool counts(const EntryArgs& a, const Part& f, int64_t id) {
  return !f.frozen && a.bags.counts(id, f, a.bags.padding_idx);
}

// Number of the bag's ids that count, on every lane of the group.
template <int G>
__device__ int64_t count_ids(const EntryArgs& a, const Part& f, const Group<G>& group, Range ids) {
  int64_t n = 0;
  for (int64_t i = ids.start + group.lane; i < ids.stop; i += G) n += counts(a, f, a.bags.id(i));
  for (int distance = G / 2; distance > 0; distance /= 2) n += __shfl_xor_sync(group.mask, n, distance, G);
  return n;
}

// 1 / n of a bag of a feature with mean pooling, if coefficients are asked for.
template <int G>
__device__ float factor_of_bag(const EntryArgs& a, const Part& f, const Group<G>& group, Range ids) {
  if (!a.coefficients || !f.mean) return 1.0f;
  const int64_t n = count_ids(a, f, group, ids);
  return n > 0 ? 1.0f / static_cast<float>(n) : 1.0f;
}

// A group takes a bag. An id's entry is at its own place, so the order of (feature, bag, position) is kept.
template <int G>
__global__ void __launch_bounds__(kThreads) entries_kernel(EntryArgs a) {
  if (*a.status == kBadLayout) return;
  const Group<G> group;
  for (int64_t bag = Group<G>::first(); bag < a.bags.num_bags; bag += Group<G>::stride()) {
    const int64_t feature = a.bags.feature_of(bag);
    const Part f = a.parts[feature];
    const float* gradient = a.bags.row_of(bag, feature, a.grad, a.output_dim) + f.output_offset;
    const Range ids = range_of(a.bags, bag, a.status);
    const float each = factor_of_bag(a, f, group, ids);
    for (int64_t i = ids.start + group.lane; i < ids.stop; i += G) {
      const int64_t id = a.bags.id(i);
      if (!f.frozen && !a.bags.in_range(id, f)) note_bad(a.status, i);
      a.keys[i] = counts(a, f, id) ? static_cast<uint64_t>(f.row_offset + id) : a.left_out;
      const int64_t payload = a.coefficients ? i : bag;
      a.payloads[i] = static_cast<uint32_t>(payload);
      if (a.gradients) a.gradients[payload] = gradient;
      if (!a.coefficients) continue;
      a.bag_of[i] = static_cast<uint32_t>(bag);
      a.coefficients[i] = a.bags.per_sample_weights ? a.bags.per_sample_weights[i] * each : each;
    }
  }
}

// Writes an entry for each part of an id, next to each other. Absent parts, and parts whose rows get no gradient, are
// left out before.
template <int G>
__global__ void __launch_bounds__(kThreads) part_entries_kernel(EntryArgs a) {
  if (*a.status == kBadLayout) return;
  const Group<G> group;
  for (int64_t bag = Group<G>::first(); bag < a.bags.num_bags; bag += Group<G>::stride()) {
    const int64_t feature = a.bags.feature_of(bag), first = a.bags.first_part(feature);
    const int64_t count = a.bags.first_part(feature + 1) - first;
    const float* gradient = a.bags.row_of(bag, feature, a.grad, a.output_dim);
    const Part f = a.parts[first];
    const Range ids = range_of(a.bags, bag, a.status);
    const float each = factor_of_bag(a, f, group, ids);
    for (int64_t i = ids.start + group.lane; i < ids.stop; i += G) {
      const int64_t id = a.bags.id(i);
      a.bag_of[i] = static_cast<uint32_t>(bag);
      if (a.coefficients) a.coefficients[i] = a.bags.per_sample_weights ? a.bags.per_sample_weights[i] * each : each;
      if (!f.frozen && !a.bags.in_range(id, f)) note_bad(a.status, i);
      if (!counts(a, f, id)) continue;
      for (int64_t p = 0; p < count; ++p) {
        const int64_t entry = i * a.parts.most_parts + p;
        const int64_t row = a.parts.mapped[first + p].partition.row(id);
        a.keys[entry] = static_cast<uint64_t>(a.parts.records[first + p].row_offset + row);
        const int64_t payload = i << a.parts.part_bits | p;
        a.payloads[entry] = static_cast<uint32_t>(payload);
        a.gradients[payload] = gradient + a.parts[first + p].output_offset;
      }
    }
  }
}

// Ids that no bag names, or only bags with bad offsets, count for nothing.
__global__ void __launch_bounds__(kThreads)
    leave_out_kernel(uint64_t* keys, uint32_t* payloads, int64_t count, uint64_t left_out) {
  for (int64_t i = Group<1>::first(); i < count; i += Group<1>::stride()) {
    keys[i] = left_out;
    payloads[i] = 0;
  }
}

__global__ void __launch_bounds__(kThreads)
    flag_runs_kernel(const uint64_t* keys, int64_t count, uint64_t left_out, uint32_t* flags) {
  for (int64_t i = Group<1>::first(); i < count; i += Group<1>::stride())
    flags[i] = keys[i] != left_out && (i == 0 || keys[i] != keys[i - 1]);
}

// places[i]: runs that begin before entry i.
__global__ void __launch_bounds__(kThreads)
    write_runs_kernel(const uint64_t* keys, int64_t count, uint64_t left_out, const uint32_t* flags,
                      const uint32_t* places, int64_t* starts, int64_t* num_runs) {
  for (int64_t i = Group<1>::first(); i < count; i += Group<1>::stride()) {
    const bool out = keys[i] == left_out, last = i == count - 1;
    if (flags[i]) starts[places[i]] = i;
    if (out && (i == 0 || keys[i - 1] != left_out)) starts[places[i]] = i;  // the end of the last run
    if (!last) continue;
    const int64_t runs = int64_t{places[i]} + flags[i];
    *num_runs = runs;
    if (!out) starts[runs] = count;
  }
}

// `status`, of calls that multiply, says whether runs make sense: bags with bad offsets may have ids in common.
__global__ void __launch_bounds__(kThreads)
    count_chunks_kernel(Runs runs, Parts parts, Bags bags, const int64_t* status, uint32_t* chunks) {
  for (int64_t r = Group<1>::first(); r <= runs.most_runs; r += Group<1>::stride()) {
    const int64_t count = r < *runs.num_runs ? runs.count(r) : 0;
    const bool multiplied = status && *status >= 0 && count > 0 && parts.records[part_of_run(runs, bags, r)].multiplied;
    chunks[r] = count > kChunk || multiplied ? static_cast<uint32_t>(ceil_div(count, kChunk)) : 0;
  }
}

__global__ void no_runs_kernel(int64_t* starts, int64_t* num_runs, uint32_t* chunk_starts) {
  *num_runs = 0;
  starts[0] = 0;
  chunk_starts[0] = 0;
}

// Allocates from torch and keeps what it allocates.
class Memory {
 public:
  Memory(const Tensor& like, std::vector<Tensor>* kept) : like_(like), kept_(*kept) {}
  template <class T>
  T* make(int64_t count) {
    kept_.push_back(new_tensor(like_, {count * static_cast<int64_t>(sizeof(T))}, ScalarType::Byte));
    return static_cast<T*>(kept_.back().mutable_data_ptr());
  }

 private:
  const Tensor& like_;
  std::vector<Tensor>& kept_;
};

void write_entries(const BagInput& in, const EntryArgs& args, cudaStream_t stream) {
  const int64_t N = in.bags.num_ids, entries = N * in.parts.most_parts;
  launch(leave_out_kernel, blocks_for(entries, 1), dim3(kThreads), 0, stream, args.keys, args.payloads, entries,
         args.left_out);
  if (in.bags.num_bags == 0) return;
  with_lanes(lanes_for(4 * ceil_div(N, in.bags.num_bags)), [&](auto group) {
    constexpr int G = decltype(group)::value;
    const auto kernel = in.parts.mapped ? part_entries_kernel<G> : entries_kernel<G>;
    launch(kernel, blocks_for(in.bags.num_bags, G), dim3(kThreads), 0, stream, args);
  });
}

}  // namespace

SortedOccurrences sort_occurrences(const BagInput& in, int64_t* status, const Tensor& grad, cudaStream_t stream) {
  const int64_t ids = in.bags.num_ids, N = ids * in.parts.most_parts;
  check_value(
      N < INT64_C(0xffffffff) && ids << in.parts.part_bits < INT64_C(0xffffffff), "values has ", ids,
      " ids; at most 2^32 - 2 fit in a call on a GPU, half of it where features have two parts, a quarter with more");
  SortedOccurrences out{};
  Memory memory(grad, &out.memory);
  const bool weighted = in.bags.per_sample_weights || in.any_mean;
  const auto left_out = static_cast<uint64_t>(in.num_rows);
  auto* keys = memory.make<uint64_t>(N);
  auto* payloads = memory.make<uint32_t>(N);
  auto* bag_of = weighted || in.parts.mapped ? memory.make<uint32_t>(ids) : nullptr;
  auto* coefficients = weighted ? memory.make<float>(ids) : nullptr;
  const float** gradients = nullptr;
  if (in.parts.mapped) gradients = memory.make<const float*>(ids << in.parts.part_bits);
  else if (in.groups) gradients = memory.make<const float*>(weighted ? ids : in.bags.num_bags);
  auto* sorted_keys = memory.make<uint64_t>(N);
  auto* sorted_payloads = memory.make<uint32_t>(N);
  auto* flags = memory.make<uint32_t>(N + 1);
  auto* sums = memory.make<uint32_t>(N + 1);
  auto* starts = memory.make<int64_t>(N + 1);
  auto* num_runs = memory.make<int64_t>(1);
  // A run of a multiplied table has a chunk where it has a single entry; there are no more runs than rows.
  const int64_t most_chunks = in.multiplies ? N / kChunk + std::min(N, in.num_rows) : N / kChunk + N / (kChunk + 1);
  out.runs = {sorted_keys,     sorted_payloads,   bag_of, coefficients, gradients, starts, num_runs, sums, N,
              most_chunks + 1, in.parts.part_bits};
  // Runs without ids, too: this reads the offsets.
  write_entries(in,
                {in.parts, in.bags, keys, payloads, bag_of, coefficients, gradients, grad.const_data_ptr<float>(),
                 in.output_dim, left_out, status},
                stream);
  if (N == 0) {
    launch(no_runs_kernel, dim3(1), dim3(1), 0, stream, starts, num_runs, sums);
    return out;
  }
  sort_pairs(keys, sorted_keys, payloads, sorted_payloads, N, bit_width(left_out), grad, stream);
  const dim3 grid = blocks_for(N + 1, 1);
  launch(flag_runs_kernel, grid, dim3(kThreads), 0, stream, sorted_keys, N, left_out, flags);
  exclusive_sum(flags, sums, N, grad, stream);
  launch(write_runs_kernel, grid, dim3(kThreads), 0, stream, sorted_keys, N, left_out, flags, sums, starts, num_runs);
  launch(count_chunks_kernel, grid, dim3(kThreads), 0, stream, out.runs, in.parts, in.bags,
         in.multiplies ? status : nullptr, flags);
  exclusive_sum(flags, sums, N + 1, grad, stream);
  return out;
}

}  // namespace rec_kernels
