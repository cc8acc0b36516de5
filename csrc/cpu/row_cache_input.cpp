#include "cpu/row_cache_input.h"

#include <algorithm>

namespace rec_kernels {
namespace {

// Of a part that is cached: its first slot and the one behind its last, and the same of elements of the cache's rows.
struct Extent {
  int64_t part;
  int64_t first, last;
  __int128 begin, end;
};

const int64_t* numbers(const OptionalTensor& t) { return t->const_data_ptr<int64_t>(); }

CachePlace read_place(const CacheArguments& cache, const BagInput& in, int64_t p) {
  const int64_t sets = numbers(cache.sets)[p], first = numbers(cache.set_starts)[p];
  const int64_t offset = cache.offsets ? numbers(cache.offsets)[p] : 0, all = cache.tags->numel() / cache.ways;
  check_value(sets >= 0, "cache_sets[", p, "] = ", sets, " must not be negative");
  check_value(sets == 0 || (first >= 0 && first <= all - sets), "cache_set_starts[", p, "] = ", first, ": ", sets,
              " sets from there on are not all among the ", all, " that cache_tags has");
  const int64_t feature = in.features[p].number;
  check_value(sets == 0 || in.bags.first_part(feature + 1) - in.bags.first_part(feature) == 1, "cache_sets[", p,
              "] = ", sets, " must be 0: feature ", feature, " has several parts, whose rows are not cached");
  return CachePlace::of(sets, first, offset, cache.ways, in.features[p].num_embeddings);
}

Extent extent_of(const CacheArguments& cache, const BagInput& in, const CachePlace& place, int64_t p) {
  Extent e{p, place.first * cache.ways, (place.first + place.sets) * cache.ways, 0, 0};
  const __int128 D = in.features[p].embedding_dim;
  e.begin = place.offset + e.first * D;
  e.end = place.offset + e.last * D;
  check_value(e.begin >= 0 && e.end <= cache.rows->numel(), "cache_offsets[", p, "] = ", place.offset, ": slots ",
              e.first, " up to ", e.last - 1, " of ", in.features[p].embedding_dim, " columns do not lie in the ",
              cache.rows->numel(), " elements of cache_rows");
  return e;
}

// Tables share their sets, and the memory of these, or have none in common.
void check_apart(const BagInput& in, std::vector<Extent> extents) {
  const auto same = [&](const Extent& a, const Extent& b) {
    return a.first == b.first && a.last == b.last && a.begin == b.begin &&
           in.features[a.part].embedding_dim == in.features[b.part].embedding_dim;
  };
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.first < b.first; });
  for (size_t i = 1; i < extents.size(); ++i)
    check_value(same(extents[i - 1], extents[i]) || extents[i - 1].last <= extents[i].first, "cache_set_starts[",
                extents[i].part, "]: its sets are some of those of part ", extents[i - 1].part,
                ": tables of one width share all of their sets or none, others none");
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < extents.size(); ++i)
    check_value(same(extents[i - 1], extents[i]) || extents[i - 1].end <= extents[i].begin, "cache_offsets[",
                extents[i].part, "]: its slots lie in the memory of those of part ", extents[i - 1].part);
}

// Rows are found by their linear numbers: whoever reads a table looks in the same place.
void check_shared(const BagInput& in, const std::vector<CachePlace>& places) {
  std::vector<int64_t> parts;
  for (int64_t p = 0; p < in.num_parts; ++p)
    if (in.features[p].num_embeddings > 0) parts.push_back(p);
  std::sort(parts.begin(), parts.end(),
            [&](int64_t a, int64_t b) { return in.features[a].row_offset < in.features[b].row_offset; });
  for (size_t i = 1; i < parts.size(); ++i) {
    const int64_t a = parts[i - 1], b = parts[i];
    if (in.features[a].row_offset != in.features[b].row_offset) continue;
    const CachePlace &x = places[static_cast<size_t>(a)], &y = places[static_cast<size_t>(b)];
    check_value(x.sets == y.sets && (x.sets == 0 || x.first == y.first), "cache_sets[", b, "] = ", y.sets,
                " and cache_set_starts must be those of part ", a, ", ", x.sets, ", which reads the same table");
  }
}

}  // namespace

CacheInput read_cache(const CacheArguments& cache, const TableLayout& layout, const BagInput& in, const Tensor& values,
                      CacheUse use) {
  CacheInput out;
  if (!check_cache(cache, layout, values, use)) return out;
  const bool has_rows = use != CacheUse::kFind;
  std::vector<Extent> extents;
  for (int64_t p = 0; p < in.num_parts; ++p) {
    out.places.push_back(read_place(cache, in, p));
    if (has_rows && out.places.back().sets > 0) extents.push_back(extent_of(cache, in, out.places.back(), p));
  }
  check_shared(in, out.places);
  check_apart(in, std::move(extents));
  out.view = {numbers(cache.tags), optional_pointer<uint8_t>(cache.marks), out.places.data(), nullptr, nullptr,
              cache.ways};
  if (!has_rows) return out;
  out.view.rows = cache.rows->mutable_data_ptr<float>();
  out.view.dirty = cache.dirty->mutable_data_ptr<uint8_t>();
  return out;
}

CachedPool read_cached_rows(const CachedRows& cache, const TableLayout& layout, const BagInput& in,
                            const Tensor& values) {
  if (!check_cached_rows(cache, layout, values)) return {};
  // Kernels follow slots before they have seen all offsets.
  Bounds bounds;
  bounds.position = in.bags.bad_offset(0, in.bags.num_bags);
  in.raise(bounds);
  const CachedPool out{cache.rows->const_data_ptr<float>(), numbers(cache.offsets), numbers(cache.slots)};
  const int64_t size = cache.rows->numel();
  for (int64_t f = 0; f < in.num_features; ++f) {
    const int64_t p = in.bags.first_part(f), D = in.features[p].embedding_dim, offset = out.offsets[p];
    if (in.bags.first_part(f + 1) - p > 1) continue;  // never read from the cache
    const int64_t begin = in.bags.offset(in.bags.first_bag(f)), end = in.bags.offset(in.bags.first_bag(f + 1));
    const auto inside = [&](int64_t slot) {
      const __int128 element = static_cast<__int128>(slot) * D + offset;
      return slot >= 0 && element >= 0 && element + D <= size;
    };
    int64_t lowest = INT64_MAX, highest = -1;  // of the slots; all between are inside if these are
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = out.slots[i];
      highest = std::max(highest, slot);
      lowest = std::min(lowest, slot == -1 ? INT64_MAX : slot);
    }
    if (highest < 0 && lowest == INT64_MAX) continue;  // every one is -1
    if (inside(lowest) && inside(highest)) continue;
    for (int64_t i = begin; i < end; ++i)
      check_value(out.slots[i] == -1 || inside(out.slots[i]), "cache_slots[", i, "] = ", out.slots[i],
                  " is neither -1 nor a slot: its row is not among the ", size, " elements of cache_rows");
  }
  return out;
}

}  // namespace rec_kernels
