// Huge pages for large tensors in host memory.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "core/boxing.h"
#include "core/stable.h"

namespace rec_kernels {
namespace {

// Advises the system to back a large tensor with huge pages, so that random rows need far fewer page walks. Returns
// false if the system does not support it, or the tensor is too small or not contiguous.
bool advise_huge_pages([[maybe_unused]] const Tensor& t) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  constexpr size_t kWorthIt = size_t{8} << 20;
  const size_t bytes = static_cast<size_t>(t.numel()) * t.element_size();
  if (bytes < kWorthIt || !t.is_contiguous()) return false;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.data_ptr()), end = begin + bytes;
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  return madvise(reinterpret_cast<void*>(first), (end - first) / kPage * kPage, MADV_HUGEPAGE) == 0;
#else
  return false;
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) { define(m, "_advise_huge_pages(Tensor t) -> bool"); }

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { implement<&advise_huge_pages>(m, "_advise_huge_pages"); }

}  // namespace rec_kernels
