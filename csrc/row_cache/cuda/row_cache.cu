// The row cache on the GPU: finding rows, flushing, statistics. Insertion is in insert_and_evict.cu.
#include "core/boxing.h"
#include "core/cuda/to_gpu.cuh"
#include "row_cache/cuda/row_cache.cuh"

namespace rec_kernels {
namespace {

__device__ bool is_searched(const TablePart& p) { return p.cache_sets > 0 && p.num_embeddings > 0; }

// A warp takes a part and computes its rank by counting the parts before it.
__global__ void __launch_bounds__(kThreads)
    order_parts_kernel(PartOrder order, const TablePart* parts, int64_t num_parts, const int64_t* status) {
  if (*status == kBadLayout) return;
  const Group<kWarpSize> warp;
  for (int64_t p = Group<kWarpSize>::first(); p < num_parts; p += Group<kWarpSize>::stride()) {
    const int64_t row = parts[p].row_offset;
    int64_t before = 0, all = 0;
    for (int64_t q = warp.lane; q < num_parts; q += kWarpSize) {
      if (!is_searched(parts[q])) continue;
      const int64_t other = parts[q].row_offset;
      before += other < row || (other == row && q > p);
      ++all;
    }
    before = warp.sum(before);
    all = warp.sum(all);
    if (warp.lane != 0) continue;
    if (p == 0) *order.count = all;
    if (!is_searched(parts[p])) continue;
    order.first_rows[before] = row;
    order.parts[before] = p;
  }
}

struct FindArgs {
  CacheTensors cache;
  Parts parts;
  Bags bags;
  int64_t* slots;
  MissingKeys missing;
  int64_t* status;
};

// A group of lanes takes a bag, a lane an id.
template <int G>
__global__ void __launch_bounds__(kThreads) find_slots_kernel(FindArgs a) {
  if (*a.status == kBadLayout) return;
  const Group<G> group;
  for_features_of_warp(a.bags, [&](int64_t feature, int64_t first, int64_t last) {
    const int64_t part = a.bags.first_part(feature);
    const bool alone = a.bags.first_part(feature + 1) - part == 1;
    const Part f = a.parts[part];
    const CachePlace place = place_of(a.cache, a.parts, part);
    for (int64_t bag = first + group.in_warp(); bag < last; bag += kWarpSize / G) {
      const Range ids = range_of(a.bags, bag, a.status);
      for (int64_t i = ids.start + group.lane; i < ids.stop; i += G) {
        const int64_t id = a.bags.id(i);
        int64_t row = -1;
        if (!a.bags.in_range(id, f)) note_bad(a.status, i);
        else if (id != a.bags.padding_idx && alone && place.sets > 0)
          row = f.row_offset + (a.parts.mapped ? a.parts.mapped[part].partition.row(id) : id);
        const int64_t slot = row >= 0 ? a.cache.view().slot_of(place, row) : -1;
        a.slots[i] = slot;
        if (a.missing.keys && row >= 0 && slot < 0)
          a.missing.keys[i] = static_cast<uint64_t>(place.set(row)) << a.missing.row_bits | static_cast<uint64_t>(row);
      }
    }
  });
}

__global__ void __launch_bounds__(kThreads) no_slots_kernel(int64_t* slots, int64_t count) {
  for (int64_t i = Group<1>::first(); i < count; i += Group<1>::stride()) slots[i] = -1;
}

struct FlushArgs {
  Eviction eviction;
  CacheTensors cache;
  Parts parts;
  int format;
  int64_t first_slot, last_slot;
  const int64_t* status;
};

// A group of lanes takes a slot.
template <class Format, int G>
__global__ void __launch_bounds__(kThreads) flush_kernel(FlushArgs a) {
  if (*a.status == kBadLayout) return;
  const Group<G> group;
  for (int64_t slot = a.first_slot + Group<G>::first(); slot < a.last_slot; slot += Group<G>::stride()) {
    const int64_t row = a.cache.tags[slot];
    if (row < 0 || !a.cache.dirty[slot]) continue;
    const int64_t part = part_at(a.cache, a.parts, slot, row);
    if (part < 0 || !a.parts.has_format(part, a.format)) continue;
    encode_slot<Format>(a.eviction, a.cache, a.parts, part, row, slot, group);
  }
}

// Arbitrary ranges of linear rows, whose sorted boundaries cut them into disjoint pieces.
struct RangeArgs {
  const int64_t* tags;
  const TablePart* ranges;
  const uint8_t* dirty;
  int64_t slots, parts;
  int64_t* cuts;                 // [2 * parts], padded with INT64_MAX
  unsigned long long* in_piece;  // [2 * parts + 1, 2]: slots, dirty slots
  int64_t* counts;               // [parts, 2]

  RK_HOST_DEVICE int64_t counters() const { return 2 * (2 * parts + 1); }
  // Cut i: begin (even i) or end of range i / 2.
  __device__ int64_t cut(int64_t i) const {
    const int64_t first = ranges[i / 2].row_offset, rows = ranges[i / 2].num_embeddings;
    if (rows <= 0) return INT64_MAX;
    return i % 2 == 0 ? first : has_end(i / 2) ? first + rows : INT64_MAX;
  }
  __device__ bool has_end(int64_t p) const {
    return ranges[p].row_offset < 0 || ranges[p].num_embeddings <= INT64_MAX - ranges[p].row_offset;
  }
  // Number of cuts at or before a row.
  __device__ int64_t piece_of(int64_t row) const {
    return first_behind(0, 2 * parts, [&](int64_t i) { return cuts[i] > row; });
  }
};

// Sorts the cuts, and sets the counters to 0.
__global__ void __launch_bounds__(kThreads) sort_cuts_kernel(RangeArgs a) {
  for (int64_t i = Group<1>::first(); i < a.counters(); i += Group<1>::stride()) a.in_piece[i] = 0;
  for (int64_t i = Group<1>::first(); i < 2 * a.parts; i += Group<1>::stride()) {
    const int64_t mine = a.cut(i);
    int64_t before = 0;
    for (int64_t j = 0; j < 2 * a.parts; ++j) before += a.cut(j) < mine || (a.cut(j) == mine && j < i);
    a.cuts[before] = mine;
  }
}

// A block counts in shared memory if the counters fit, then adds them to the global ones.
__global__ void __launch_bounds__(kThreads) count_pieces_kernel(RangeArgs a, bool shares) {
  const int64_t size = a.counters();
  auto* counts = shares ? shared_memory<unsigned long long>() : a.in_piece;
  for (int64_t i = threadIdx.x; shares && i < size; i += kThreads) counts[i] = 0;
  __syncthreads();
  for (int64_t slot = Group<1>::first(); slot < a.slots; slot += Group<1>::stride()) {
    if (a.tags[slot] < 0) continue;
    const int64_t piece = a.piece_of(a.tags[slot]);
    atomicAdd(counts + 2 * piece, 1ull);
    if (a.dirty[slot]) atomicAdd(counts + 2 * piece + 1, 1ull);
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; shares && i < size; i += kThreads)
    if (counts[i]) atomicAdd(a.in_piece + i, counts[i]);
}

__global__ void __launch_bounds__(kThreads) add_pieces_kernel(RangeArgs a) {
  for (int64_t i = Group<1>::first(); i < 2 * a.parts; i += Group<1>::stride()) {
    const int64_t first = a.ranges[i / 2].row_offset, rows = a.ranges[i / 2].num_embeddings;
    int64_t count = 0;
    if (rows > 0) {
      const int64_t behind = a.has_end(i / 2) ? a.piece_of(first + rows) : 2 * a.parts + 1;
      for (int64_t piece = a.piece_of(first); piece < behind; ++piece)
        count += static_cast<int64_t>(a.in_piece[2 * piece + i % 2]);
    }
    a.counts[i] = count;
  }
}

Tensor lookup(const Tensor& cache_tags, const Tensor& cache_marks, const CacheBags& bags) {
  const Layout layout = read_layout(bags.layout, bags.layout_sizes, bags.values);
  const CacheArguments arguments{nullptr, &cache_tags, &cache_marks, nullptr};
  const CacheTensors cache = read_cache(arguments, layout, bags.values, CacheUse::kFind);
  const OnDeviceOf device(bags.values);
  const cudaStream_t stream = device.stream();
  const BagInput in = read_bags(bags.without_weights(), layout, stream);
  LayoutLimits limits = limits_of(in.bags.num_parts, cache_tags, arguments);
  limits.weight_bytes = INT64_MAX;  // weights are not read
  Tensor slots = new_tensor(bags.values, {in.bags.num_ids}, ScalarType::Long);
  Tensor status = new_status(in, limits, bags.values, stream);
  find_slots(in, cache, slots.mutable_data_ptr<int64_t>(), {}, status.mutable_data_ptr<int64_t>(), stream);
  return slots;
}

void flush(const Tensor& weights, const Tensor& cache_rows, const Tensor& cache_tags, const Tensor& cache_dirty,
           const Tensor& cache_clock, const Tensor& records, const std::vector<int64_t>& layout_sizes,
           const std::string& rounding, const OptionalTensor& seed, int64_t first_slot,
           std::optional<int64_t> num_slots) {
  const Tensor values = new_zeros(cache_tags, {0}, ScalarType::Long);
  const Tensor offsets = new_zeros(cache_tags, {1}, ScalarType::Long);
  const Layout layout = read_layout(records, layout_sizes, values);
  check_weights(weights, cache_tags, layout);
  const CacheArguments arguments{&cache_rows, &cache_tags, nullptr, &cache_dirty};
  CacheTensors cache = read_cache(arguments, layout, values, CacheUse::kFlush);
  const OnDeviceOf device(cache_tags);
  const cudaStream_t stream = device.stream();
  const CacheBags bags{values, offsets, records, layout_sizes, std::nullopt, "none"};
  const BagInput in = read_bags(bags.without_weights(), layout, stream);
  const UpdateRounding how = read_rounding(values, rounding, seed);
  check_clock(cache_clock, values);
  const int64_t slots = read_slots(cache_tags, first_slot, num_slots);
  if (in.bags.num_parts == 0) return;  // no slot holds a row of this layout
  Tensor status = new_status(in, limits_of(in.bags.num_parts, weights, arguments), values, stream);
  const Tensor order = order_parts(&cache, in, status.const_data_ptr<int64_t>(), stream);
  FlushArgs args{{on_gpu(weights, values), how.seed, cache_clock.const_data_ptr<int64_t>(), how.stochastic},
                 cache,
                 in.parts,
                 0,
                 first_slot,
                 first_slot + slots,
                 status.const_data_ptr<int64_t>()};
  for (; args.format < in.parts.num_formats && slots > 0; ++args.format)
    with_bag_format(in.parts.formats[args.format], [&](auto format) {
      with_row_lanes(in.max_dim, [&](auto lanes) {
        launch_for(slots, lanes, stream, flush_kernel<decltype(format), lanes>, args);
      });
    });
}

Tensor stats(const Tensor& cache_tags, const Tensor& cache_dirty, const Tensor& layout,
             const std::vector<int64_t>& layout_sizes) {
  check_stats(cache_tags, cache_dirty);
  const Layout tables = read_layout(layout, layout_sizes, cache_tags);
  const OnDeviceOf device(cache_tags);
  const int64_t parts = tables.num_parts, slots = cache_tags.numel();
  if (parts == 0 || slots == 0) return new_zeros(cache_tags, {parts, 2}, ScalarType::Long);
  Tensor out = new_tensor(cache_tags, {parts, 2}, ScalarType::Long);
  DeviceMemory memory(cache_tags);
  RangeArgs args{
      cache_tags.const_data_ptr<int64_t>(), tables.parts, cache_dirty.const_data_ptr<uint8_t>(), slots, parts,
      memory.make<int64_t>(2 * parts)};
  args.in_piece = memory.make<unsigned long long>(args.counters());
  args.counts = out.mutable_data_ptr<int64_t>();
  const int64_t bytes = args.counters() * int64_t{sizeof(int64_t)};
  const bool shares = bytes <= kSharedBytes;
  const dim3 block(kThreads);
  launch_for(args.counters(), 1, device.stream(), sort_cuts_kernel, args);
  launch(count_pieces_kernel, blocks_for(slots, 1), block, shares ? bytes : 0, device.stream(), args, shares);
  launch_for(2 * parts, 1, device.stream(), add_pieces_kernel, args);
  return out;
}

}  // namespace

Tensor order_parts(CacheTensors* cache, const BagInput& in, const int64_t* status, cudaStream_t stream) {
  const int64_t parts = in.bags.num_parts;
  Tensor memory = new_tensor(in.values, {2 * parts + 1}, ScalarType::Long);
  auto* numbers = memory.mutable_data_ptr<int64_t>();
  cache->order = {numbers, numbers + parts, numbers + 2 * parts};
  if (parts > 0)
    launch_for(parts, kWarpSize, stream, order_parts_kernel, cache->order, in.parts.records, parts, status);
  return memory;
}

void find_slots(const BagInput& in, const CacheTensors& cache, int64_t* slots, const MissingKeys& missing,
                int64_t* status, cudaStream_t stream) {
  if (in.bags.num_ids > 0 && !missing.keys)
    launch_for(in.bags.num_ids, 1, stream, no_slots_kernel, slots, in.bags.num_ids);
  if (in.bags.num_bags == 0) return;
  with_lanes(lanes_of_bags(in.bags), [&](auto group) {
    launch_for(in.bags.num_bags, group, stream, find_slots_kernel<group>,
               FindArgs{cache, in.parts, in.bags, slots, missing, status});
  });
}

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) {
  implement<&lookup>(m, "row_cache_lookup.layout");
  implement<&flush>(m, "row_cache_flush_.layout");
  implement<&stats>(m, "row_cache_stats.layout");
}

}  // namespace rec_kernels
