// Writes an entry (linear row, bag) for every id and part of a call, sorts entries by row and finds the runs of each
// row.
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
  RowKeys keys, sorted;  // sorted has one more element, which is left_out
  uint32_t* payloads;
  uint32_t* bag_of;
  float* coefficients;
  const float** gradients;
  const float* grad;
  int64_t output_dim;
  int64_t left_out;      // key of entries that do not contribute: greater than every row
  uint32_t* num_chunks;  // set to 0 for list_chunks_kernel
  int64_t* status;
};

__device__ bool counts(const EntryArgs& a, const Part& f, int64_t id) {
  return !f.frozen && a.bags.counts(id, f, a.bags.padding_idx);
}

// 1 / n for a bag with mean pooling, if coefficients are written; else 1.
template <int G>
__device__ float factor_of_bag(const EntryArgs& a, const Part& f, const Group<G>& group, Range ids) {
  return a.coefficients && f.mean ? mean_factor(a.bags, f, group, ids) : 1.0f;
}

// Resets the chunk count, and marks as left out the ids before the first bag and after the last one, and the entry
// after the end. Every other id is in a bag, or offsets are bad, and then entries are not used.
__device__ void leave_out_rest(const EntryArgs& a) {
  const int64_t start = a.bags.offset(0), stop = a.bags.offset(a.bags.num_bags), parts = a.parts.most_parts;
  if (Group<1>::first() == 0) {
    *a.num_chunks = 0;
    a.sorted.set(a.bags.num_ids * parts, a.left_out);
  }
  const auto leave_out = [&](int64_t from, int64_t to) {
    for (int64_t i = from * parts + Group<1>::first(); i < to * parts; i += Group<1>::stride()) {
      a.keys.set(i, a.left_out);
      a.payloads[i] = 0;
    }
  };
  if (start > 0 && start <= a.bags.num_ids) leave_out(0, start);  // a bad offset may have any value
  if (stop >= 0 && stop < a.bags.num_ids) leave_out(stop, a.bags.num_ids);
}

// A group takes a bag. Entries are at the positions of their ids, which keeps the order of (feature, bag, position).
template <int G>
__global__ void __launch_bounds__(kThreads) entries_kernel(EntryArgs a) {
  leave_out_rest(a);
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
      a.keys.set(i, counts(a, f, id) ? f.row_offset + id : a.left_out);
      const int64_t payload = a.coefficients ? i : bag;
      a.payloads[i] = static_cast<uint32_t>(payload);
      if (a.gradients) a.gradients[payload] = gradient;
      if (!a.coefficients) continue;
      a.bag_of[i] = static_cast<uint32_t>(bag);
      a.coefficients[i] = a.bags.per_sample_weights ? a.bags.per_sample_weights[i] * each : each;
    }
  }
}

// Writes most_parts consecutive entries per id, one per part. Absent parts, and parts that get no gradient, are left
// out.
template <int G>
__global__ void __launch_bounds__(kThreads) part_entries_kernel(EntryArgs a) {
  leave_out_rest(a);
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
      const int64_t present = counts(a, f, id) ? count : 0;
      for (int64_t p = 0; p < a.parts.most_parts; ++p) {
        const int64_t entry = i * a.parts.most_parts + p, payload = i << a.parts.part_bits | p;
        a.payloads[entry] = static_cast<uint32_t>(payload);
        if (p >= present) {
          a.keys.set(entry, a.left_out);
          continue;
        }
        const int64_t row = a.parts.mapped[first + p].partition.row(id);
        a.keys.set(entry, a.parts.records[first + p].row_offset + row);
        a.gradients[payload] = gradient + a.parts[first + p].output_offset;
      }
    }
  }
}

// Functors for a prefix sum over all entries and the one after them: the input is 1 where a run starts, the output
// writes the starts. Entries that are left out come last; their start is the end of the last run.
template <class Key>
struct RunStarts {
  const Key* keys;
  uint32_t count;
  Key left_out;
  uint32_t *starts, *num_runs;
  const int64_t* status;  // negative: offsets are bad, and some entries were not written

  // Keys are read unconditionally and as read-only memory, so that a thread issues the loads of all its entries before
  // it needs the first.
  __device__ __forceinline__ Key key(uint32_t i) const { return __ldg(keys + i); }
  // 1 if a run begins at entry i.
  __device__ __forceinline__ uint32_t operator()(uint32_t i) const {
    const Key own = key(i), before = key(i == 0 ? 0 : i - 1);
    return static_cast<uint32_t>(own != left_out) &
           (static_cast<uint32_t>(i == 0) | static_cast<uint32_t>(own != before));
  }
  // `before`: number of runs that begin before entry i.
  __device__ __forceinline__ void operator()(uint32_t i, uint32_t before) const {
    const Key own = key(i), previous = key(i == 0 ? 0 : i - 1);
    if (i == 0 || own != previous) starts[before] = i;
    if (i == count) *num_runs = *status < 0 ? 0 : before;
  }
};

// Lists the chunks of every run: a lane takes a run, then the warp writes its chunks. `status` is given for calls that
// multiply, to skip runs of bad offsets, where bags may overlap.
__global__ void __launch_bounds__(kThreads)
    list_chunks_kernel(Runs runs, Parts parts, Bags bags, const int64_t* status) {
  const Group<kWarpSize> warp;
  const int64_t num_runs = *runs.num_runs;
  for (int64_t first = warp.first() * kWarpSize; first < num_runs; first += warp.stride() * kWarpSize) {
    const int64_t run = first + warp.lane, count = run < num_runs ? runs.count(run) : 0;
    const bool multiplied =
        status && *status >= 0 && count > 0 && parts.records[part_of_run(runs, bags, run)].multiplied;
    const auto mine = static_cast<uint32_t>(count > kChunk || multiplied ? ceil_div(count, kChunk) : 0);
    unsigned with_chunks = warp.ballot(mine > 0);
    if (with_chunks == 0) continue;
    uint32_t prefix = mine;  // inclusive prefix sum of the lanes' chunks
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const uint32_t other = warp.broadcast(prefix, warp.lane < distance ? warp.lane : warp.lane - distance);
      if (warp.lane >= distance) prefix += other;
    }
    uint32_t begin = 0;
    if (warp.lane == kWarpSize - 1) begin = atomicAdd(runs.num_chunks, prefix);
    begin = warp.broadcast(begin, kWarpSize - 1) + prefix - mine;
    if (mine > 0) runs.first_chunks[run] = begin;
    for (; with_chunks != 0; with_chunks &= with_chunks - 1) {
      const int from = lowest_bit(with_chunks);
      const uint32_t here = warp.broadcast(begin, from), chunks = warp.broadcast(mine, from);
      for (uint32_t c = static_cast<uint32_t>(warp.lane); c < chunks; c += kWarpSize)
        runs.owners[here + c] = static_cast<uint32_t>(first + from);
    }
  }
}

__global__ void no_runs_kernel(Runs runs) {
  *runs.num_runs = *runs.num_chunks = 0;
  runs.starts[0] = 0;
}

// About four ids per lane, since every lane of a group computes what all ids of the bag need.
void write_entries(const BagInput& in, const EntryArgs& args, cudaStream_t stream) {
  with_lanes(lanes_for(ceil_div(in.bags.num_ids, in.bags.num_bags)), [&](auto group) {
    const auto kernel = in.parts.mapped ? part_entries_kernel<group> : entries_kernel<group>;
    launch_for(in.bags.num_bags, group, stream, kernel, args);
  });
}

// Sorts entries and finds the runs.
template <class Key>
void sort_entries(const EntryArgs& args, const Runs& runs, uint32_t* sorted_payloads, const Tensor& like,
                  cudaStream_t stream) {
  const auto N = static_cast<uint32_t>(runs.most_runs);
  auto* sorted = static_cast<Key*>(args.sorted.keys);
  sort_pairs(static_cast<const Key*>(args.keys.keys), sorted, args.payloads, sorted_payloads, N,
             bit_width(static_cast<uint64_t>(args.left_out)), like, stream);
  const RunStarts<Key> starts{sorted, N, static_cast<Key>(args.left_out), runs.starts, runs.num_runs, args.status};
  exclusive_sum(Computed<RunStarts<Key>>{starts}, TakenBy<RunStarts<Key>>{starts}, int64_t{N} + 1, like, stream);
}

// Upper bound of the chunks of N entries. With multiplied tables even a run of one entry has a chunk, and there are at
// most num_rows runs.
int64_t most_chunks_of(const BagInput& in, int64_t N) {
  if (in.multiplies) return N / kChunk + std::min(N, in.num_rows) + 1;
  return N > kChunk ? N / kChunk + N / (kChunk + 1) + 1 : 0;
}

}  // namespace

SortedOccurrences sort_occurrences(const BagInput& in, int64_t* status, const Tensor& grad, cudaStream_t stream) {
  const int64_t ids = in.bags.num_ids, N = ids * in.parts.most_parts;
  check_value(
      N < INT64_C(0xffffffff) && ids << in.parts.part_bits < INT64_C(0xffffffff), "values has ", ids,
      " ids; at most 2^32 - 2 fit in a call on a GPU, half of it where features have two parts, a quarter with more");
  SortedOccurrences out{{}, DeviceMemory(grad)};
  DeviceMemory& memory = out.memory;
  const bool weighted = in.bags.per_sample_weights || in.any_mean, wide = in.num_rows > INT64_C(0xffffffff);
  const auto make_keys = [&](int64_t count) { return RowKeys{memory.make<uint8_t>(count * (wide ? 8 : 4)), wide}; };
  EntryArgs args{in.parts, in.bags, make_keys(N), make_keys(N + 1), memory.make<uint32_t>(N)};
  auto* sorted_payloads = memory.make<uint32_t>(N);
  if (weighted || in.parts.mapped) args.bag_of = memory.make<uint32_t>(ids);
  if (weighted) args.coefficients = memory.make<float>(ids);
  if (in.parts.mapped) args.gradients = memory.make<const float*>(ids << in.parts.part_bits);
  else if (in.groups) args.gradients = memory.make<const float*>(weighted ? ids : in.bags.num_bags);
  args.grad = grad.const_data_ptr<float>();
  args.output_dim = in.output_dim;
  args.left_out = in.num_rows;
  args.num_chunks = memory.make<uint32_t>(2);
  args.status = status;
  const int64_t most_chunks = most_chunks_of(in, N);
  const Runs& runs = out.runs = {args.sorted,
                                 sorted_payloads,
                                 args.bag_of,
                                 args.coefficients,
                                 args.gradients,
                                 memory.make<uint32_t>(N + 1),
                                 most_chunks > 0 ? memory.make<uint32_t>(N) : nullptr,
                                 memory.make<uint32_t>(most_chunks),
                                 args.num_chunks + 1,
                                 args.num_chunks,
                                 N,
                                 most_chunks,
                                 in.parts.part_bits};
  if (in.bags.num_bags > 0) write_entries(in, args, stream);  // also without ids: this checks the offsets
  if (N == 0 || in.bags.num_bags == 0) {
    launch_one(stream, no_runs_kernel, runs);
    return out;
  }
  if (wide) sort_entries<uint64_t>(args, runs, sorted_payloads, grad, stream);
  else sort_entries<uint32_t>(args, runs, sorted_payloads, grad, stream);
  if (most_chunks > 0)
    launch_for(N, 1, stream, list_chunks_kernel, runs, in.parts, in.bags, in.multiplies ? status : nullptr);
  return out;
}

}  // namespace rec_kernels
