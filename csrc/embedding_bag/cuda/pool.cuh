// Building blocks of the lookup kernels: the sum of a bag with several rows in flight, output stores, and the gradient
// of per_sample_weights.
#pragma once

#include "core/cuda/warp_dot.cuh"
#include "embedding_bag/cuda/input.cuh"
#include "rows/cuda/writer.cuh"

namespace rec_kernels {
inline namespace RK_ISA {

// Minimum rows in flight per group. Four rows of up to 128 columns take up to 85 registers, so a multiprocessor holds
// 768 threads with 768 x 4 x 16 bytes of floats in flight. Eight float rows would cost a third of these threads; some
// formats use eight (pool_table.cu).
constexpr int kFewInFlight = 4;
// Two rows of the widest kernels have at least as many bytes as four of the others.
template <int kBlocks>
constexpr int kRowsInFlight = kBlocks == kMaxBlocks ? 2 : kFewInFlight;

// A bag and its feature. A call has fewer than 2^32 bags, and memory cannot hold the records of 2^32 features.
struct BagOfFeature {
  uint32_t number, feature;

  __device__ __forceinline__ BagOfFeature(int64_t bag, int64_t feature)
      : number(static_cast<uint32_t>(bag)), feature(static_cast<uint32_t>(feature)) {}
};

// Stores columns c .. c+3 of D to the output row that starts at `row`.
__device__ __forceinline__ void store_output(const PoolArgs& a, uint8_t* row, int64_t c, int64_t D, const Vec4& x) {
  if (a.output_format != RowFormat::kFp32) return store_halves(row, c, D, a.output_format == RowFormat::kFp16, x);
  auto* out = reinterpret_cast<float*>(row);
  store_columns(out, c, D, rows_aligned(out, D), x);
}

// Fills the whole output with NaN, with all threads of the grid.
__device__ __forceinline__ void store_nans(const PoolArgs& a) {
  const int64_t size = a.bags.output_rows() * a.output_dim;
  const Vec4 nan = {{__builtin_nanf("")}};
  for (int64_t i = Group<1>::first(); i < size; i += Group<1>::stride())
    store_output(a, a.output + i * a.output_bytes(), 0, 1, nan);
}

// Stores the sums of a bag with `counted` contributing ids to the output row at `out`: block k has four columns
// starting at first + k * kStep.
template <int kStep, int kBlocks>
__device__ __forceinline__ void store_sums(const PoolArgs& a, const Part& f, int64_t counted, uint8_t* out,
                                           int64_t first, Vec4 (&sum)[kBlocks]) {
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    if (f.mean && counted > 1)
      for (int j = 0; j < 4; ++j) sum[k].v[j] = sum[k].v[j] / static_cast<float>(counted);
    store_output(a, out, first + k * kStep, f.embedding_dim, sum[k]);
  }
}

// Lanes have consecutive positions, i in this lane. One lane counts the bad ones of the group and records the first.
template <int G>
__device__ __forceinline__ void note_bad_ids(int64_t* status, const Group<G>& group, int64_t i, bool bad) {
  const unsigned found = group.ballot(bad);
  if (found == 0 || lowest_bit(found) != group.lane) return;
  note_bad(status, i);
  add_count(status + 1, count_bits(found));
}

// Ids [begin, begin + G) of a bag, one per lane: the place of its row, and its factor. An id that does not contribute
// gets the row of another id of the bag, or, for groups in step and a bag without any, the row of another group, with
// that group's `columns`, so that loads need no condition.
template <class Source, int G>
struct IdsOfLanes {
  typename Source::Place place{};
  float factor = 1.0f;
  unsigned counting;  // bit mask of lanes whose id contributes
  bool any;           // some id of all groups in step contributes
  uint32_t columns;

  __device__ __forceinline__ IdsOfLanes(const PoolArgs& a, const Source& source, const Part& f, const Group<G>& group,
                                        int64_t begin, int64_t stop, bool report)
      : columns(static_cast<uint32_t>(f.embedding_dim)) {
    const int64_t i = begin + group.lane;
    bool counts = false, bad = false;
    if (i < stop) {
      const int64_t id = a.bags.id(i);
      bad = !a.bags.in_range(id, f);
      counts = !bad && id != a.bags.padding_idx;
      if (counts) place = source.find(id, i);
      if (counts && a.bags.per_sample_weights) factor = a.bags.per_sample_weights[i];
    }
    if (group.in_step || report) note_bad_ids(a.status, group, i, bad && report);
    const unsigned all = __ballot_sync(group.mask, counts);
    counting = group.bits_of(all);
    any = all != 0;
    if (!any) return;
    const int lane = lowest_bit(counting ? all & group.lanes() : all);
    const typename Source::Place another = source.place_of_lane(group, place, lane);
    if (group.in_step) columns = group.template broadcast<kWarpSize>(columns, lane);
    if (!counts) place = another;
  }
};

// Adds rows [next, next + kRows) of the lanes' ids to the sums, and calls after(u) after adding row next + u. A row
// that does not contribute is skipped by predicating only the additions: around loads, nvcc would move them behind the
// branch.
template <int kRows, bool kWeighted, class Source, int G, int kBlocks, class After>
__device__ __forceinline__ void add_rows(const Source& source, const Group<G>& group, const IdsOfLanes<Source, G>& mine,
                                         int next, int64_t first, Vec4 (&sum)[kBlocks], const After& after) {
  typename Source::Row row[kRows];
  typename Source::Passed place[kRows];
  float factor[kRows];
  // Lanes past the last id also have a row, and next + u is always less than G.
  const auto pass_place = [&](int u) { place[u] = source.pass(group, mine.place, next + u); };
  const auto pass_factor = [&](int u) { factor[u] = kWeighted ? group.broadcast(mine.factor, next + u) : 1.0f; };
  if constexpr (Source::kPassFirst) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      pass_place(u);
      pass_factor(u);
    }
  }
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if constexpr (!Source::kPassFirst) pass_place(u);
    row[u].load(source, place[u], first, mine.columns);
  }
  const unsigned counting = mine.counting >> next;
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if constexpr (!Source::kPassFirst) pass_factor(u);
    const bool counts = counting & 1u << u;
    Vec4 x[kBlocks];
    row[u].decode(source, place[u], first, mine.columns, x);
#pragma unroll
    for (int k = 0; k < kBlocks; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (counts)
          sum[k].v[j] = kWeighted ? fused_multiply_add(factor[u], x[k].v[j], sum[k].v[j]) : sum[k].v[j] + x[k].v[j];
    after(u);
  }
}

// Pools columns [column, column + kBlocks * 4 * G) of one bag. `report`: record bad ids, once per bag. `there` is false
// for a group in step without a bag, which has no ids and stores nothing. Source provides rows: find() returns the
// place of an id's row, pass() the place found by another lane of the group, place_of_lane() that of any lane in step;
// Row holds a lane's columns of a row, where load() issues the loads and decode() waits for them. kPassFirst: shuffle
// the places and factors of all rows in flight before the first load. A shuffle between loads shares one of a warp's
// six scoreboards with them and would wait for them. kEights: a lane's two blocks of four columns are adjacent. The
// output address is computed at the end, which saves two or more registers while rows are read.
template <class Source, int G, int kBlocks, int kInFlight, bool kWeighted>
__device__ __forceinline__ void pool_columns(const PoolArgs& a, const Source& source, const Part& f,
                                             const Group<G>& group, Range ids, BagOfFeature bag, int64_t column,
                                             bool report, bool there) {
  // A round of eight rows shrinks to four if no more are left, so that short bags issue few redundant loads.
  constexpr int kRows = kInFlight < G ? kInFlight : G, kLast = kRows > 4 ? kRows / 2 : kRows;
  const int64_t first = column + (Source::kEights ? 8 : 4) * group.lane;
  const auto no_op = [](int) {};
  Vec4 sum[kBlocks] = {};
  int64_t counted = 0;
  for (int64_t begin = ids.start; group.any_group(begin < ids.stop); begin += G) {
    const IdsOfLanes<Source, G> mine(a, source, f, group, begin, ids.stop, report);
    if (!mine.any) continue;
    counted += count_bits(mine.counting);
    const int64_t left = ids.stop - begin;
    const int here = static_cast<int>(group.most_of_groups(static_cast<uint32_t>(left < 0 ? 0 : left < G ? left : G)));
    int next = 0;
#pragma unroll 1
    for (; next < here - (kRows - kLast); next += kRows)
      add_rows<kRows, kWeighted>(source, group, mine, next, first, sum, no_op);
    if (kLast < kRows && next < here) add_rows<kLast, kWeighted>(source, group, mine, next, first, sum, no_op);
  }
  constexpr int kStep = Source::kEights ? 4 : 4 * G;
  if (!there) return;
  store_sums<kStep>(a, f, counted, a.output_of(bag.number, bag.feature, f.output_offset), first, sum);
}

// Stores zeros to columns [used, output_dim) of a bag's output row, if every bag has a row of its own.
template <int G>
__device__ __forceinline__ void store_zeros_behind(const PoolArgs& a, int64_t bag, int64_t used,
                                                   const Group<G>& group) {
  if (!a.bags.own_rows) return;
  uint8_t* row = a.output + bag * a.output_dim * a.output_bytes();
  for (int64_t c = used + group.lane; c < a.output_dim; c += G)
    store_output(a, row + c * a.output_bytes(), 0, 1, Vec4{});
}

// Dot products of g, the gradient of a bag, and the rows of ids [begin, begin + G), with kRows rows in flight. Each
// lane gets the result of its id, summed in the order of warp_row_dot(); 0 if the id does not contribute. kWide: rows
// may have more columns than a group holds at once.
template <int kRows, int kBlocks, bool kWide, class Source, int G>
__device__ __forceinline__ float dot_of_lane(const PoolArgs& a, const Source& source, const Part& f,
                                             const Group<G>& group, int64_t begin, int64_t stop, const float* g) {
  const IdsOfLanes<Source, G> mine(a, source, f, group, begin, stop, false);
  if (mine.counting == 0) return 0.0f;
  const int64_t D = f.embedding_dim;
  const bool aligned = rows_aligned(g, D);
  const int here = static_cast<int>(stop - begin < G ? stop - begin : G);
  float dot = 0.0f;
#pragma unroll 1
  for (int next = 0; next < here; next += kRows) {
    float s[kRows][4] = {};
#pragma unroll 1
    for (int64_t column = 0; column < (kWide ? D : 1); column += kBlocks * 4 * G) {
      const int64_t first = column + 4 * group.lane;
      const int left = columns_left<G, kBlocks>(first, D);
      typename Source::Row row[kRows];
      typename Source::Passed place[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) place[u] = source.pass(group, mine.place, next + u);
#pragma unroll
      for (int u = 0; u < kRows; ++u) row[u].load(source, place[u], first, mine.columns);
      Vec4 y[kBlocks];
      load_row(g, column, D, aligned, group, y);
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        Vec4 x[kBlocks];
        row[u].decode(source, place[u], first, mine.columns, x);
#pragma unroll
        for (int k = 0; k < kBlocks; ++k)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (k * 4 * G + j < left) s[u][j] = fused_multiply_add(y[k].v[j], x[k].v[j], s[u][j]);
      }
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const float sum = sum_partials(s[u], group);
      if (group.lane == next + u) dot = sum;
    }
  }
  return mine.counting >> group.lane & 1u ? dot : 0.0f;
}

// Writes out[i] for the ids of a bag: dot(begin) on the lane of ids[i], times 1 / n for mean pooling.
template <int G, class Dot>
__device__ __forceinline__ void write_dots(const PoolArgs& a, const Part& f, const Group<G>& group, Range ids,
                                           float* out, const Dot& dot) {
  const float each = f.mean ? mean_factor(a.bags, f, group, ids) : 1.0f;
  for (int64_t begin = ids.start; begin < ids.stop; begin += G) {
    const float own = dot(begin);
    if (begin + group.lane < ids.stop) out[begin + group.lane] = own * each;
  }
}

}  // namespace RK_ISA
}  // namespace rec_kernels
