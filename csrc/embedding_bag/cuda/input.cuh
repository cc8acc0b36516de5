// Arguments of the CUDA kernels of embedding_bag.
#pragma once

#include "core/cuda/group.cuh"
#include "embedding_bag/embedding_bag.h"
#include "rows/formats/format_list.h"

namespace rec_kernels {

// The first element of `status`. The smallest one that is noted wins: a bad layout goes before every offset
// (kBadLayout + 1 + i for offsets[i]), an offset before every id (i).
constexpr int64_t kBadLayout = INT64_MIN;

inline namespace RK_ISA {

// A part of a call that maps ids to rows or has features of several parts; start_kernel makes it once per call.
struct MappedPart {
  Partition partition;
  Combine combine;  // with the feature's other parts; kConcat of one alone
  bool composed;    // an id is no row of one table: it is mapped to one, or the feature has several parts
};

// The parts of a call.
struct Parts {
  const TablePart* records;   // null: one table
  MappedPart* mapped;         // or null: every feature is one table, and an id its row
  bool own_rows;              // every bag has a row of the output, whose columns start with the feature's
  int most_parts, part_bits;  // no feature has more; of the number of a part within its feature
  Part one;
  int num_formats;
  RowFormat formats[kNumBagFormats];

  // Part p, without what kernels have from elsewhere: the bytes of a row; mapped[p], its partition and what becomes of
  // the feature's parts. Those fields are zeros.
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
    out.number = r.feature;
    out.id_limit = r.id_limit;
    out.mean = r.mean != 0;
    out.frozen = r.frozen != 0;
    return out;
  }
  // True if part p's rows are of formats[index].
  __device__ __forceinline__ bool has_format(int64_t p, int index) const {
    return !records || records[p].format == static_cast<int64_t>(formats[index]);
  }
  // True if an id of part p's feature is one row of one table.
  __device__ __forceinline__ bool is_plain(int64_t p) const { return !mapped || !mapped[p].composed; }
};

// Returns early once an earlier position is noted: many bad ids would queue up for one address.
__device__ __forceinline__ void note_bad(int64_t* status, int64_t position) {
  if (position >= *static_cast<const volatile int64_t*>(status)) return;
  atomicMin(reinterpret_cast<long long*>(status), static_cast<long long>(position));
}

__device__ __forceinline__ void add_count(int64_t* count, int64_t n) {
  atomicAdd(reinterpret_cast<unsigned long long*>(count), static_cast<unsigned long long>(n));
}

// A number out of range at `position`, which is left out.
__device__ __forceinline__ void note_left_out(int64_t* status, int64_t position) {
  note_bad(status, position);
  add_count(status + 1, 1);
}

// Ids [start, stop) of a bag; none of a bag whose offsets are bad, which is noted.
struct Range {
  int64_t start, stop;
};
__device__ __forceinline__ Range range_of(const Bags& bags, int64_t bag, int64_t* status) {
  const Range r = {bags.offset(bag), bags.offset(bag + 1)};
  if (bag == 0 && (r.start < 0 || r.start > bags.num_ids)) {
    note_bad(status, kBadLayout + 1);
    return {0, 0};
  }
  if (r.stop < r.start || r.stop > bags.num_ids) {
    note_bad(status, kBadLayout + 1 + bag + 1);
    return {0, 0};
  }
  return r.start < 0 ? Range{0, 0} : r;  // the offset before was noted by its own bag
}

// 1 / n for a bag of which n ids count, on every lane of the group; 1 where none does.
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

// The kernels look up the parts whose rows are of parts.formats[format].
struct PoolArgs : Lookup {
  Parts parts;
  int format;
  int64_t* status;

  // Address of a feature's columns from `column` on in the bag's row.
  __device__ __forceinline__ uint8_t* output_of(int64_t bag, int64_t feature, int64_t column) const {
    return bags.rows_of(feature, output) + (bags.output_row(bag, feature) * output_dim + column) * output_bytes();
  }
  // True if rows of a feature may be in the cache: it has one part.
  __device__ __forceinline__ bool may_be_cached(int64_t feature) const {
    return cache.slots && bags.first_part(feature + 1) - bags.first_part(feature) == 1;
  }
  // Offset of id i's row in the cache, or -1.
  __device__ __forceinline__ int64_t cached_place(int64_t part, int64_t D, int64_t i) const {
    const int64_t slot = cache.slots ? cache.slots[i] : -1;
    if (slot < 0) return -1;
    // Unsigned, so that a slot far beyond all wraps.
    const auto begin = static_cast<int64_t>(static_cast<uint64_t>(parts.records[part].cache_row_offset) +
                                            static_cast<uint64_t>(slot) * D);
    return begin >= 0 && begin <= cache.num_elements - D ? begin : -1;
  }
};
// Pools every bag of the plain features of one format; no row is wider than max_dim.
void launch_pool(const PoolArgs& args, int64_t max_dim, cudaStream_t stream);
// Pools the features of one part in calls with a cache.
void launch_pool_cached(const PoolArgs& args, int64_t max_dim, cudaStream_t stream);
// Pools the features that are not plain: mapped ids, several parts; with a cache, only those of several parts.
void launch_pool_composed(const PoolArgs& args, int64_t max_dim, cudaStream_t stream);
// out[i]: the gradient of per_sample_weights[i], of all features of one part in one format, or of those of several.
void launch_weight_gradient(const PoolArgs& args, int64_t max_dim, const float* grad, float* out, cudaStream_t stream);
void launch_composed_weight_gradient(const PoolArgs& args, int64_t max_dim, const float* grad, float* out,
                                     cudaStream_t stream);

// The address of weights for kernels: in the memory of the GPU that has the values, or in the host's, if that is
// pinned.
uint8_t* on_gpu(const Tensor& weights, const Tensor& values);

// The arguments of a call as the kernels read them.
struct BagInput : BagTensors {
  Parts parts{};
  LayoutSizes sizes{};
  OptionalTensor mapped{};     // the memory of parts.mapped
  OptionalTensor groups{};     // [2, F], or none: bags are not shared
  OptionalTensor masked{};     // bags.ids, a copy for new_status() to mask what is left out in
  bool checks_masked = false;  // whether it checks these ids
};

BagInput read_bags(const BagArguments& bags, const Layout& layout, cudaStream_t stream);
// Reads the bags of a call without a layout.
BagInput read_bags(const OneTableBags& bags, const Part& table);

// A status with nothing noted but whether the layout is bad, on the stream. Masks ids of padding, and checks the others
// then; skips_frozen: but for those of frozen features.
Tensor new_status(const BagInput& in, const LayoutLimits& limits, const Tensor& like, cudaStream_t stream,
                  bool skips_frozen = false);

}  // namespace rec_kernels
