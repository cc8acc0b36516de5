// What the CPU library knows of itself: the instruction sets compiled in and the one in use.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>
#include <string>

#include "core/boxing.h"
#include "core/cpu_isa.h"
#include "core/stable.h"

namespace rec_kernels {
namespace {

constexpr const char* kIsaNames[] = {"baseline", "v3", "v4"};

CpuIsa best_isa() {
#if defined(__x86_64__)
  // What x86-64-v4 adds to v3 (whose features every such machine has).
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx2"))
    return CpuIsa::v4;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return CpuIsa::v3;
#endif
  return CpuIsa::baseline;
}

std::atomic<CpuIsa>& current() {
  static std::atomic<CpuIsa> isa{best_isa()};
  return isa;
}

std::string get_cpu_isa() { return kIsaNames[static_cast<int>(cpu_isa())]; }

// For tests and benchmarks: run the kernels of an older instruction set. Returns the one in use before.
std::string set_cpu_isa(std::string name) {
  for (int i = 0; i <= static_cast<int>(best_isa()); ++i)
    if (name == kIsaNames[i]) return kIsaNames[static_cast<int>(current().exchange(static_cast<CpuIsa>(i)))];
  throw_value_error(join("name must be an instruction set of this machine (up to \"",
                         kIsaNames[static_cast<int>(best_isa())], "\"), got \"", name, "\""));
}

// Asks the system to back a large tensor with huge pages: a random row then costs a page walk far less often. Advice
// only; false where the system has none to take or the tensor is too small to gain.
bool advise_huge_pages([[maybe_unused]] const Tensor& t) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  constexpr size_t kWorthIt = size_t{8} << 20;
  const size_t bytes = static_cast<size_t>(t.numel()) * t.element_size();
  if (bytes < kWorthIt) return false;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.data_ptr()), end = begin + bytes;
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  return madvise(reinterpret_cast<void*>(first), (end - first) / kPage * kPage, MADV_HUGEPAGE) == 0;
#else
  return false;
#endif
}

}  // namespace

CpuIsa cpu_isa() { return current().load(std::memory_order_relaxed); }

STABLE_TORCH_LIBRARY(RK_LIBRARY, m) {
  define(m, "_get_cpu_isa() -> str");
  define(m, "_set_cpu_isa(str name) -> str");
  define(m, "_advise_huge_pages(Tensor t) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CompositeExplicitAutograd, m) {
  implement<&get_cpu_isa>(m, "_get_cpu_isa");
  implement<&set_cpu_isa>(m, "_set_cpu_isa");
}

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { implement<&advise_huge_pages>(m, "_advise_huge_pages"); }

}  // namespace rec_kernels
