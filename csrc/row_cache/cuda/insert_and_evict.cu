// row_cache_insert_ on the GPU (docs/numerics.md, "Row cache"). Ids whose rows are not cached are sorted by set and
// row; a warp chooses the slots of a set; then evicted rows are encoded and inserted rows decoded. No synchronization.
#include <vector>

#include "core/bits.h"
#include "core/boxing.h"
#include "core/cuda/device_algorithms.h"
#include "row_cache/cuda/row_cache.cuh"

namespace rec_kernels {
namespace {

// Moves of a batch, per sorted id: the slot to insert its row into, if it is the row's first id, and the dirty row to
// evict from it; else -1.
struct Moves {
  int64_t *slots, *evicted;
};

struct InsertArgs {
  CacheTensors cache;
  Parts parts;
  Bags bags;
  int64_t *stamps, *clock;
  uint8_t *counts, *row_counts;  // null for policy "lru"
  int64_t* stats;                // or null
  int64_t num_tables;            // rows of stats
  const int64_t* seed;           // null: 0
  int64_t* slots;                // per id
  const uint64_t* keys;          // sorted: set << row_bits | row
  const uint32_t* positions;     // position of each sorted id
  int64_t count;
  uint64_t left_out;  // key of ids without a row to insert, greater than all others
  int row_bits;
  Moves moves;
  const int64_t* status;
  bool raise;

  // Nothing is changed for bad offsets, a bad layout or, if `raise`, a bad id.
  __device__ __forceinline__ bool skip() const { return *status != kNoBadPosition && (raise || *status < 0); }
  __device__ __forceinline__ int64_t set_of(int64_t i) const { return static_cast<int64_t>(keys[i] >> row_bits); }
  __device__ __forceinline__ int64_t row_of(int64_t i) const {
    return static_cast<int64_t>(keys[i] & ((uint64_t{1} << row_bits) - 1));
  }
  __device__ __forceinline__ bool is_first(int64_t i, int64_t begin) const {
    return i == begin || keys[i] != keys[i - 1];
  }
  __device__ __forceinline__ uint8_t raised(uint8_t count_before, int64_t row) const {
    return raised_count(count_before, row, salt_of(seed ? *seed : 0, *clock));
  }
  __device__ __forceinline__ void count_part(int64_t part, CacheStat stat, int64_t n = 1) const {
    if (!stats || n == 0) return;
    const int64_t table = parts.records[part].table_id;
    if (table < num_tables) add_count(stats + table * kCacheStats + stat, n);
  }
  __device__ __forceinline__ void count_row(int64_t row, CacheStat stat) const {
    count_part(part_of_row(cache, parts, row), stat);
  }
};

__global__ void advance_clock_kernel(InsertArgs a) {
  if (!a.skip()) ++*a.clock;
}

// Sixteen counts, which halve_kernel replaces together by table lookup.
struct alignas(16) Counts {
  uint8_t of[16];
};
__global__ void __launch_bounds__(kThreads) halve_kernel(InsertArgs a, uint8_t* counts, int64_t count, int64_t every) {
  if (a.skip() || *a.clock % every != 0) return;
  auto* halved = shared_memory<uint8_t>();
  for (int c = threadIdx.x; c < 256; c += kThreads) halved[c] = halved_count(static_cast<uint8_t>(c));
  __syncthreads();
  const int64_t words = reinterpret_cast<uintptr_t>(counts) % sizeof(Counts) ? 0 : count / int64_t{sizeof(Counts)};
  for (int64_t i = Group<1>::first(); i < words; i += Group<1>::stride()) {
    Counts word = reinterpret_cast<Counts*>(counts)[i];
#pragma unroll
    for (uint8_t& c : word.of) c = halved[c];
    reinterpret_cast<Counts*>(counts)[i] = word;
  }
  for (int64_t i = words * int64_t{sizeof(Counts)} + Group<1>::first(); i < count; i += Group<1>::stride())
    counts[i] = halved[counts[i]];
}

__global__ void __launch_bounds__(kThreads) start_entries_kernel(InsertArgs a, uint64_t* keys, uint32_t* positions) {
  for (int64_t i = Group<1>::first(); i < a.count; i += Group<1>::stride()) {
    keys[i] = a.left_out;
    positions[i] = static_cast<uint32_t>(i);
    a.slots[i] = a.moves.slots[i] = a.moves.evicted[i] = -1;
  }
}

// A group of lanes takes a bag and records the use of cached rows. The warp counts statistics over the bags of a
// feature.
template <int G>
__global__ void __launch_bounds__(kThreads) touch_kernel(InsertArgs a) {
  if (a.skip()) return;
  const Group<G> group;
  const auto now = static_cast<unsigned long long>(*a.clock);
  for_features_of_warp(a.bags, [&](int64_t feature, int64_t first, int64_t last) {
    const int64_t part = a.bags.first_part(feature);
    if (a.parts.records[part].cache_sets == 0 || a.bags.first_part(feature + 1) - part != 1) return;
    const Part f = a.parts[part];
    int64_t lookups = 0, hits = 0;
    for (int64_t bag = first + group.in_warp(); bag < last; bag += kWarpSize / G) {
      const int64_t stop = a.bags.offset(bag + 1);
      for (int64_t i = a.bags.offset(bag) + group.lane; i < stop; i += G) {
        const int64_t id = a.bags.id(i), slot = a.slots[i];
        lookups += a.bags.counts(id, f, a.bags.padding_idx);
        if (slot < 0) continue;
        ++hits;
        auto* stamp = reinterpret_cast<unsigned long long*>(a.stamps + slot);
        // Only the first id of a row raises its count.
        if (*stamp != now && atomicExch(stamp, now) != now && a.counts)
          a.counts[slot] = a.raised(a.counts[slot], a.cache.tags[slot]);
      }
    }
    if (!a.stats) return;
    const Group<kWarpSize> warp;
    lookups = warp.sum(lookups);
    hits = warp.sum(hits);
    if (warp.lane > 0) return;
    a.count_part(part, kLookups, lookups);
    a.count_part(part, kHits, hits);
  });
}

// A candidate slot. Order of preference: empty, fewest uses, oldest use, lowest way.
struct Choice {
  uint64_t uses;  // 0: empty; UINT64_MAX: no slot; else count + 1
  int64_t stamp, slot;
};

__device__ Choice better(const Choice& a, const Choice& b) {
  if (a.uses != b.uses) return a.uses < b.uses ? a : b;
  if (a.stamp != b.stamp) return a.stamp < b.stamp ? a : b;
  return a.slot < b.slot ? a : b;
}

// The best slot among a lane's ways of a set.
__device__ Choice choice_of_lane(const InsertArgs& a, int64_t set, int lane) {
  const int64_t first = set * a.cache.ways;
  Choice best{UINT64_MAX, 0, INT64_MAX};
  for (int64_t slot = first + lane; slot < first + a.cache.ways; slot += kWarpSize) {
    const int64_t tag = a.cache.tags[slot];
    if (tag < 0) best = better(best, {0, 0, slot});
    else if (a.stamps[slot] != *a.clock && part_at(a.cache, a.parts, slot, tag) >= 0)
      best = better(best, {a.counts ? uint64_t{a.counts[slot]} + 1 : 1, a.stamps[slot], slot});
  }
  return best;
}

// The best of all lanes' choices for a row with this use count, or -1 if the row gets no slot.
__device__ int64_t slot_for(const InsertArgs& a, Choice best, uint8_t uses) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
    best =
        better(best, {__shfl_xor_sync(kFullWarp, best.uses, distance), __shfl_xor_sync(kFullWarp, best.stamp, distance),
                      __shfl_xor_sync(kFullWarp, best.slot, distance)});
  const bool refused = a.counts && best.uses > 0 && uint64_t{uses} + 1 <= best.uses;
  return best.uses == UINT64_MAX || refused ? -1 : best.slot;
}

// Assigns a slot to the row of entry i with this use count. Called by one lane.
__device__ void take_slot(const InsertArgs& a, int64_t i, int64_t slot, uint8_t uses) {
  const int64_t row = a.row_of(i), before = a.cache.tags[slot];
  if (before >= 0) {
    if (a.counts) a.row_counts[before] = a.counts[slot];
    const int64_t part = part_of_row(a.cache, a.parts, before);
    a.count_part(part, kEvicted);
    if (a.cache.dirty[slot]) {
      a.count_part(part, kWritten);
      a.moves.evicted[i] = before;
    }
  }
  a.moves.slots[i] = slot;
  a.cache.tags[slot] = row;
  a.cache.marks[slot] = mark_of(row);
  a.stamps[slot] = *a.clock;
  a.cache.dirty[slot] = 0;
  if (a.counts) a.counts[slot] = uses;
  a.count_row(row, kInserted);
}

// The first entry at or after `begin` with a key of at least `key`.
__device__ int64_t end_of_set(const InsertArgs& a, int64_t begin, uint64_t key) {
  return first_behind(begin, a.count, [&](int64_t i) { return a.keys[i] >= key; });
}

// Sort key of the row of entry i in the insertion order of its set, most used first; the low half is i - begin. kNoTurn
// for an entry that is not the first of its row. `raises`: also raise the row's count.
constexpr uint64_t kNoTurn = UINT64_MAX;
__device__ uint64_t turn_of(const InsertArgs& a, int64_t i, int64_t begin, bool raises) {
  if (!a.is_first(i, begin)) return kNoTurn;
  uint8_t uses = 0;
  if (a.counts) {
    uint8_t& count = a.row_counts[a.row_of(i)];
    if (raises) count = a.raised(count, a.row_of(i));
    uses = count;
  }
  return uint64_t{255u - uses} << 32 | static_cast<uint64_t>(i - begin);
}

// Bitonic sort of the lanes' values. first_size = kWarpSize performs only the final merge, for values that already form
// a bitonic sequence.
__device__ uint64_t sorted(uint64_t x, int lane, int first_size = 2) {
  for (int size = first_size; size <= kWarpSize; size *= 2)
    for (int distance = size / 2; distance > 0; distance /= 2) {
      const uint64_t other = __shfl_xor_sync(kFullWarp, x, distance);
      const bool wants_lower = ((lane & distance) == 0) == ((lane & size) == 0);
      if (wants_lower == (other < x)) x = other;
    }
  return x;
}

// Returns the lane-th smallest turn of at least `next` in the set of entries [begin, end).
__device__ uint64_t turns_from(const InsertArgs& a, int64_t begin, int64_t end, uint64_t next, bool raises, int lane) {
  uint64_t turns = kNoTurn;
  for (int64_t first = begin; first < end; first += kWarpSize) {
    // A lane always reads the same entries, and thus the counts that it has raised itself.
    const int64_t i = first + lane;
    uint64_t turn = i < end ? turn_of(a, i, begin, raises) : kNoTurn;
    if (turn < next) turn = kNoTurn;
    if (!__any_sync(kFullWarp, turn < __shfl_sync(kFullWarp, turns, kWarpSize - 1))) continue;
    // Keep the lower half of both sequences.
    turn = __shfl_xor_sync(kFullWarp, sorted(turn, lane), kWarpSize - 1);
    turns = sorted(turn < turns ? turn : turns, lane, kWarpSize);
  }
  return turns;
}

// Inserts the rows of a set, entries [begin, end), with one warp. Reads the set's slots once, and its entries once per
// kWarpSize inserted rows. At most `ways` rows are inserted.
__device__ void serve_set(const InsertArgs& a, int64_t begin, int64_t end, int lane) {
  const int64_t set = a.set_of(begin);
  Choice choice = choice_of_lane(a, set, lane);
  uint64_t next = 0;
  for (bool refused = false; !refused;) {
    const uint64_t turns = turns_from(a, begin, end, next, next == 0, lane);
    for (int k = 0; k < kWarpSize; ++k) {
      const uint64_t turn = __shfl_sync(kFullWarp, turns, k);
      if (turn == kNoTurn) return;
      next = turn;
      const int64_t i = begin + static_cast<int64_t>(turn & 0xffffffffu);
      const auto uses = static_cast<uint8_t>(255 - (turn >> 32));
      const int64_t slot = slot_for(a, choice, uses);
      refused = slot < 0;
      if (refused) break;
      if (lane == (slot - set * a.cache.ways) % kWarpSize) {
        take_slot(a, i, slot, uses);
        choice = choice_of_lane(a, set, lane);
      }
      for (int64_t j = i + lane; j < end && a.keys[j] == a.keys[i]; j += kWarpSize) a.slots[a.positions[j]] = slot;
      ++next;
    }
  }
  // This row and all later ones get no slot.
  for (int64_t i = begin + lane; i < end; i += kWarpSize) {
    const uint64_t turn = turn_of(a, i, begin, false);
    if (turn != kNoTurn && turn >= next) a.count_row(a.row_of(i), kLeftOut);
  }
}

// A warp takes an entry and serves its set if it is the set's first entry. Left-out entries are last. A block counts in
// shared memory if the statistics fit, then adds them to the global ones, which avoids contention.
__global__ void __launch_bounds__(kThreads) serve_kernel(InsertArgs a, bool shares) {
  const int64_t first = int64_t{blockIdx.x} * (kThreads / kWarpSize);  // first entry of the block
  if (a.skip() || first >= a.count || a.keys[first] == a.left_out) return;
  const Group<kWarpSize> warp;
  int64_t* all = a.stats;
  const int64_t numbers = shares ? a.num_tables * kCacheStats : 0;
  if (shares) a.stats = shared_memory<int64_t>();
  for (int64_t i = threadIdx.x; i < numbers; i += kThreads) a.stats[i] = 0;
  __syncthreads();
  for (int64_t i = Group<kWarpSize>::first(); i < a.count; i += Group<kWarpSize>::stride()) {
    if (a.keys[i] == a.left_out) break;
    if (i > 0 && a.set_of(i) == a.set_of(i - 1)) continue;
    const uint64_t next_set = static_cast<uint64_t>(a.set_of(i) + 1) << a.row_bits;
    serve_set(a, i, end_of_set(a, i, next_set), warp.lane);
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < numbers; i += kThreads)
    if (a.stats[i] > 0) add_count(all + i, a.stats[i]);
}

// A group of lanes encodes an evicted row.
template <class Format, int G>
__global__ void __launch_bounds__(kThreads) evict_kernel(InsertArgs a, Eviction eviction, int format) {
  if (*a.status == kBadLayout) return;
  const Group<G> group;
  for (int64_t i = Group<G>::first(); i < a.count; i += Group<G>::stride()) {
    if (a.keys[i] == a.left_out) return;
    if (a.moves.evicted[i] < 0) continue;
    const int64_t part = part_of_row(a.cache, a.parts, a.moves.evicted[i]);
    if (!a.parts.has_format(part, format)) continue;
    encode_slot<Format>(eviction, a.cache, a.parts, part, a.moves.evicted[i], a.moves.slots[i], group);
  }
}

// A group of lanes decodes an inserted row.
template <class Format, int G>
__global__ void __launch_bounds__(kThreads) decode_kernel(InsertArgs a, const uint8_t* weights, int format) {
  if (*a.status == kBadLayout) return;
  const Group<G> group;
  for (int64_t i = Group<G>::first(); i < a.count; i += Group<G>::stride()) {
    if (a.keys[i] == a.left_out) return;
    if (a.moves.slots[i] < 0) continue;
    const int64_t part = part_of_row(a.cache, a.parts, a.row_of(i));
    if (!a.parts.has_format(part, format)) continue;
    const Part f = a.parts[part];
    const int64_t D = f.embedding_dim;
    const uint8_t* table = weights + f.weight_offset;
    const ColumnReader<Format> reader(table + (a.row_of(i) - f.row_offset) * Format::row_bytes(D), D,
                                      columns_aligned<Format>(table, D));
    float* to = a.cache.rows + (a.parts.records[part].cache_row_offset + a.moves.slots[i] * D);
    for (int64_t c = 4 * group.lane; c < D; c += 4 * G) store_columns(to, c, D, rows_aligned(to, D), reader.read(c));
  }
}

void move_rows(const BagInput& in, const InsertArgs& a, const Eviction& eviction, cudaStream_t stream) {
  const auto every_format = [&](const auto& body) {
    for (int i = 0; i < in.parts.num_formats; ++i)
      with_bag_format(in.parts.formats[i],
                      [&](auto format) { with_row_lanes(in.max_dim, [&](auto lanes) { body(i, format, lanes); }); });
  };
  every_format([&](int i, auto format, auto lanes) {
    launch_for(a.count, lanes, stream, evict_kernel<decltype(format), lanes>, a, eviction, i);
  });
  every_format([&](int i, auto format, auto lanes) {
    launch_for(a.count, lanes, stream, decode_kernel<decltype(format), lanes>, a, eviction.weights, i);
  });
}

void insert_all(const BagInput& in, const InsertionPolicy& policy, InsertArgs a, const Eviction& eviction,
                const Tensor& status, const Tensor& like, cudaStream_t stream) {
  const int64_t N = in.bags.num_ids;
  check_value(N < INT64_C(0xffffffff), "values has ", N, " ids; at most 2^32 - 2 fit in a call on a GPU");
  a.row_bits = bit_width(static_cast<uint64_t>(in.num_rows));
  const int64_t sets = a.cache.num_slots / a.cache.ways;
  const int bits = a.row_bits + bit_width(static_cast<uint64_t>(sets));
  check_value(bits <= 64, "too many rows (", in.num_rows, ") and sets (", sets,
              ") for one call: their numbers must fit in 64 bits together");
  a.left_out = static_cast<uint64_t>(sets) << a.row_bits;
  // Scratch memory: keys and positions, unsorted and sorted, and moves.
  const Tensor memory = new_tensor(like, {40 * N}, ScalarType::Byte);
  auto* keys = static_cast<uint64_t*>(memory.mutable_data_ptr());
  uint64_t* sorted = keys + N;
  a.moves.slots = reinterpret_cast<int64_t*>(sorted + N);
  a.moves.evicted = a.moves.slots + N;
  auto* positions = reinterpret_cast<uint32_t*>(a.moves.evicted + N);
  uint32_t* by_set = positions + N;
  const dim3 block(kThreads);
  a.count = N;
  if (N > 0) launch_for(N, 1, stream, start_entries_kernel, a, keys, positions);
  find_slots(in, a.cache, a.slots, {keys, a.row_bits}, status.mutable_data_ptr<int64_t>(), stream);
  const bool has_ids = N > 0 && in.bags.num_bags > 0;
  if (has_ids) sort_pairs(keys, sorted, positions, by_set, N, bits, like, stream);
  // Nothing is allocated after this point, where the cache changes.
  launch_one(stream, advance_clock_kernel, a);
  for (const OptionalTensor* counts : {&policy.counts, &policy.row_counts})
    if (policy.lfu() && policy.decay_every > 0 && (*counts)->numel() > 0)
      launch(halve_kernel, blocks_for(ceil_div((*counts)->numel(), sizeof(Counts)), 1), block, 256, stream, a,
             optional_pointer<uint8_t>(*counts), (*counts)->numel(), policy.decay_every);
  if (!has_ids) return;
  with_lanes(lanes_of_bags(in.bags),
             [&](auto group) { launch_for(in.bags.num_bags, group, stream, touch_kernel<group>, a); });
  a.keys = sorted;
  a.positions = by_set;
  const int64_t bytes = (a.stats ? a.num_tables : 0) * kCacheStats * int64_t{sizeof(int64_t)};
  const bool shares = bytes > 0 && bytes <= kSharedBytes;
  launch(serve_kernel, blocks_for(N, kWarpSize), block, shares ? bytes : 0, stream, a, shares);
  move_rows(in, a, eviction, stream);
}

Tensor insert(const Tensor& weights, const Tensor& cache_rows, const Tensor& cache_tags, const Tensor& cache_marks,
              const Tensor& cache_dirty, const Tensor& cache_stamps, const Tensor& cache_clock, const CacheBags& bags,
              const std::string& rounding, const OptionalTensor& seed, const InsertionPolicy& policy) {
  const Tensor& values = bags.values;
  const Layout layout = read_layout(bags.layout, bags.layout_sizes, values);
  check_weights(weights, values, layout);
  const OnDeviceOf device(values);
  const cudaStream_t stream = device.stream();
  const CacheArguments arguments{&cache_rows, &cache_tags, &cache_marks, &cache_dirty};
  CacheTensors cache = read_cache(arguments, layout, values);
  const BagInput in = read_bags(bags.without_weights(), layout, stream);
  check_history(cache_clock, cache_stamps, policy, cache.num_slots, values);
  check_row_counts(policy, in.num_rows);
  const UpdateRounding how = read_rounding(values, rounding, seed);
  Tensor slots = new_tensor(values, {in.bags.num_ids}, ScalarType::Long);
  Tensor status = new_status(in, limits_of(in.bags.num_parts, weights, arguments), values, stream);
  const Tensor order = order_parts(&cache, in, status.const_data_ptr<int64_t>(), stream);
  InsertArgs a{};
  a.cache = cache;
  a.parts = in.parts;
  a.bags = in.bags;
  a.stamps = cache_stamps.mutable_data_ptr<int64_t>();
  a.clock = cache_clock.mutable_data_ptr<int64_t>();
  a.counts = optional_pointer<uint8_t>(policy.counts);
  a.row_counts = optional_pointer<uint8_t>(policy.row_counts);
  a.stats = optional_pointer<int64_t>(policy.stats);
  a.num_tables = policy.stats ? policy.stats->size(0) : 0;
  a.seed = how.seed;
  a.slots = slots.mutable_data_ptr<int64_t>();
  a.status = status.const_data_ptr<int64_t>();
  a.raise = in.raises;
  const Eviction eviction{on_gpu(weights, values), how.seed, a.clock, how.stochastic};
  insert_all(in, policy, a, eviction, status, values, stream);
  return slots;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) { implement<&insert>(m, "row_cache_insert_.layout"); }

}  // namespace rec_kernels
