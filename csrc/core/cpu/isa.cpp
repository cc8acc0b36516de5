// Selects the instruction set at run time.
#include "core/cpu/isa.h"

#if defined(RK_NEWER_ISAS)
#include <cpuid.h>
#endif

#include <atomic>
#include <string>

#include "core/boxing.h"
#include "core/stable.h"

namespace rec_kernels {
namespace {

constexpr const char* kIsaNames[] = {"baseline", "v3", "v4"};

#if defined(RK_NEWER_ISAS)
// Features of x86-64-v3 that __builtin_cpu_supports of older compilers does not know. Processors with AVX2 have them,
// but virtual machines may hide them.
bool has_rest_of_v3() {
  unsigned eax, ebx, basic = 0, extended = 0, edx;
  __get_cpuid(1, &eax, &ebx, &basic, &edx);
  __get_cpuid(0x80000001u, &eax, &ebx, &extended, &edx);
  constexpr unsigned kF16cAndMovbe = 1u << 29 | 1u << 22, kLzcnt = 1u << 5;
  return (basic & kF16cAndMovbe) == kF16cAndMovbe && (extended & kLzcnt) != 0;
}
#endif

CpuIsa best_isa() {
#if defined(RK_NEWER_ISAS)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi") ||
      !__builtin_cpu_supports("bmi2") || !has_rest_of_v3())
    return CpuIsa::baseline;
  // x86-64-v4 adds these to v3.
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  return v4 ? CpuIsa::v4 : CpuIsa::v3;
#else
  return CpuIsa::baseline;
#endif
}

std::atomic<CpuIsa>& current() {
  static std::atomic<CpuIsa> isa{best_isa()};
  return isa;
}

std::string get_cpu_isa() { return kIsaNames[static_cast<int>(cpu_isa())]; }

// Selects the kernels of an older instruction set, for tests and benchmarks. Returns the previous one.
std::string set_cpu_isa(std::string name) {
  for (int i = 0; i <= static_cast<int>(best_isa()); ++i)
    if (name == kIsaNames[i]) return kIsaNames[static_cast<int>(current().exchange(static_cast<CpuIsa>(i)))];
  throw_value_error(join("name must be an instruction set of this machine (up to \"",
                         kIsaNames[static_cast<int>(best_isa())], "\"), got \"", name, "\""));
}

}  // namespace

CpuIsa cpu_isa() { return current().load(std::memory_order_relaxed); }

// A fragment, like all files: STABLE_TORCH_LIBRARY of torch 2.10 does not expand the macro RK_LIBRARY.
STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m, "_get_cpu_isa() -> str");
  define(m, "_set_cpu_isa(str name) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CompositeExplicitAutograd, m) {
  implement<&get_cpu_isa>(m, "_get_cpu_isa");
  implement<&set_cpu_isa>(m, "_set_cpu_isa");
}

}  // namespace rec_kernels
