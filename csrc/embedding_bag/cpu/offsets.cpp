// _offsets_rise: validates the offsets of a batch when it is constructed.
#include "core/boxing.h"
#include "embedding_bag/bags.h"

namespace rec_kernels {
namespace {

// True if offsets [bags + 1] are non-decreasing and in [0, values].
bool offsets_rise(const Tensor& offsets_in, int64_t values) {
  check(offsets_in, "offsets").rank(1).integer();
  check_value(offsets_in.size(0) >= 1, "offsets must have one element more than there are bags, got none");
  const Tensor offsets = as_contiguous(offsets_in);
  Bags bags{};
  bags.offsets = offsets.const_data_ptr();
  bags.offsets64 = offsets.scalar_type() == ScalarType::Long;
  bags.num_offsets = offsets.size(0);
  bags.num_ids = values;
  return bags.bad_offset(0, bags.num_offsets - 1) == kNoBadPosition;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) { define(m, "_offsets_rise(Tensor offsets, int values) -> bool"); }

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { implement<&offsets_rise>(m, "_offsets_rise"); }

}  // namespace rec_kernels
