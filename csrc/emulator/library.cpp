// Ops that tests use to control the emulator.
#include <utility>

#include "core/boxing.h"
#include "core/stable.h"
#include "emulator/launch.h"

namespace rec_kernels {
namespace {

void set_order(int64_t order, int64_t seed) {
  check_value(order >= 0 && order <= 2, "order must be 0 (ascending), 1 (descending) or 2 (random), got ", order);
  emulator::set_order(static_cast<emulator::Order>(order), static_cast<uint64_t>(seed));
}

void set_pinned(bool pinned) { memory_is_pinned = pinned; }

int64_t count_nodes() { return std::exchange(graph_nodes, 0); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m, "_set_order(int order, int seed) -> ()");
  define(m, "_set_pinned(bool pinned) -> ()");
  define(m, "_count_nodes() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CompositeExplicitAutograd, m) {
  implement<&set_order>(m, "_set_order");
  implement<&set_pinned>(m, "_set_pinned");
  implement<&count_nodes>(m, "_count_nodes");
}

}  // namespace rec_kernels
