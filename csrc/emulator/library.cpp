// What the tests ask of the emulator itself.
#include "core/stable.h"
#include "emulator/block.h"

namespace rec_kernels {
namespace {

void set_order(int64_t order, int64_t seed) {
  check_value(order >= 0 && order <= 2, "order must be 0 (ascending), 1 (descending) or 2 (random), got ", order);
  emulator::set_order(static_cast<emulator::Order>(order), static_cast<uint64_t>(seed));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) { m.def("_set_order(int order, int seed) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CompositeExplicitAutograd, m) { m.impl("_set_order", TORCH_BOX(&set_order)); }

}  // namespace rec_kernels
