#include "jagged/jagged_permute.h"

#include <algorithm>
#include <tuple>

#include "core/boxing.h"
#include "jagged/cpu/jagged.h"

namespace rec_kernels {
namespace {

// Output features: first bag of each in the output and the input, and their values.
struct Moves {
  std::vector<int64_t> bags{0}, sources, values{0};
  const char* from;
  char* to;
  int64_t bytes;
  const float* weights;
  float* new_weights;

  // Copies output bags [begin, end).
  template <class Offset>
  void copy(const Bags& rows, Offset* offset, int64_t begin, int64_t end) const {
    auto f = static_cast<size_t>(std::upper_bound(bags.begin(), bags.end(), begin) - bags.begin() - 1);
    for (; begin < end; ++f) {
      const int64_t stop = std::min(end, bags[f + 1]), shift = sources[f] - bags[f];
      const int64_t first = rows.offset(begin + shift), last = rows.offset(stop + shift);
      const int64_t place = values[f] + first - rows.offset(sources[f]);
      for (int64_t b = begin; b < stop; ++b) offset[b] = static_cast<Offset>(place + rows.offset(b + shift) - first);
      copy_bytes(to + place * bytes, from + first * bytes, (last - first) * bytes);
      if (weights) std::copy(weights + first, weights + last, new_weights + place);
      begin = stop;
    }
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> jagged_permute_cpu(const Tensor& values_in, const Tensor& offsets_in,
                                                              const std::vector<int64_t>& permute,
                                                              const std::vector<int64_t>& strides,
                                                              const OptionalTensor& weights_in,
                                                              std::optional<int64_t> total) {
  const std::vector<int64_t> starts = check_jagged_permute(values_in, offsets_in, permute, strides, weights_in, total);
  const Tensor values = as_contiguous(values_in), offsets = as_contiguous(offsets_in);
  const OptionalTensor weights = as_contiguous(weights_in);
  const Bags rows = jagged_rows(values, offsets);
  if (!total && names_each_once(permute, strides.size())) check_cover(rows);
  else check_offsets(rows);
  Moves moves;
  for (const int64_t feature : permute) {
    const auto f = static_cast<size_t>(feature);
    moves.sources.push_back(starts[f]);
    moves.bags.push_back(moves.bags.back() + strides[f]);
    moves.values.push_back(moves.values.back() + rows.offset(starts[f + 1]) - rows.offset(starts[f]));
  }
  const int64_t bags = moves.bags.back(), chosen = moves.values.back();
  check_value(total.value_or(chosen) == chosen, "total = ", total.value_or(0), ", and the features of permute have ",
              chosen, " values");
  check_fits(chosen, offsets);
  Tensor out = new_tensor(values, {chosen}, values.scalar_type());
  Tensor new_offsets = new_tensor(offsets, {bags + 1}, offsets.scalar_type());
  Tensor new_weights = new_tensor(values, {weights ? chosen : 0}, ScalarType::Float);
  moves.from = static_cast<const char*>(values.const_data_ptr());
  moves.to = static_cast<char*>(out.mutable_data_ptr());
  moves.bytes = static_cast<int64_t>(values.element_size());
  moves.weights = weights ? weights->const_data_ptr<float>() : nullptr;
  moves.new_weights = new_weights.mutable_data_ptr<float>();
  const int64_t cost = chosen * moves.bytes + 8 * bags, workers = workers_for(1 + cost / kFewBytes, 1);
  const int64_t piece = 1 + bags / pieces_for(cost, kFewBytes, workers);
  with_integers(new_offsets, [&](auto* offset) {
    offset[bags] = static_cast<std::remove_pointer_t<decltype(offset)>>(chosen);
    parallel_pieces(bags, piece, workers,
                    [&](int64_t begin, int64_t end, int64_t) { moves.copy(rows, offset, begin, end); });
  });
  return {out, new_offsets, new_weights, good_status(offsets)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { implement<&jagged_permute_cpu>(m, "jagged_permute"); }

}  // namespace rec_kernels
