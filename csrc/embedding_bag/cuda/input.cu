// Prepares the tensors of an embedding_bag call for its CUDA kernels, without synchronization.
#include <vector>

#include "core/cuda/to_gpu.cuh"
#include "embedding_bag/cuda/cache_input.cuh"
#include "rows/formats/format_list.h"

namespace rec_kernels {
namespace {

// Arguments of start_kernel.
struct StartArgs {
  Parts parts;
  Bags bags;
  LayoutSizes sizes;
  LayoutLimits limits;
  int64_t* status;
};

// Unsigned, since the difference of bad starts, which check_starts() records, may overflow.
__device__ uint64_t bags_of(const Bags& bags, int64_t feature) {
  return static_cast<uint64_t>(bags.starts[feature + 1]) - static_cast<uint64_t>(bags.starts[feature]);
}

// Checks bag_starts. All features of a group have the same number of bags, at most one per sample; a feature in no
// group has exactly one per sample.
__device__ void check_starts(const StartArgs& a) {
  const Bags& bags = a.bags;
  for (int64_t i = threadIdx.x; bags.starts && i <= bags.num_features; i += blockDim.x) {
    const int64_t before = i > 0 ? bags.starts[i - 1] : 0;
    if (bags.starts[i] < before || (i == 0 && bags.starts[0] != 0) ||
        (i == bags.num_features && bags.starts[i] != bags.num_bags))
      note_bad(a.status, kBadLayout);
  }
  if (!bags.groups) return;
  const auto batch = static_cast<uint64_t>(bags.batch);
  const int64_t* first_of = bags.groups + bags.num_features;  // per feature: the first feature of its group
  for (int64_t f = threadIdx.x; f < bags.num_features; f += blockDim.x) {
    const uint64_t count = bags_of(bags, f);
    const bool good = bags.groups[f] < 0 ? count == batch : count <= batch && count == bags_of(bags, first_of[f]);
    if (!good) note_bad(a.status, kBadLayout);
  }
}

// Checks the records of a layout, and writes Parts::mapped.
__device__ void check_parts(const StartArgs& a) {
  const TablePart* records = a.parts.records;
  for (int64_t i = threadIdx.x; i < a.limits.num_parts; i += blockDim.x) {
    const bool good = fault_of(records, i, a.sizes, a.limits) == LayoutFault::kNone;
    if (!good) note_bad(a.status, kBadLayout);
    if (!good || !a.parts.mapped) continue;
    const TablePart& r = records[i];
    const bool first = records[r.feature].part_start == i;
    const bool single_part = first && part_start(records, r.feature + 1, a.sizes, a.limits.num_parts) == i + 1;
    const int64_t limit = r.takes_every_id() ? r.modulus : r.id_limit;  // hashed ids have been replaced by rows
    const Partition partition = Partition::of(r.divisor, r.modulus, limit);
    a.parts.mapped[i] = {partition, single_part ? Combine::kConcat : static_cast<Combine>(r.combine),
                         !single_part || partition.divides || partition.wraps};
  }
}

// Launched with one block. The other kernels rely on these checks, and do nothing if one fails.
__global__ void __launch_bounds__(kThreads) start_kernel(StartArgs a) {
  if (threadIdx.x == 0) {
    // Checks the single offset of a call without bags, which no other kernel reads.
    const bool bad = a.bags.num_bags == 0 && a.bags.bad_offset(0, 0) != kNoBadPosition;
    a.status[0] = bad ? kBadLayout + 1 : kNoBadPosition;
    a.status[1] = 0;
  }
  __syncthreads();
  check_starts(a);
  if (a.parts.records) check_parts(a);
}

// Arguments of mask_ids_kernel, which copies ids to bags.ids: skipped ids become bags.padding_idx, which is no valid
// id, and hashed ids become rows.
struct MaskArgs {
  Bags bags;
  void* ids;
  Parts parts;
  int64_t* status;
  bool wide, checks_ids, skips_frozen;  // wide: `ids` are int64

  __device__ void put(int64_t i, int64_t id) const {
    if (wide) static_cast<int64_t*>(ids)[i] = id;
    else static_cast<int32_t*>(ids)[i] = static_cast<int32_t>(id);
  }
};

__global__ void __launch_bounds__(kThreads) note_offsets_kernel(Bags bags, int64_t* status) {
  for (int64_t bag = Group<1>::first(); bag < bags.num_bags; bag += Group<1>::stride()) range_of(bags, bag, status);
}

// Writes the ids that other kernels read. Records ids out of range, which those kernels cannot distinguish from
// padding. With bad offsets all ids are masked, since bags of two features may overlap.
__global__ void __launch_bounds__(kThreads) mask_ids_kernel(MaskArgs a) {
  if (*a.status == kBadLayout) return;
  if (*a.status < 0) {
    for (int64_t i = Group<1>::first(); i < a.bags.num_ids; i += Group<1>::stride()) a.put(i, a.bags.padding_idx);
    return;
  }
  const Group<kWarpSize> group;
  for (int64_t bag = group.first(); bag < a.bags.num_bags; bag += group.stride()) {
    const int64_t p = a.bags.first_part(a.bags.feature_of(bag));
    const TablePart& part = a.parts.records[p];
    const int64_t stop = a.bags.offset(bag + 1);
    for (int64_t i = a.bags.offset(bag) + group.lane; i < stop; i += kWarpSize) {
      const int64_t id = a.bags.id(i);
      if (part.takes_every_id()) {
        a.put(i, part.hashed_row(id, a.parts.mapped[p].partition.modulus, a.bags.padding_idx));
        continue;
      }
      const bool bad = a.checks_ids && static_cast<uint64_t>(id) >= static_cast<uint64_t>(part.id_limit);
      a.put(i, bad || id == part.padding_idx ? a.bags.padding_idx : id);
      if (!bad || (a.skips_frozen && part.frozen != 0)) continue;
      note_left_out(a.status, i);
    }
  }
}

void mask_ids(const BagInput& in, int64_t* status, bool skips_frozen, cudaStream_t stream) {
  MaskArgs args{in.bags,     in.masked->mutable_data_ptr(), in.parts, status, in.bags.ids64, in.checks_masked,
                skips_frozen};
  args.bags.ids = in.values.const_data_ptr();
  args.bags.ids64 = in.values.scalar_type() == ScalarType::Long;
  launch_for(in.bags.num_bags, 1, stream, note_offsets_kernel, args.bags, status);
  launch_for_bags(in.bags.num_bags, kWarpSize, stream, mask_ids_kernel, args);
}

void read_formats(const LayoutSizes& sizes, Parts* parts) {
  for (int f = 0; f < kNumRowFormats; ++f)
    if (sizes.formats >> f & 1) parts->formats[parts->num_formats++] = static_cast<RowFormat>(f);
}

// Returns [2, F]: the group of each feature, of `count` groups, and the first feature of that group.
Tensor read_groups(const std::vector<int64_t>& groups, int64_t count, const Tensor& like, cudaStream_t stream) {
  std::vector<int64_t> both(groups), first_of(static_cast<size_t>(count), -1);
  for (size_t f = 0; f < groups.size(); ++f) {
    const auto here = static_cast<int64_t>(f);
    int64_t* first = groups[f] < 0 ? nullptr : &first_of[static_cast<size_t>(groups[f])];
    if (first && *first < 0) *first = here;
    both.push_back(first ? *first : here);
  }
  return to_gpu(both, like, stream);
}

}  // namespace

uint8_t* on_gpu(const Tensor& weights, const Tensor& values) {
  auto* p = static_cast<uint8_t*>(weights.mutable_data_ptr());
  if (weights.is_cuda() || weights.numel() == 0) return p;
  p = static_cast<uint8_t*>(mapped_address(p));
  check_value(p != nullptr, "weights is on cpu and not pinned: with values on cuda:", values.get_device_index(),
              " it must be there, or in pinned memory");
  return p;
}

BagInput read_bags(const BagArguments& bags, const Layout& layout, cudaStream_t stream) {
  BagInput in{check_bags(bags, layout)};
  const LayoutSizes& sizes = in.sizes = layout.sizes;
  Parts& parts = in.parts;
  parts.records = layout.parts;
  parts.own_rows = in.bags.own_rows;
  parts.most_parts = static_cast<int>(sizes.most_parts);
  while (1 << parts.part_bits < parts.most_parts) ++parts.part_bits;
  read_formats(sizes, &parts);
  if (sizes.most_parts > 1 || sizes.flags & kMapsIds) {
    const int64_t bytes = layout.num_parts * static_cast<int64_t>(sizeof(MappedPart));
    in.mapped = new_tensor(in.values, {bytes}, ScalarType::Byte);
    parts.mapped = static_cast<MappedPart*>(in.mapped->mutable_data_ptr());
  }
  if (sizes.flags & (kPads | kHashes)) {
    in.bags.ids64 = in.bags.ids64 || sizes.flags & kHashes;  // the row of a hashed int32 id may need 64 bits
    in.masked = new_tensor(in.values, {in.values.numel()}, in.bags.ids64 ? ScalarType::Long : ScalarType::Int);
    in.bags.ids = in.masked->const_data_ptr();
    in.bags.pads = false;
    in.bags.padding_idx = in.bags.ids64 ? INT64_MIN : INT32_MIN;
    in.checks_masked = in.bags.check_ids;
    in.bags.check_ids = false;
  }
  if (bags.groups) {
    in.groups = read_groups(*bags.groups, bags.inverse->size(0), in.values, stream);
    in.bags.groups = in.groups->const_data_ptr<int64_t>();
  }
  return in;
}

BagInput read_bags(const OneTableBags& bags, const Part& table) {
  BagInput in{check_bags(bags, table)};
  in.parts.one = table;
  in.parts.most_parts = in.parts.num_formats = 1;
  in.parts.formats[0] = table.format;
  return in;
}

Tensor new_status(const BagInput& in, const LayoutLimits& limits, const Tensor& like, cudaStream_t stream,
                  bool skips_frozen) {
  Tensor status = new_tensor(like, {2}, ScalarType::Long);
  const StartArgs args{in.parts, in.bags, in.sizes, limits, status.mutable_data_ptr<int64_t>()};
  launch(start_kernel, dim3(1), dim3(kThreads), 0, stream, args);
  if (in.masked && in.bags.num_ids > 0 && in.bags.num_bags > 0) mask_ids(in, args.status, skips_frozen, stream);
  return status;
}

CacheTensors read_cache(const CacheArguments& cache, const Layout& layout, const Tensor& values, CacheUse use) {
  CacheTensors out{};
  if (!check_cache(cache, layout, values, use)) return out;
  out.tags = cache.tags->mutable_data_ptr<int64_t>();
  if (cache.marks) out.marks = cache.marks->mutable_data_ptr<uint8_t>();
  out.ways = layout.sizes.cache_ways;
  out.num_slots = cache.tags->numel();
  if (use == CacheUse::kFind) return out;
  out.dirty = cache.dirty->mutable_data_ptr<uint8_t>();
  out.rows = cache.rows->mutable_data_ptr<float>();
  return out;
}

}  // namespace rec_kernels
