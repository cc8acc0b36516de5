// jagged_dedup on the CPU. Each sample is first compared with the previous one: in a batch clustered by session most
// are equal, and only the first sample of each run is hashed.
#include "jagged/jagged_dedup.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "core/bits.h"
#include "core/boxing.h"
#include "core/cpu/scratch.h"
#include "jagged/cpu/jagged.h"

namespace rec_kernels {
namespace {

// Odd multiplier with well distributed bits: 2^64 / golden ratio.
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

// Four independent chains, to hide the latency of multiplications.
template <class Word>
uint64_t hash_words(const Word* words, int64_t count, uint64_t h) {
  uint64_t chain[4] = {h, h + kGolden, h + 2 * kGolden, h + 3 * kGolden};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4)
    for (int j = 0; j < 4; ++j) chain[j] = (chain[j] ^ static_cast<uint64_t>(words[i + j])) * kGolden;
  for (; i < count; ++i) chain[0] = (chain[0] ^ static_cast<uint64_t>(words[i])) * kGolden;
  return fmix64(chain[0] + fmix64(chain[1] + fmix64(chain[2] + fmix64(chain[3] + static_cast<uint64_t>(count)))));
}

// A group of features, whose bags are hashed and compared together.
struct SampleGroup {
  const Bags& rows;
  const float* weights;
  int64_t batch;
  std::vector<int64_t> features;

  bool same(int64_t a, int64_t b) const {
    const int64_t width = rows.ids64 ? 8 : 4;
    const auto* ids = static_cast<const char*>(rows.ids);
    for (const int64_t f : features) {
      const int64_t first = rows.offset(f * batch + a), other = rows.offset(f * batch + b);
      const int64_t count = rows.offset(f * batch + a + 1) - first;
      if (rows.offset(f * batch + b + 1) - other != count) return false;
      if (count == 0) continue;
      if (std::memcmp(ids + first * width, ids + other * width, static_cast<size_t>(count * width)) != 0) return false;
      if (weights && std::memcmp(weights + first, weights + other, static_cast<size_t>(4 * count)) != 0) return false;
    }
    return true;
  }
  uint64_t hash(int64_t b) const {
    uint64_t h = kGolden;
    for (const int64_t f : features) {
      const int64_t first = rows.offset(f * batch + b), count = rows.offset(f * batch + b + 1) - first;
      h = rows.ids64 ? hash_words(static_cast<const uint64_t*>(rows.ids) + first, count, h)
                     : hash_words(static_cast<const uint32_t*>(rows.ids) + first, count, h);
      if (weights) h = hash_words(reinterpret_cast<const uint32_t*>(weights) + first, count, h);
    }
    return h;
  }
};

// Hashes of the samples of a group that differ from the previous sample.
struct Samples {
  const uint64_t* hashes;
  const bool* repeats;
  int64_t batch;

  // Calls body(sample, hash) for the first sample of each run whose hash belongs to this one of `parts` parts.
  template <class Body>
  void for_part(int64_t part, int64_t parts, const Body& body) const {
    for (int64_t b = 0; b < batch; ++b) {
      if (repeats[b]) continue;
      const uint64_t of = (hashes[b] >> 32) * static_cast<uint64_t>(parts) >> 32;
      if (of == static_cast<uint64_t>(part)) body(b, hashes[b]);
    }
  }
};

struct Slot {
  uint64_t hash;
  int64_t sample;  // -1: empty slot
};

// firsts[b] = the first sample equal to b, for the samples of one part. Equal hashes are in the same part.
void find_firsts(const SampleGroup& group, const Samples& samples, int64_t part, int64_t parts, int64_t* firsts) {
  int64_t count = 0, size = 1;
  samples.for_part(part, parts, [&](int64_t, uint64_t) { ++count; });
  while (size < 2 * count) size *= 2;
  const Scratch<Slot> slots(size);
  std::fill_n(slots.get(), size, Slot{0, -1});
  const uint64_t mask = static_cast<uint64_t>(size) - 1;
  samples.for_part(part, parts, [&](int64_t b, uint64_t hash) {
    for (uint64_t place = hash & mask;; place = (place + 1) & mask) {
      Slot& slot = slots[static_cast<int64_t>(place)];
      if (slot.sample < 0) slot = {hash, b};
      else if (slot.hash != hash || !group.same(slot.sample, b)) continue;
      firsts[b] = slot.sample;
      return;
    }
  });
}

// Replaces each sample's first equal sample by the index of the distinct sample. Returns the number of distinct ones.
int64_t number(const bool* repeats, int64_t batch, int64_t* inverse, int64_t* rows) {
  int64_t count = 0;
  for (int64_t b = 0; b < batch; ++b) {
    if (repeats[b]) {
      inverse[b] = inverse[b - 1];
    } else if (inverse[b] == b) {
      rows[count] = b;
      inverse[b] = count++;
    } else {
      inverse[b] = inverse[inverse[b]];
    }
  }
  std::fill(rows + count, rows + batch, int64_t{-1});
  return count;
}

struct Distinct {
  int64_t *rows, *inverse, *counts;
};

void find_distinct(const std::vector<SampleGroup>& groups, int64_t batch, int64_t num_ids, int64_t hash_bits,
                   const Distinct& out) {
  const auto num_groups = static_cast<int64_t>(groups.size()), samples = num_groups * batch;
  const uint64_t kept = hash_bits == 64 ? ~uint64_t{0} : (uint64_t{1} << hash_bits) - 1;
  const int64_t cost = 8 * num_ids + 64 * samples, workers = workers_for(1 + cost / kFewBytes, 1);
  const Scratch<uint64_t> hashes(samples);
  const Scratch<bool> repeats(samples);
  const int64_t piece = 1 + samples / pieces_for(cost, kFewBytes, workers);
  parallel_pieces(samples, piece, workers, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; ++i) {
      const SampleGroup& group = groups[static_cast<size_t>(i / batch)];
      const int64_t b = i % batch;
      repeats[i] = b > 0 && group.same(b - 1, b);
      hashes[i] = repeats[i] ? 0 : group.hash(b) & kept;
    }
  });
  const int64_t parts = ceil_div(workers, num_groups);
  parallel_pieces(num_groups * parts, 1, workers, [&](int64_t task, int64_t, int64_t) {
    const int64_t g = task / parts;
    const Samples mine{hashes.get() + g * batch, repeats.get() + g * batch, batch};
    find_firsts(groups[static_cast<size_t>(g)], mine, task % parts, parts, out.inverse + g * batch);
  });
  parallel_pieces(num_groups, 1, std::min(workers, num_groups), [&](int64_t g, int64_t, int64_t) {
    out.counts[g] = number(repeats.get() + g * batch, batch, out.inverse + g * batch, out.rows + g * batch);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> jagged_dedup_cpu(const Tensor& values_in, const Tensor& offsets_in,
                                                            const std::vector<int64_t>& group_of,
                                                            const OptionalTensor& weights_in, int64_t hash_bits) {
  const DedupSizes sizes = check_jagged_dedup(values_in, offsets_in, group_of, weights_in, hash_bits);
  const Tensor values = as_contiguous(values_in), offsets = as_contiguous(offsets_in);
  const OptionalTensor weights = as_contiguous(weights_in);
  const Bags rows = jagged_rows(values, offsets);
  check_offsets(rows);
  const float* weight = weights ? weights->const_data_ptr<float>() : nullptr;
  std::vector<SampleGroup> groups(static_cast<size_t>(sizes.groups), SampleGroup{rows, weight, sizes.batch, {}});
  for (size_t f = 0; f < group_of.size(); ++f)
    if (group_of[f] >= 0) groups[static_cast<size_t>(group_of[f])].features.push_back(static_cast<int64_t>(f));
  Tensor first = new_tensor(values, {sizes.groups, sizes.batch}, ScalarType::Long);
  Tensor inverse = new_tensor(values, {sizes.groups, sizes.batch}, ScalarType::Long);
  Tensor counts = new_tensor(values, {sizes.groups}, ScalarType::Long);
  const Distinct out{first.mutable_data_ptr<int64_t>(), inverse.mutable_data_ptr<int64_t>(),
                     counts.mutable_data_ptr<int64_t>()};
  if (sizes.batch > 0 && sizes.groups > 0) find_distinct(groups, sizes.batch, rows.num_ids, hash_bits, out);
  else std::fill_n(out.counts, sizes.groups, int64_t{0});
  return {first, inverse, counts, good_status(offsets)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { implement<&jagged_dedup_cpu>(m, "jagged_dedup"); }

}  // namespace rec_kernels
