#include "embedding_bag/cpu/cache_input.h"

#include <algorithm>

namespace rec_kernels {

BagInput read_bags(const CacheBags& bags, const Tensor* weights, const CacheArguments& cache, CacheUse use) {
  const Layout layout = read_layout(bags.layout, bags.layout_sizes, bags.values);
  check_value(check_cache(cache, layout, bags.values, use), "cache_tags is missing");
  if (weights != nullptr) check_weights(*weights, bags.values, layout);
  LayoutLimits limits = limits_of(layout.num_parts, weights ? *weights : *cache.tags, cache);
  if (weights == nullptr) limits.weight_bytes = INT64_MAX;
  return read_bags(bags.without_weights(), layout, limits);
}

CacheInput read_cache(const CacheArguments& cache, const BagInput& in, CacheUse use) {
  const int64_t ways = in.cache_ways;
  CacheInput out;
  for (int64_t p = 0; p < in.bags.num_parts; ++p) {
    const TablePart& r = in.records[p];
    out.places.push_back(CachePlace::of(r.cache_sets, r.cache_first_set, r.cache_row_offset, ways, r.num_embeddings));
  }
  out.view = {cache.tags->const_data_ptr<int64_t>(),
              cache.marks ? cache.marks->mutable_data_ptr<uint8_t>() : nullptr,
              out.places.data(),
              nullptr,
              nullptr,
              ways};
  if (use == CacheUse::kFind) return out;
  out.view.rows = cache.rows->mutable_data_ptr<float>();
  out.view.dirty = cache.dirty->mutable_data_ptr<uint8_t>();
  return out;
}

CachedPool read_cached_rows(const CachedRows& cache, const BagInput& in, const Tensor& values) {
  if (!check_cached_rows(cache, values)) return {};
  // Kernels dereference slots before all offsets are checked.
  Bounds bounds;
  bounds.position = in.bags.bad_offset(0, in.bags.num_bags);
  in.raise(bounds);
  const int64_t size = cache.rows->numel();
  const CachedPool out{cache.rows->const_data_ptr<float>(), cache.slots->const_data_ptr<int64_t>(), size};
  for (int64_t f = 0; f < in.bags.num_features; ++f) {
    const int64_t p = in.bags.first_part(f), D = in.parts[p].embedding_dim, offset = in.records[p].cache_row_offset;
    if (in.bags.first_part(f + 1) - p > 1) continue;  // features of several parts bypass the cache
    const int64_t begin = in.bags.offset(in.bags.first_bag(f)), end = in.bags.offset(in.bags.first_bag(f + 1));
    const auto inside = [&](int64_t slot) {
      const __int128 element = static_cast<__int128>(slot) * D + offset;
      return slot >= 0 && element >= 0 && element + D <= size;
    };
    int64_t lowest = INT64_MAX, highest = -1;  // if both extremes are inside, so are all slots between them
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = out.slots[i];
      highest = std::max(highest, slot);
      lowest = std::min(lowest, slot == -1 ? INT64_MAX : slot);
    }
    if (highest < 0 && lowest == INT64_MAX) continue;  // no row is cached
    if (inside(lowest) && inside(highest)) continue;
    for (int64_t i = begin; i < end; ++i)
      check_value(out.slots[i] == -1 || inside(out.slots[i]), "cache_slots[", i, "] = ", out.slots[i],
                  " is neither -1 nor a slot: its row is not among the ", size, " elements of cache_rows");
  }
  return out;
}

}  // namespace rec_kernels
