#include "embedding_bag/cpu/shared_rows.h"

#include <algorithm>

#include "core/cpu/parallel.h"
#include "embedding_bag/cpu/numbered_rows.h"
#include "embedding_bag/cpu/sum_rows.h"

namespace rec_kernels {
namespace {

int64_t bags_of(const Bags& bags, int64_t feature) { return bags.first_bag(feature + 1) - bags.first_bag(feature); }

// Number of bags of each group; 0 for a group without features.
std::vector<int64_t> group_sizes(const BagInput& in) {
  std::vector<int64_t> sizes(static_cast<size_t>(in.inverse->size(0)));
  for (int64_t f = 0; f < in.bags.num_features; ++f)
    if (in.bags.groups[f] >= 0) sizes[static_cast<size_t>(in.bags.groups[f])] = bags_of(in.bags, f);
  return sizes;
}

}  // namespace

SharedRows::SharedRows(const BagInput& in, int64_t element_bytes) : in_(in), bytes_(element_bytes) {
  if (!in.bags.groups) return;
  const std::vector<int64_t> sizes = group_sizes(in);
  const int64_t most = sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
  const int64_t bytes = most * in.output_dim * bytes_;
  if (bytes > 0) memory_ = Scratch<uint8_t>(bytes);
}

std::vector<SharedRows::Columns> SharedRows::columns_of_groups() const {
  std::vector<Columns> out;
  for (int64_t p = 0; p < in_.bags.num_parts; ++p) {
    const Part& f = in_.parts[p];
    const int64_t group = in_.bags.groups[f.feature];
    if (group < 0) continue;
    const int64_t end = f.output_offset + f.embedding_dim;
    if (!out.empty() && out.back().group == group && out.back().begin + out.back().count >= f.output_offset)
      out.back().count = end - out.back().begin;  // added or multiplied parts share the columns of the previous one
    else out.push_back({group, f.output_offset, f.embedding_dim});
  }
  return out;
}

void SharedRows::expand(void* output) const {
  if (!memory_) return;
  const std::vector<Columns> columns = columns_of_groups();
  const auto copy_rows = kernels<NumberedRowsKernels>().copy_rows;
  const auto* inverse = in_.inverse->const_data_ptr<int64_t>();
  const int64_t batch = in_.bags.batch, row = in_.output_dim * bytes_, piece = 1 + kFewBytes / row;
  parallel_pieces(batch, piece, workers_for(batch, piece), [&](int64_t begin, int64_t end, int64_t) {
    for (const Columns& c : columns) {
      const int64_t first = c.begin * bytes_;
      copy_rows(reinterpret_cast<const char*>(memory_.get()) + first, inverse + c.group * batch, true, c.count * bytes_,
                row, static_cast<char*>(output) + first, begin, end);
    }
  });
}

void SharedRows::sum(const float* grad) const {
  if (!memory_) return;
  const std::vector<int64_t> sizes = group_sizes(in_);
  const std::vector<Columns> columns = columns_of_groups();
  const int64_t batch = in_.bags.batch, groups = in_.inverse->size(0);
  const auto* inverse = in_.inverse->const_data_ptr<int64_t>();
  std::vector<RowOrder> orders(sizes.size());
  // Parallel over groups; a single group is sorted in parallel instead.
  const int64_t workers = workers_for(groups * batch, kFewItems), workers_per_group = groups > 1 ? 1 : workers;
  parallel_pieces(groups, 1, groups > 1 ? workers : 1, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t g = begin; g < end; ++g) {
      const auto group = static_cast<size_t>(g);
      if (sizes[group] == 0) continue;
      orders[group] = order_by_row(Integers(inverse + g * batch), batch, sizes[group], workers_per_group);
    }
  });
  for (const Columns& c : columns) {
    const auto group = static_cast<size_t>(c.group);
    if (sizes[group] == 0) continue;
    sum_rows(grad + c.begin, in_.output_dim, orders[group], sizes[group], c.count,
             reinterpret_cast<float*>(memory_.get()) + c.begin, in_.output_dim);
  }
}

}  // namespace rec_kernels
