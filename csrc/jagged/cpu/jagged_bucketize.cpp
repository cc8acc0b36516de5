#include "jagged/jagged_bucketize.h"

#include <algorithm>
#include <tuple>

#include "core/boxing.h"
#include "core/cpu/scratch.h"
#include "core/division.h"
#include "jagged/cpu/jagged.h"

namespace rec_kernels {
namespace {

// Maps a feature's ids to buckets, and to rows within a bucket.
struct Block {
  Divisor rows;
  int64_t limit;  // ids are in [0, limit)
  bool narrow;

  int64_t bucket(int64_t id) const { return narrow ? rows.divide_narrow(static_cast<uint32_t>(id)) : rows.divide(id); }
};

std::vector<Block> blocks_of(const Tensor& block_sizes, int64_t buckets) {
  const Integers sizes(block_sizes);
  std::vector<Block> blocks;
  for (int64_t f = 0; f < block_sizes.size(0); ++f) {
    const int64_t rows = sizes[f], most = INT64_MAX / buckets;
    check_value(rows >= 1 && rows <= most, "block_sizes[", f, "] = ", rows, " must be in [1, ", most, "]");
    blocks.push_back({Divisor::of(rows), rows * buckets, rows * buckets <= INT32_MAX});
  }
  return blocks;
}

// Arguments of a call: bags, and the block size of each feature.
struct Input {
  Bags rows;
  const std::vector<int64_t>& starts;
  const std::vector<Block>& blocks;
  int64_t buckets;
  int64_t at_once;  // bags per batch

  // Calls body(block, first, last) for the bags [first, last) of each feature within [begin, end).
  template <class Body>
  void by_feature(int64_t begin, int64_t end, const Body& body) const {
    auto f = static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1);
    for (; begin < end; ++f) {
      const int64_t stop = std::min(end, starts[f + 1]);
      if (begin < stop) body(blocks[f], begin, stop);
      begin = stop;
    }
  }
};

// Maximum bags per batch, whose counts a worker keeps in a compact buffer: in the output, buckets are far apart. Fewer
// with so many buckets that the counts would exceed the cache.
constexpr int64_t kBagsAtOnce = 64, kCountsAtOnce = 1 << 15;

// Copies the starts of `count` bags from `first` on, and the end of the last one.
struct BagBounds {
  int64_t at[kBagsAtOnce + 1];

  BagBounds(const Bags& rows, int64_t first, int64_t count) {
    for (int64_t j = 0; j <= count; ++j) at[j] = rows.offset(first + j);
  }
};

// Computes the bucket of each id of bags [from, to). A bad id goes to bucket 0 and is recorded.
template <class Id>
void find_buckets(const Input& in, const Block& block, int64_t from, int64_t to, uint32_t* bucket_of, FirstBad* bad,
                  int64_t worker) {
  const auto* ids = static_cast<const Id*>(in.rows.ids);
  const int64_t begin = in.rows.offset(from), end = in.rows.offset(to);
  for (int64_t i = begin; i < end; ++i) {
    const bool good = static_cast<uint64_t>(int64_t{ids[i]}) < static_cast<uint64_t>(block.limit);
    if (!good) bad->note(worker, i);
    bucket_of[i] = good ? static_cast<uint32_t>(block.bucket(ids[i])) : 0;
  }
}

// Counts lengths[bucket * bags + bag], the ids of a bag in a bucket. Returns the position of the first bad id.
int64_t count_ids(const Input& in, int64_t workers, int64_t piece, uint32_t* bucket_of, int64_t* lengths) {
  const int64_t bags = in.rows.num_bags;
  FirstBad bad(workers);
  parallel_pieces(bags, piece, workers, [&](int64_t begin, int64_t end, int64_t worker) {
    const Scratch<int64_t> counts(in.buckets * in.at_once);
    in.by_feature(begin, end, [&](const Block& block, int64_t from, int64_t to) {
      if (in.rows.ids64) find_buckets<int64_t>(in, block, from, to, bucket_of, &bad, worker);
      else find_buckets<int32_t>(in, block, from, to, bucket_of, &bad, worker);
    });
    for (int64_t first = begin; first < end; first += in.at_once) {
      const int64_t here = std::min(in.at_once, end - first);
      const BagBounds bounds(in.rows, first, here);
      int64_t* count = counts.get();
      std::fill_n(count, in.buckets * in.at_once, int64_t{0});
      for (int64_t j = 0; j < here; ++j)
        for (int64_t i = bounds.at[j]; i < bounds.at[j + 1]; ++i) ++count[bucket_of[i] * in.at_once + j];
      for (int64_t k = 0; k < in.buckets; ++k) std::copy_n(count + k * in.at_once, here, lengths + k * bags + first);
    }
  });
  return bad.position();
}

[[noreturn]] void refuse_id(const Input& in, int64_t position) {
  int64_t bag = 0;
  while (in.rows.offset(bag + 1) <= position) ++bag;
  const auto f = std::upper_bound(in.starts.begin(), in.starts.end(), bag) - in.starts.begin() - 1;
  const int64_t limit = in.blocks[static_cast<size_t>(f)].limit;
  throw std::out_of_range(join("values[", position, "] = ", in.rows.id(position), " (feature ", f, ", bag ",
                               bag - in.starts[static_cast<size_t>(f)], ") must be in [0, ", limit, "): block_sizes[",
                               f, "] = ", limit / in.buckets, " for each of the ", in.buckets, " buckets"));
}

struct Bucketized {
  void* values;
  const float* weights;
  float* new_weights;
  int64_t* positions;
};

// Scatters the ids of bags [from, to) of a feature, at most `at_once` bags, to the output positions
// next[bucket * at_once + bag - from], which it advances.
template <class Id>
void place_ids(const Input& in, const Block& block, int64_t from, int64_t to, const uint32_t* bucket_of, int64_t* next,
               const Bucketized& out) {
  const auto* ids = static_cast<const Id*>(in.rows.ids);
  auto* values = static_cast<Id*>(out.values);
  const BagBounds bounds(in.rows, from, to - from);
  const Bucketized to_write = out;
  const int64_t rows = block.rows.value, stride = in.at_once;
  for (int64_t j = 0; j < to - from; ++j)
    for (int64_t i = bounds.at[j]; i < bounds.at[j + 1]; ++i) {
      const int64_t place = next[bucket_of[i] * stride + j]++;
      values[place] = static_cast<Id>(ids[i] - bucket_of[i] * rows);
      to_write.positions[i] = place;
      if (to_write.weights) to_write.new_weights[place] = to_write.weights[i];
    }
}

void place_bags(const Input& in, int64_t begin, int64_t end, const uint32_t* bucket_of, const int64_t* places,
                const Bucketized& out) {
  const int64_t bags = in.rows.num_bags;
  const Scratch<int64_t> next(in.buckets * in.at_once);
  in.by_feature(begin, end, [&](const Block& block, int64_t from, int64_t to) {
    for (; from < to; from += in.at_once) {
      const int64_t stop = std::min(to, from + in.at_once);
      for (int64_t k = 0; k < in.buckets; ++k)
        std::copy_n(places + k * bags + from, stop - from, next.get() + k * in.at_once);
      if (in.rows.ids64) place_ids<int64_t>(in, block, from, stop, bucket_of, next.get(), out);
      else place_ids<int32_t>(in, block, from, stop, bucket_of, next.get(), out);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> jagged_bucketize_cpu(const Tensor& values_in,
                                                                        const Tensor& offsets_in,
                                                                        const Tensor& block_sizes_in, int64_t buckets,
                                                                        const std::vector<int64_t>& strides,
                                                                        const OptionalTensor& weights_in) {
  const std::vector<int64_t> starts =
      check_jagged_bucketize(values_in, offsets_in, block_sizes_in, buckets, strides, weights_in);
  const Tensor values = as_contiguous(values_in), offsets = as_contiguous(offsets_in);
  const OptionalTensor weights = as_contiguous(weights_in);
  const Bags rows = jagged_rows(values, offsets);
  check_cover(rows);
  const std::vector<Block> blocks = blocks_of(as_contiguous(block_sizes_in), buckets);
  const Input in{rows, starts, blocks, buckets, std::clamp(kCountsAtOnce / buckets, int64_t{1}, kBagsAtOnce)};
  const int64_t bags = rows.num_bags, count = rows.num_ids, cost = 4 * count + buckets * bags;
  const int64_t workers = workers_for(cost, kFewItems), piece = 1 + bags / pieces_for(cost, kFewItems, workers);
  const Scratch<int64_t> places(buckets * bags);
  const Scratch<uint32_t> bucket_of(count);
  const int64_t bad = count_ids(in, workers, piece, bucket_of.get(), places.get());
  if (bad != kNoBadPosition) refuse_id(in, bad);
  Tensor new_offsets = new_tensor(offsets, {buckets * bags + 1}, offsets.scalar_type());
  with_integers(new_offsets, [&](auto* offset) {
    using Offset = std::remove_pointer_t<decltype(offset)>;
    int64_t* place = places.get();
    running_sums(
        buckets * bags, [place](int64_t i) { return place[i]; },
        [place, offset](int64_t i, int64_t before) { place[i] = before, offset[i] = static_cast<Offset>(before); });
    offset[buckets * bags] = static_cast<Offset>(count);
  });
  Tensor out = new_tensor(values, {count}, values.scalar_type());
  Tensor new_weights = new_tensor(values, {weights ? count : 0}, ScalarType::Float);
  Tensor positions = new_tensor(values, {count}, ScalarType::Long);
  const Bucketized output{out.mutable_data_ptr(), weights ? weights->const_data_ptr<float>() : nullptr,
                          new_weights.mutable_data_ptr<float>(), positions.mutable_data_ptr<int64_t>()};
  parallel_pieces(bags, piece, workers, [&](int64_t begin, int64_t end, int64_t) {
    place_bags(in, begin, end, bucket_of.get(), places.get(), output);
  });
  return {out, new_offsets, new_weights, positions, good_status(offsets)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { implement<&jagged_bucketize_cpu>(m, "jagged_bucketize"); }

}  // namespace rec_kernels
