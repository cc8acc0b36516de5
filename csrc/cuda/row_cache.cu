// The row cache on the GPU: finding rows, flushing, statistics. Insertion is in row_cache_insert.cu.
#include "core/boxing.h"
#include "cuda/row_cache.cuh"

namespace rec_kernels {
namespace {

// Slots that a part's table takes in the cache's rows.
struct Extent {
  int64_t first, last, begin, end;
};

__device__ Extent extent_of(const CacheTensors& cache, const Features& features, int64_t p) {
  const int64_t D = features.embedding_dims[p];
  const int64_t first = cache.set_starts[p] * cache.ways, last = first + cache.sets[p] * cache.ways;
  const int64_t offset = cache.offsets ? cache.offsets[p] : 0;
  return {first, last, offset + first * D, offset + last * D};
}

// Whether the numbers of a part make sense by themselves. What they are multiplied by is bounded first.
__device__ bool is_inside(const CacheTensors& cache, const Features& features, const Bags& bags, int64_t p) {
  const int64_t sets = cache.sets[p], first = cache.set_starts[p], all = cache.num_slots / cache.ways;
  if (sets == 0) return true;
  if (sets < 0 || first < 0 || sets > all || first > all - sets) return false;
  const int64_t feature = features.parts ? features.parts[p].feature : p;
  if (bags.first_part(feature + 1) - bags.first_part(feature) != 1) return false;
  if (!cache.offsets) return true;
  const int64_t D = features.embedding_dims[p], most = cache.num_elements;
  if (sets * cache.ways > most / D || cache.offsets[p] > most || (first + sets) * cache.ways > INT64_MAX / 2 / D)
    return false;
  const Extent e = extent_of(cache, features, p);
  return e.begin >= 0 && e.end <= most;
}

// Whether two parts share their slots or have none in common, and look for the rows of one table in the same place.
__device__ bool are_apart(const CacheTensors& cache, const Features& features, int64_t p, int64_t q) {
  const bool one_table = features.row_offsets[p] == features.row_offsets[q] && features.num_embeddings[p] > 0 &&
                         features.num_embeddings[q] > 0;
  const bool same =
      cache.sets[p] == cache.sets[q] && (cache.sets[p] == 0 || cache.set_starts[p] == cache.set_starts[q]);
  if (one_table && !same) return false;
  if (cache.sets[p] == 0 || cache.sets[q] == 0) return true;
  const Extent a = extent_of(cache, features, p), b = extent_of(cache, features, q);
  const bool slots = a.last <= b.first || b.last <= a.first;
  if (!cache.offsets) return same || slots;
  const bool shared = same && a.begin == b.begin && a.end == b.end;
  return shared || (slots && (a.end <= b.begin || b.end <= a.begin));
}

// One block. The kernels after it do nothing where something does not pass.
__global__ void __launch_bounds__(kThreads)
    check_places_kernel(CacheTensors cache, Features features, Bags bags, int64_t* status) {
  if (*status == kBadLayout) return;
  __syncthreads();
  for (int64_t p = threadIdx.x; p < cache.num_parts; p += blockDim.x)
    if (!is_inside(cache, features, bags, p)) note_bad(status, kBadLayout);
  __syncthreads();
  const bool good = *status != kBadLayout;
  __syncthreads();
  for (int64_t p = threadIdx.x; good && p < cache.num_parts; p += blockDim.x)
    for (int64_t q = 0; q < p; ++q)
      if (!are_apart(cache, features, p, q)) note_bad(status, kBadLayout);
}

__device__ bool is_searched(const CacheTensors& cache, const Features& features, int64_t p) {
  return cache.sets[p] > 0 && features.num_embeddings[p] > 0;
}

// A warp takes a part, and counts those that come before it.
__global__ void __launch_bounds__(kThreads)
    order_parts_kernel(CacheTensors cache, Features features, const int64_t* status) {
  if (*status == kBadLayout) return;
  const Group<kWarpSize> warp;
  for (int64_t p = Group<kWarpSize>::first(); p < cache.num_parts; p += Group<kWarpSize>::stride()) {
    const int64_t row = features.row_offsets[p];
    int64_t before = 0, all = 0;
    for (int64_t q = warp.lane; q < cache.num_parts; q += kWarpSize) {
      if (!is_searched(cache, features, q)) continue;
      const int64_t other = features.row_offsets[q];
      before += other < row || (other == row && q > p);
      ++all;
    }
    before = warp_sum(before);
    all = warp_sum(all);
    if (warp.lane != 0) continue;
    if (p == 0) *cache.order.count = all;
    if (!is_searched(cache, features, p)) continue;
    cache.order.first_rows[before] = row;
    cache.order.parts[before] = p;
  }
}

struct FindArgs {
  CacheTensors cache;
  Features features;
  Bags bags;
  int64_t* slots;
  MissingKeys missing;
  int64_t* status;
};

// A group of lanes takes a bag, and a lane of it an id.
template <int G>
__global__ void __launch_bounds__(kThreads) find_slots_kernel(FindArgs a) {
  if (*a.status == kBadLayout) return;
  const Group<G> group;
  for_features_of_warp(a.bags, [&](int64_t feature, int64_t first, int64_t last) {
    const int64_t part = a.bags.first_part(feature);
    const bool alone = a.bags.first_part(feature + 1) - part == 1;
    const Feature f = a.features[part];
    const CachePlace place = place_of(a.cache, a.features, part);
    for (int64_t bag = first + group.in_warp(); bag < last; bag += kWarpSize / G) {
      const Range ids = range_of(a.bags, bag, a.status);
      for (int64_t i = ids.start + group.lane; i < ids.stop; i += G) {
        const int64_t id = a.bags.id(i);
        int64_t row = -1;
        if (!a.bags.in_range(id, f)) note_bad(a.status, i);
        else if (id != a.bags.padding_idx && alone && place.sets > 0)
          row = f.row_offset + (a.features.parts ? a.features.parts[part].partition.row(id) : id);
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
  Features features;
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
    const int64_t part = part_at(a.cache, a.features, slot, row);
    if (part < 0 || !a.features.has_format(part, a.format)) continue;
    encode_slot<Format>(a.eviction, a.cache, a.features, part, row, slot, group);
  }
}

// Ranges of linear rows, any that there are, and where they begin and end, ascending: that cuts them into pieces.
struct RangeArgs {
  const int64_t *tags, *row_offsets, *num_embeddings;
  const uint8_t* dirty;
  int64_t slots, parts;
  int64_t* cuts;                 // [2 * parts], those that there are not being INT64_MAX
  unsigned long long* in_piece;  // [2 * parts + 1, 2]: slots, and dirty ones of them
  int64_t* counts;               // [parts, 2]

  // Cut i: where a range begins (even) or ends.
  __device__ int64_t cut(int64_t i) const {
    const int64_t first = row_offsets[i / 2], rows = num_embeddings[i / 2];
    if (rows <= 0) return INT64_MAX;
    return i % 2 == 0 ? first : has_end(i / 2) ? first + rows : INT64_MAX;
  }
  __device__ bool has_end(int64_t p) const {
    return row_offsets[p] < 0 || num_embeddings[p] <= INT64_MAX - row_offsets[p];
  }
  // How many cuts are not behind a row.
  __device__ int64_t piece_of(int64_t row) const {
    int64_t low = 0, high = 2 * parts;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (cuts[middle] <= row) low = middle + 1;
      else high = middle;
    }
    return low;
  }
};

__global__ void __launch_bounds__(kThreads) sort_cuts_kernel(RangeArgs a) {
  for (int64_t i = Group<1>::first(); i < 2 * a.parts; i += Group<1>::stride()) {
    const int64_t mine = a.cut(i);
    int64_t before = 0;
    for (int64_t j = 0; j < 2 * a.parts; ++j) before += a.cut(j) < mine || (a.cut(j) == mine && j < i);
    a.cuts[before] = mine;
  }
}

// A block counts in shared memory, if there is enough, and adds up what it has found.
__global__ void __launch_bounds__(kThreads) count_pieces_kernel(RangeArgs a, bool shares) {
  const int64_t size = 2 * (2 * a.parts + 1);
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
    const int64_t first = a.row_offsets[i / 2], rows = a.num_embeddings[i / 2];
    int64_t count = 0;
    if (rows > 0) {
      const int64_t behind = a.has_end(i / 2) ? a.piece_of(first + rows) : 2 * a.parts + 1;
      for (int64_t piece = a.piece_of(first); piece < behind; ++piece)
        count += static_cast<int64_t>(a.in_piece[2 * piece + i % 2]);
    }
    a.counts[i] = count;
  }
}

Tensor lookup(const Tensor& cache_tags, const Tensor& cache_marks, const Tensor& cache_sets,
              const Tensor& cache_set_starts, int64_t cache_ways, const Tensor& values, const Tensor& offsets,
              const TableLayout& layout, const BagReading& reading) {
  const BagOptions options = parse_bag_options(reading);
  const OnDeviceOf device(cache_tags);
  const cudaStream_t stream = device.stream();
  const OptionalTensor none, tags = cache_tags, marks = cache_marks, sets = cache_sets, starts = cache_set_starts;
  // The weights are not read: any table fits.
  constexpr int64_t kAnySize = INT64_MAX / 8;
  const BagInput in = read_bags(values, offsets, std::nullopt, layout, options, kAnySize, 1, true, stream);
  const CacheTensors cache =
      read_cache({none, none, tags, marks, none, sets, starts, cache_ways}, layout, in, values, CacheUse::kFind);
  Tensor slots = new_tensor(values, {in.bags.num_ids}, ScalarType::Long);
  Tensor status = new_status(in, kAnySize, false, values, stream);
  check_places(cache, in, status.mutable_data_ptr<int64_t>(), stream);
  find_slots(in, cache, slots.mutable_data_ptr<int64_t>(), {}, status.mutable_data_ptr<int64_t>(), stream);
  return slots;
}

void flush(const Tensor& weights, const Tensor& cache_rows, const Tensor& cache_offsets, const Tensor& cache_tags,
           const Tensor& cache_dirty, const Tensor& cache_sets, const Tensor& cache_set_starts, int64_t cache_ways,
           const Tensor& cache_clock, const TableLayout& layout, const BagReading& reading, const std::string& rounding,
           const OptionalTensor& seed, const OptionalTensor& table_ids, int64_t first_slot,
           std::optional<int64_t> num_slots) {
  const BagOptions options = parse_bag_options(reading);
  check_weights(weights, cache_tags, layout);
  const OnDeviceOf device(cache_tags);
  const cudaStream_t stream = device.stream();
  const Tensor values = new_zeros(cache_tags, {0}, ScalarType::Long);
  const Tensor offsets = new_zeros(cache_tags, {1}, ScalarType::Long);
  BagInput in = read_bags(values, offsets, std::nullopt, layout, options, weights.size(0), 1, true, stream);
  const OptionalTensor rows = cache_rows, places = cache_offsets, tags = cache_tags, dirty = cache_dirty,
                       sets = cache_sets, starts = cache_set_starts, none;
  CacheTensors cache =
      read_cache({rows, places, tags, none, dirty, sets, starts, cache_ways}, layout, in, values, CacheUse::kFlush);
  const UpdateRounding how = read_rounding(values, layout, rounding, seed, table_ids);
  in.features.table_ids = how.table_ids;
  check_clock(cache_clock, values);
  Tensor status = new_status(in, weights.numel(), true, values, stream);
  check_places(cache, in, status.mutable_data_ptr<int64_t>(), stream);
  const int64_t slots = read_slots(cache_tags, first_slot, num_slots);
  const Tensor order = order_parts(&cache, in, status.const_data_ptr<int64_t>(), stream);
  FlushArgs args{{on_gpu(weights, values), how.seed, cache_clock.const_data_ptr<int64_t>(), how.stochastic},
                 cache,
                 in.features,
                 0,
                 first_slot,
                 first_slot + slots,
                 status.const_data_ptr<int64_t>()};
  for (; args.format < in.features.num_formats && slots > 0; ++args.format)
    with_bag_format(in.features.formats[args.format], [&](auto format) {
      with_row_lanes(in.max_dim, [&](auto lanes) {
        constexpr int G = decltype(lanes)::value;
        launch(flush_kernel<decltype(format), G>, blocks_for(slots, G), dim3(kThreads), 0, stream, args);
      });
    });
}

Tensor stats(const Tensor& cache_tags, const Tensor& cache_dirty, const Tensor& row_offsets,
             const Tensor& num_embeddings) {
  check_stats(cache_tags, cache_dirty, row_offsets, num_embeddings);
  const OnDeviceOf device(cache_tags);
  const int64_t parts = row_offsets.numel(), slots = cache_tags.numel(), numbers = 2 * (2 * parts + 1);
  Tensor out = new_zeros(cache_tags, {parts, 2}, ScalarType::Long);
  if (parts == 0 || slots == 0) return out;
  const Tensor cuts = new_tensor(cache_tags, {2 * parts}, ScalarType::Long),
               in_piece = new_zeros(cache_tags, {numbers}, ScalarType::Long);
  const RangeArgs args{cache_tags.const_data_ptr<int64_t>(),
                       row_offsets.const_data_ptr<int64_t>(),
                       num_embeddings.const_data_ptr<int64_t>(),
                       cache_dirty.const_data_ptr<uint8_t>(),
                       slots,
                       parts,
                       cuts.mutable_data_ptr<int64_t>(),
                       static_cast<unsigned long long*>(in_piece.mutable_data_ptr()),
                       out.mutable_data_ptr<int64_t>()};
  constexpr int64_t kSharedBytes = 48 * 1024;  // of every GPU
  const int64_t bytes = numbers * int64_t{sizeof(int64_t)};
  const bool shares = bytes <= kSharedBytes;
  const dim3 block(kThreads);
  launch(sort_cuts_kernel, blocks_for(2 * parts, 1), block, 0, device.stream(), args);
  launch(count_pieces_kernel, blocks_for(slots, 1), block, shares ? bytes : 0, device.stream(), args, shares);
  launch(add_pieces_kernel, blocks_for(2 * parts, 1), block, 0, device.stream(), args);
  return out;
}

}  // namespace

CacheTensors read_cache(const CacheArguments& cache, const TableLayout& layout, const BagInput& in,
                        const Tensor& values, CacheUse use) {
  CacheTensors out{};
  if (!check_cache(cache, layout, values, use)) return out;
  out.num_parts = in.num_parts;
  out.sets = cache.sets->const_data_ptr<int64_t>();
  out.set_starts = cache.set_starts->const_data_ptr<int64_t>();
  out.tags = cache.tags->mutable_data_ptr<int64_t>();
  out.marks = optional_pointer<uint8_t>(cache.marks);
  out.ways = cache.ways;
  out.num_slots = cache.tags->numel();
  if (use == CacheUse::kFind) return out;
  out.offsets = cache.offsets->const_data_ptr<int64_t>();
  out.dirty = cache.dirty->mutable_data_ptr<uint8_t>();
  out.rows = cache.rows->mutable_data_ptr<float>();
  out.num_elements = cache.rows->numel();
  return out;
}

void check_places(const CacheTensors& cache, const BagInput& in, int64_t* status, cudaStream_t stream) {
  if (cache.ways == 0) return;
  launch(check_places_kernel, dim3(1), dim3(kThreads), 0, stream, cache, in.features, in.bags, status);
}

Tensor order_parts(CacheTensors* cache, const BagInput& in, const int64_t* status, cudaStream_t stream) {
  const int64_t parts = cache->num_parts;
  Tensor memory = new_tensor(in.values, {2 * parts + 1}, ScalarType::Long);
  auto* numbers = memory.mutable_data_ptr<int64_t>();
  cache->order = {numbers, numbers + parts, numbers + 2 * parts};
  if (parts > 0)
    launch(order_parts_kernel, blocks_for(parts, kWarpSize), dim3(kThreads), 0, stream, *cache, in.features, status);
  return memory;
}

void find_slots(const BagInput& in, const CacheTensors& cache, int64_t* slots, const MissingKeys& missing,
                int64_t* status, cudaStream_t stream) {
  if (in.bags.num_ids > 0)
    launch(no_slots_kernel, blocks_for(in.bags.num_ids, 1), dim3(kThreads), 0, stream, slots, in.bags.num_ids);
  if (in.bags.num_bags == 0) return;
  with_lanes(lanes_of_bags(in.bags), [&](auto group) {
    constexpr int G = decltype(group)::value;
    launch(find_slots_kernel<G>, blocks_for(in.bags.num_bags, G), dim3(kThreads), 0, stream,
           FindArgs{cache, in.features, in.bags, slots, missing, status});
  });
}

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) {
  implement<&lookup>(m, "row_cache_lookup");
  implement<&flush>(m, "row_cache_flush_");
  implement<&stats>(m, "row_cache_stats");
}

}  // namespace rec_kernels
