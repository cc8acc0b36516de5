// Arguments of the CUDA kernels of embedding_bag.
#pragma once

#include "core/cuda/group.cuh"
#include "embedding_bag/embedding_bag.h"
#include "rows/formats/format_list.h"

namespace rec_kernels {

// First element of `status` for a bad layout. `status` keeps the minimum of all errors: a bad layout, then bad offsets
// (kBadLayout + 1 + i for offsets[i]), then bad ids (i).
constexpr int64_t kBadLayout = INT64_MIN;

inline namespace RK_ISA {

// Extra data per part for calls that map ids or have features of several parts; start_kernel writes it once per call.
struct MappedPart {
  Partition partition;
  Combine combine;  // with the feature's other parts; kConcat for a single part
  bool composed;    // ids are mapped, or the feature has several parts
};

// The parts of a call.
struct Parts {
  const TablePart* records;   // null: one table
  MappedPart* mapped;         // null: every feature is one table, indexed directly by its ids
  bool own_rows;              // every bag has an output row of its own, in which columns start at 0
  int most_parts, part_bits;  // maximum parts of a feature, and bits of a part's index within its feature
  Part one;
  int num_formats;
  RowFormat formats[kNumBagFormats];

  // Part p without the fields that kernels get elsewhere, which are zero: row_bytes, and partition and combine, which
  // are in mapped[p].
  __device__ __forceinline__ Part operator[](int64_t p) const {
    if (!records) return one;
    const TablePart& r = records[p];
    Part out{};
    out.weight_offset = r.weight_offset;
    out.row_offset = r.row_offset;
    out.num_embeddings = r.num_embeddings;
    out.embedding_dim = r.embedding_dim;
    out.output_offset = own_rows ? r.part_column : r.column;
    out.shard = shard_of(r);
    out.format = static_cast<RowFormat>(r.format);
    out.feature = r.feature;
    out.id_limit = r.id_limit;
    out.mean = r.mean != 0;
    out.frozen = r.frozen != 0;
    return out;
  }
  // True if part p's rows are of formats[index].
  __device__ __forceinline__ bool has_format(int64_t p, int index) const {
    return !records || records[p].format == static_cast<int64_t>(formats[index]);
  }
  // True if ids of part p's feature directly index one table.
  __device__ __forceinline__ bool is_plain(int64_t p) const { return !mapped || !mapped[p].composed; }
};

// Records a bad position. Returns early if a smaller one is recorded, which avoids contention of many bad ids.
__device__ __forceinline__ void note_bad(int64_t* status, int64_t position) {
  if (position >= *static_cast<const volatile int64_t*>(status)) return;
  atomicMin(reinterpret_cast<long long*>(status), static_cast<long long>(position));
}

__device__ __forceinline__ void add_count(int64_t* count, int64_t n) {
  atomicAdd(reinterpret_cast<unsigned long long*>(count), static_cast<unsigned long long>(n));
}

// Records and counts an id out of range at `position`, which is skipped.
__device__ __forceinline__ void note_left_out(int64_t* status, int64_t position) {
  note_bad(status, position);
  add_count(status + 1, 1);
}

// Ids [start, stop) of a bag; empty for bad offsets, which range_of() records. Bags behind a bad offset may overlap
// others.
struct Range {
  int64_t start, stop;
};
__device__ __forceinline__ Range range_of(const Bags& bags, int64_t bag, int64_t* status) {
  excuse_races(status);
  const Range r = {bags.offset(bag), bags.offset(bag + 1)};
  if (bag == 0 && (r.start < 0 || r.start > bags.num_ids)) {
    note_bad(status, kBadLayout + 1);
    return {0, 0};
  }
  if (r.stop < r.start || r.stop > bags.num_ids) {
    note_bad(status, kBadLayout + 1 + bag + 1);
    return {0, 0};
  }
  return r.start < 0 ? Range{0, 0} : r;  // the previous bag records its own bad offset
}

// 1 / n on every lane of the group for a bag with n contributing ids; 1 if n is 0.
template <int G>
__device__ __forceinline__ float mean_factor(const Bags& bags, const Part& f, const Group<G>& group, Range ids) {
  int64_t counted = 0;
#pragma unroll 1
  for (int64_t i = ids.start + group.lane; i < ids.stop; i += G)
    counted += bags.counts(bags.id(i), f, bags.padding_idx);
  counted = group.sum(counted);
  return counted > 1 ? 1.0f / static_cast<float>(counted) : 1.0f;
}

}  // namespace RK_ISA

// Lookup arguments. A launch handles the parts with format parts.formats[format].
struct PoolArgs : Lookup {
  Parts parts;
  int format;
  int64_t* status;

  // Address of column `column` in the output row of a feature's bag.
  __device__ __forceinline__ uint8_t* output_of(int64_t bag, int64_t feature, int64_t column) const {
    return bags.rows_of(feature, output) + (bags.output_row(bag, feature) * output_dim + column) * output_bytes();
  }
  // True if rows of a feature may be cached: only features with one part are.
  __device__ __forceinline__ bool may_be_cached(int64_t feature) const {
    return cache.slots && bags.first_part(feature + 1) - bags.first_part(feature) == 1;
  }
  // Offset of id i's row in the cache, or -1.
  __device__ __forceinline__ int64_t cached_place(int64_t part, int64_t D, int64_t i) const {
    const int64_t slot = cache.slots ? cache.slots[i] : -1;
    if (slot < 0) return -1;
    // Unsigned, since the product of a bad slot may overflow.
    const auto begin = static_cast<int64_t>(static_cast<uint64_t>(parts.records[part].cache_row_offset) +
                                            static_cast<uint64_t>(slot) * D);
    return begin >= 0 && begin <= cache.num_elements - D ? begin : -1;
  }
};
// Pools every bag of the plain features of one format. max_dim: upper bound of row widths.
void launch_pool(const PoolArgs& args, int64_t max_dim, cudaStream_t stream);
// Pools the features of one part in calls with a cache.
void launch_pool_cached(const PoolArgs& args, int64_t max_dim, cudaStream_t stream);
// Pools the features that are not plain (mapped ids or several parts); with a cache, only those of several parts.
void launch_pool_composed(const PoolArgs& args, int64_t max_dim, cudaStream_t stream);
// out[i] = the gradient of per_sample_weights[i]: for features of one part in one format, or of several parts.
void launch_weight_gradient(const PoolArgs& args, int64_t max_dim, const float* grad, float* out, cudaStream_t stream);
void launch_composed_weight_gradient(const PoolArgs& args, int64_t max_dim, const float* grad, float* out,
                                     cudaStream_t stream);

// Device address of the weights, which are on the GPU of `values` or in pinned host memory.
uint8_t* on_gpu(const Tensor& weights, const Tensor& values);

// Checked arguments of a call, with the buffers that its kernels read.
struct BagInput : BagTensors {
  Parts parts{};
  LayoutSizes sizes{};
  OptionalTensor mapped{};     // owns parts.mapped
  OptionalTensor groups{};     // [2, F], owns bags.groups; empty without deduplicated bags
  OptionalTensor masked{};     // owns bags.ids, a copy that new_status() writes: see MaskArgs
  bool checks_masked = false;  // new_status() checks the bounds of these ids
};

BagInput read_bags(const BagArguments& bags, const Layout& layout, cudaStream_t stream);
// Checks the bags of a call without a layout.
BagInput read_bags(const OneTableBags& bags, const Part& table);

// Launches the checks of the layout and returns the new status. Also writes BagInput::masked, if the call has it, and
// then checks the bounds of its ids if checks_masked, except those of frozen features if skips_frozen.
Tensor new_status(const BagInput& in, const LayoutLimits& limits, const Tensor& like, cudaStream_t stream,
                  bool skips_frozen = false);

}  // namespace rec_kernels
