// From the tensors of an embedding_bag call to what its CUDA kernels read. Nothing is read back from the GPU, except
// for layouts that leave out num_rows and max_embedding_dim, or, with partition_starts, max_parts and multiplies.
#include <algorithm>
#include <vector>

#include "cuda/jagged.cuh"
#include "formats/format_list.h"

namespace rec_kernels {
namespace {

std::vector<int64_t> to_host(const OptionalTensor& t, cudaStream_t stream) {
  std::vector<int64_t> out(static_cast<size_t>(t->numel()));
  copy_to_host(out.data(), t->const_data_ptr(), out.size() * sizeof(int64_t), stream);
  return out;
}

void read_layout(const TableLayout& layout, BagInput* in, cudaStream_t stream) {
  Features& f = in->features;
  f.weight_offsets = layout.weight_offsets->const_data_ptr<int64_t>();
  f.row_offsets = layout.row_offsets->const_data_ptr<int64_t>();
  f.num_embeddings = layout.num_embeddings->const_data_ptr<int64_t>();
  f.embedding_dims = layout.embedding_dims->const_data_ptr<int64_t>();
  f.output_offsets = layout.output_offsets->const_data_ptr<int64_t>();
  f.means = layout.mean ? layout.mean->const_data_ptr<bool>() : nullptr;
  f.format_of = layout.format_of ? layout.format_of->const_data_ptr<int64_t>() : nullptr;
  f.frozen = layout.frozen ? layout.frozen->const_data_ptr<bool>() : nullptr;
  f.one.mean = in->options.mean;
  in->output_dim = layout.output_dim;
  in->max_dim = layout.max_embedding_dim;
  in->num_rows = layout.num_rows;
  if (in->max_dim > 0 && in->num_rows > 0) return;
  const std::vector<int64_t> dims = to_host(layout.embedding_dims, stream), rows = to_host(layout.row_offsets, stream),
                             sizes = to_host(layout.num_embeddings, stream);
  for (size_t f = 0; f < dims.size(); ++f) {
    in->max_dim = std::max(in->max_dim, dims[f]);
    in->num_rows = std::max(in->num_rows, rows[f] + sizes[f]);
  }
}

// What a layout tells of its parts, or else the GPU: the most that a feature has, and whether one multiplies them.
void read_part_counts(const TableLayout& layout, BagInput* in, cudaStream_t stream) {
  Features& f = in->features;
  // Every feature has a part, so one of them has at most what is left by the others.
  const int64_t left = in->num_parts - in->num_features + 1, told = layout.max_parts ? layout.max_parts : kMaxParts;
  f.most_parts = static_cast<int>(std::max(int64_t{1}, std::min(left, told)));
  in->multiplies = f.most_parts > 1 && layout.multiplies.value_or(true);
  if (f.most_parts == 1 || (layout.max_parts && layout.multiplies)) return;
  const std::vector<int64_t> starts = to_host(layout.partition_starts, stream), how = to_host(layout.combine, stream);
  uint64_t most = 1;  // unsigned: what is wrong is noted elsewhere, and may be anything
  bool multiplies = false;
  for (size_t i = 0; i < how.size(); ++i) {
    const uint64_t parts = static_cast<uint64_t>(starts[i + 1]) - static_cast<uint64_t>(starts[i]);
    most = std::max(most, parts);
    multiplies = multiplies || (parts > 1 && how[i] == static_cast<int64_t>(Combine::kMult));
  }
  if (!layout.max_parts) f.most_parts = static_cast<int>(std::min(most, static_cast<uint64_t>(f.most_parts)));
  if (!layout.multiplies) in->multiplies = multiplies;
}

void read_partitions(const TableLayout& layout, BagInput* in, cudaStream_t stream) {
  if (!layout.partition_starts) return;
  in->partitions = {layout.divisors->const_data_ptr<int64_t>(), layout.moduli->const_data_ptr<int64_t>(),
                    layout.id_limits->const_data_ptr<int64_t>(), layout.combine->const_data_ptr<int64_t>()};
  in->parts = new_tensor(in->values, {in->num_parts * static_cast<int64_t>(sizeof(Part))}, ScalarType::Byte);
  Features& f = in->features;
  f.parts = static_cast<Part*>(in->parts->mutable_data_ptr());
  read_part_counts(layout, in, stream);
  for (f.part_bits = 0; 1 << f.part_bits < f.most_parts;) ++f.part_bits;
}

void read_formats(const TableLayout& layout, Features* features) {
  const std::vector<RowFormat> formats = parse_formats(layout);
  features->element_bytes = static_cast<int>(element_bytes(layout));
  features->num_formats = formats.empty() ? 1 : static_cast<int>(formats.size());
  features->formats[0] = RowFormat::kFp32;
  std::copy(formats.begin(), formats.end(), features->formats);
}

// Feature f with its format and the bytes of its rows; 0 bytes: a bad format or width.
__device__ Feature read_feature(const Features& features, int64_t f, int64_t max_dim) {
  Feature out = features[f];
  const int64_t index = features.format_of ? features.format_of[f] : 0;
  const bool known = index >= 0 && index < features.num_formats;
  out.format = features.formats[known ? index : 0];
  const bool good = known && out.embedding_dim >= 1 && out.embedding_dim <= max_dim;
  out.row_bytes = good ? row_bytes(out.format, out.embedding_dim) : 0;
  return out;
}

// Unsigned: the numbers of a bad layout may be anything.
__device__ bool overlap(uint64_t a, uint64_t size_a, uint64_t b, uint64_t size_b) {
  return a < b + size_b && b < a + size_a;
}

// Two features' tables are one and the same, or apart in rows, in weights and, with `moments`, in that state.
__device__ bool share_all_or_nothing(const Feature& a, const Feature& b, bool moments, int64_t moment_a,
                                     int64_t moment_b) {
  if (a.num_embeddings <= 0 || b.num_embeddings <= 0) return true;  // occupies nothing
  const uint64_t rows_a = a.num_embeddings, rows_b = b.num_embeddings;
  const bool sizes = rows_a == rows_b && a.embedding_dim == b.embedding_dim && a.format == b.format;
  const bool places = a.row_offset == b.row_offset && a.weight_offset == b.weight_offset && a.table_id == b.table_id;
  if (sizes && places) return moment_a == moment_b;
  if (moments && overlap(moment_a, rows_a * static_cast<uint64_t>(a.embedding_dim), moment_b,
                         rows_b * static_cast<uint64_t>(b.embedding_dim)))
    return false;
  return !overlap(a.row_offset, rows_a, b.row_offset, rows_b) &&
         !overlap(a.weight_offset, rows_a * static_cast<uint64_t>(a.row_bytes), b.weight_offset,
                  rows_b * static_cast<uint64_t>(b.row_bytes));
}

// Whether the table of a feature of known size lies inside the state at `offset`.
__device__ bool fits(const Moments& moments, const Feature& f, int64_t offset) {
  return moments.count < 0 ||
         (offset >= 0 && offset <= moments.count && f.num_embeddings <= (moments.count - offset) / f.embedding_dim);
}

// What start_kernel looks at.
struct StartArgs {
  Features features;
  Partitions partitions;
  Bags bags;
  int64_t num_parts;
  int64_t weights, output_dim, num_rows, max_dim;
  bool multiplies, updates;
  Moments moments;
  int64_t* status;
};

// Unsigned: where bad starts are, which are noted elsewhere, they may be anything.
__device__ uint64_t bags_of(const Bags& bags, int64_t feature) {
  return static_cast<uint64_t>(bags.starts[feature + 1]) - static_cast<uint64_t>(bags.starts[feature]);
}

// Where every feature's bags start, and its parts.
__device__ void check_starts(const StartArgs& a) {
  const Bags& bags = a.bags;
  for (int64_t i = threadIdx.x; bags.starts && i <= bags.num_features; i += blockDim.x) {
    const int64_t before = i > 0 ? bags.starts[i - 1] : 0;
    if (bags.starts[i] < before || (i == 0 && bags.starts[0] != 0) ||
        (i == bags.num_features && bags.starts[i] != bags.num_bags))
      note_bad(a.status, kBadLayout);
  }
  // In a group, samples may share bags; in none, every sample has its own.
  const auto batch = static_cast<uint64_t>(bags.batch);
  for (int64_t f = threadIdx.x; bags.groups && f < bags.num_features; f += blockDim.x)
    if (bags_of(bags, f) > batch || (bags.groups[f] < 0 && bags_of(bags, f) != batch)) note_bad(a.status, kBadLayout);
  for (int64_t i = threadIdx.x; bags.part_starts && i <= bags.num_features; i += blockDim.x) {
    const int64_t start = bags.part_starts[i], before = i > 0 ? bags.part_starts[i - 1] : -1;
    if (start <= before || (i == 0 ? start != 0 : start - before > a.features.most_parts) ||
        (i == bags.num_features && start != a.num_parts))
      note_bad(a.status, kBadLayout);
  }
}

// Writes a feature's parts, where the numbers are good.
__device__ void make_parts(const StartArgs& a, int64_t feature) {
  const int64_t first = a.bags.part_starts[feature], last = a.bags.part_starts[feature + 1];
  const int64_t combine = a.partitions.combine[feature], limit = a.partitions.id_limits[feature];
  const bool alone = last - first == 1, multiplies = !alone && combine == static_cast<int64_t>(Combine::kMult);
  const bool known = combine >= 0 && combine <= 2 && limit >= 0 && (a.multiplies || !multiplies);
  for (int64_t p = first; p < last; ++p) {
    const int64_t divisor = a.partitions.divisors[p], modulus = a.partitions.moduli[p];
    bool good = known && divisor >= 1 && modulus >= 1;
    if (good) {
      const int64_t quotients = Partition::quotients(limit, divisor);
      good = (quotients < modulus ? quotients : modulus) <= a.features.num_embeddings[p];
    }
    if (!good) {
      note_bad(a.status, kBadLayout);
      return;
    }
    const Partition partition = Partition::of(divisor, modulus, limit);
    a.features.parts[p] = {partition,
                           feature,
                           limit,
                           alone ? Combine::kConcat : static_cast<Combine>(combine),
                           !alone || partition.divides || partition.wraps,
                           false};
  }
}

// Part i among those of its feature: they read different tables, and rows that become one have one shape. Returns the
// column of the output that is to be its first.
__device__ int64_t first_column(const StartArgs& a, int64_t i, const Feature& f) {
  const Features& features = a.features;
  const int64_t first = a.bags.first_part(f.number);
  const bool apart = !features.parts || features.parts[i].combine == Combine::kConcat;
  for (int64_t j = first; j < i; ++j) {
    const bool same_shape = features.embedding_dims[j] == f.embedding_dim &&
                            (!features.format_of || features.format_of[j] == features.format_of[i]);
    const bool same_table = features.row_offsets[j] == f.row_offset && f.num_embeddings != 0;
    if ((!apart && !same_shape) || same_table) note_bad(a.status, kBadLayout);
  }
  if (i == first && (i == 0 || a.bags.have_own_rows())) return 0;
  if (i > first && !apart) return features.output_offsets[i - 1];
  return features.output_offsets[i - 1] + features.embedding_dims[i - 1];
}

// A table must lie inside `weights`, its rows and columns within what the host was told.
__device__ void check_part(const StartArgs& a, int64_t i) {
  const Features& features = a.features;
  const Feature f = read_feature(features, i, a.max_dim);
  const bool place = f.format != RowFormat::kFp32 || f.weight_offset % 4 == 0;
  const bool sizes = f.embedding_dim >= 1 && f.embedding_dim <= a.max_dim && f.num_embeddings >= 0 && f.row_bytes > 0;
  const bool rows =
      f.row_offset >= 0 && f.num_embeddings <= a.num_rows && f.row_offset <= a.num_rows - f.num_embeddings;
  const bool inside = sizes && features.weight_offsets[i] >= 0 && features.weight_offsets[i] <= a.weights &&
                      f.num_embeddings <= (a.weights * features.element_bytes - f.weight_offset) / f.row_bytes;
  const int64_t width = f.output_offset + f.embedding_dim;
  const bool last = a.bags.have_own_rows() ? width <= a.output_dim : i < a.num_parts - 1 || width == a.output_dim;
  const bool table = !features.table_ids || (f.table_id >= 0 && f.table_id < kMaxTableId);
  if (!table || !place || !rows || !inside || !fits(a.moments, f, a.moments.offset(i)) ||
      f.output_offset != first_column(a, i, f) || !last)
    note_bad(a.status, kBadLayout);
}

// What any two features, and any two parts, must agree on, and which parts are multiplied. A block takes a part, its
// threads take the others.
__device__ void check_pairs(const StartArgs& a) {
  const Bags& bags = a.bags;
  const Features& features = a.features;
  for (int64_t i = blockIdx.x; bags.groups && i < bags.num_features; i += gridDim.x)
    for (int64_t j = threadIdx.x; j < i; j += blockDim.x)
      if (bags.groups[i] >= 0 && bags.groups[i] == bags.groups[j] && bags_of(bags, i) != bags_of(bags, j))
        note_bad(a.status, kBadLayout);
  for (int64_t i = blockIdx.x; a.updates && features.embedding_dims && i < a.num_parts; i += gridDim.x) {
    const Feature f = read_feature(features, i, a.max_dim);
    for (int64_t j = threadIdx.x; j < i; j += blockDim.x)
      if (!share_all_or_nothing(f, read_feature(features, j, a.max_dim), a.moments.count >= 0, a.moments.offset(i),
                                a.moments.offset(j)))
        note_bad(a.status, kBadLayout);
    for (int64_t j = threadIdx.x; a.multiplies && j < a.num_parts; j += blockDim.x)
      if (features.parts[j].combine == Combine::kMult && features.row_offsets[j] == f.row_offset &&
          features.num_embeddings[j] > 0)
        features.parts[i].multiplied = true;
  }
}

// Up to so many parts, one block looks at all pairs of them.
constexpr int64_t kFewParts = 64;

// Of calls with more.
__global__ void __launch_bounds__(kThreads) check_pairs_kernel(StartArgs a) {
  if (*a.status != kBadLayout) check_pairs(a);  // else parts are not all there
}

// Whether no thread of the block has found the layout to be bad so far.
__device__ bool is_good(const int64_t* status) {
  __syncthreads();
  const bool good = *status != kBadLayout;
  __syncthreads();  // nobody notes more before all have seen the same
  return good;
}

// One block. The other kernels trust what passes here, and do nothing where something does not.
__global__ void __launch_bounds__(kThreads) start_kernel(StartArgs a) {
  if (threadIdx.x == 0) {
    // Without a bag, no other kernel reads the one offset there is.
    const bool bad = a.bags.num_bags == 0 && a.bags.bad_offset(0, 0) != kNoBadPosition;
    a.status[0] = bad ? kBadLayout + 1 : kNoBadPosition;
    a.status[1] = 0;
  }
  __syncthreads();
  check_starts(a);
  if (a.features.parts) {
    if (!is_good(a.status)) return;
    for (int64_t i = threadIdx.x; i < a.bags.num_features; i += blockDim.x) make_parts(a, i);
    if (!is_good(a.status)) return;
  }
  for (int64_t i = threadIdx.x; a.features.embedding_dims && i < a.num_parts; i += blockDim.x) check_part(a, i);
  if (a.num_parts <= kFewParts) check_pairs(a);
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

BagInput read_bags(const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights,
                   const TableLayout& layout, const BagOptions& options, int64_t rows, int64_t columns,
                   bool include_last_offset, cudaStream_t stream) {
  const int64_t features = check_bags(values, offsets, per_sample_weights, layout, include_last_offset);
  BagInput in{as_contiguous(values),
              as_contiguous(offsets),
              std::nullopt,
              std::nullopt,
              Features{},
              Partitions{},
              Bags{},
              options,
              features,
              count_parts(layout, features),
              0,
              as_contiguous(layout.inverse),
              std::nullopt,
              0,
              0,
              options.mean || layout.mean,
              false};
  in.features.most_parts = 1;
  in.per_sample_weights = as_contiguous(per_sample_weights);
  read_formats(layout, &in.features);
  if (layout.embedding_dims) {
    read_layout(layout, &in, stream);
    read_partitions(layout, &in, stream);
  } else {
    const OneTable table = read_one_table(layout, rows, columns);
    in.features.one = one_table(table, rows, options.mean);
    in.output_dim = in.max_dim = table.embedding_dim;
    in.num_rows = rows;
  }
  in.bags = read_bags(in.values, in.offsets, in.per_sample_weights, options, layout, features, include_last_offset);
  if (layout.groups) {
    in.groups = to_gpu(*layout.groups, in.values, stream);
    in.bags.groups = in.groups->const_data_ptr<int64_t>();
  }
  return in;
}

Tensor new_status(const BagInput& in, int64_t weights, bool updates, const Tensor& like, cudaStream_t stream,
                  const Moments& moments) {
  Tensor status = new_tensor(like, {2}, ScalarType::Long);
  const StartArgs args{in.features,   in.partitions, in.bags,     in.num_parts,
                       weights,       in.output_dim, in.num_rows, in.max_dim,
                       in.multiplies, updates,       moments,     status.mutable_data_ptr<int64_t>()};
  launch(start_kernel, dim3(1), dim3(kThreads), 0, stream, args);
  if (in.num_parts > kFewParts && (updates || in.groups))
    launch(check_pairs_kernel, blocks_for(in.num_parts, kThreads), dim3(kThreads), 0, stream, args);
  return status;
}

}  // namespace rec_kernels
