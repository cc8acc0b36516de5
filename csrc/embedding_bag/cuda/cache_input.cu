#include "embedding_bag/cuda/cache_input.cuh"

namespace rec_kernels {

CacheTensors read_cache(const CacheArguments& cache, const Layout& layout, const Tensor& values, CacheUse use) {
  CacheTensors out{};
  if (!check_cache(cache, layout, values, use)) return out;
  out.tags = cache.tags->mutable_data_ptr<int64_t>();
  out.marks = optional_pointer<uint8_t>(cache.marks);
  out.ways = layout.sizes.cache_ways;
  out.num_slots = cache.tags->numel();
  if (use == CacheUse::kFind) return out;
  out.dirty = cache.dirty->mutable_data_ptr<uint8_t>();
  out.rows = cache.rows->mutable_data_ptr<float>();
  out.num_elements = cache.rows->numel();
  return out;
}

}  // namespace rec_kernels
