#include "host/window.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <system_error>

#include "host/errors.h"

namespace rec_kernels::host {
namespace {

// Raw system calls: the C library and headers may be older than the kernel.
int handle_of_this_process() {
#if defined(SYS_pidfd_open) && defined(SYS_process_madvise)
  return static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0));
#else
  return -1;
#endif
}

#if !defined(MADV_POPULATE_WRITE)
constexpr int MADV_POPULATE_WRITE = 23;
#endif

// Returns the number of bytes advised, or -1.
int64_t advise_together([[maybe_unused]] int process, [[maybe_unused]] const iovec* ranges,
                        [[maybe_unused]] size_t count, [[maybe_unused]] int advice) {
#if defined(SYS_pidfd_open) && defined(SYS_process_madvise)
  return ::syscall(SYS_process_madvise, process, ranges, count, advice, 0);
#else
  return -1;
#endif
}

}  // namespace

Window::Window(int64_t num_bytes) : num_bytes_(num_bytes > 0 ? num_bytes : page_bytes()) {
  void* address = ::mmap(nullptr, static_cast<size_t>(num_bytes_), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED)
    throw BudgetError(join("cannot reserve ", num_bytes_,
                           " bytes of virtual memory for the window: ", std::generic_category().message(errno)));
  data_ = static_cast<uint8_t*>(address);
  self_ = handle_of_this_process();
  // Huge pages would allocate memory for blocks that are not loaded. On kernels without them the call fails,
  // harmlessly.
  ::madvise(address, static_cast<size_t>(num_bytes_), MADV_NOHUGEPAGE);
}

Window::~Window() {
  ::munmap(data_, static_cast<size_t>(num_bytes_));
  if (self_ >= 0) ::close(self_);
}

void Window::drop(int64_t offset, int64_t bytes) const {
  // Fails only if the process has locked all its memory.
  if (bytes > 0) ::madvise(data_ + offset, static_cast<size_t>(bytes), MADV_DONTNEED);
}

// Each call interrupts every processor that runs this process (TLB shootdown), which takes longer than reading a block.
// Newer kernels accept many ranges per call and interrupt only once.
void Window::drop(const std::vector<iovec>& ranges) const {
  for (size_t next = advise(ranges, MADV_DONTNEED); next < ranges.size(); ++next)
    drop(static_cast<const uint8_t*>(ranges[next].iov_base) - data_, static_cast<int64_t>(ranges[next].iov_len));
}

// Without kernel support, reads cause page faults instead.
void Window::populate(const std::vector<iovec>& ranges) const { advise(ranges, MADV_POPULATE_WRITE); }

// Advises ranges in batches; returns the number of leading ranges that were advised.
size_t Window::advise(const std::vector<iovec>& ranges, int advice) const {
  size_t next = 0;
  while (self_ >= 0 && together_ && next + 1 < ranges.size()) {
    const size_t count = std::min<size_t>(ranges.size() - next, IOV_MAX);
    const int64_t advised = advise_together(self_, ranges.data() + next, count, advice);
    if (advised < 0 && advice == MADV_DONTNEED) together_ = false;
    int64_t left = advised;
    size_t end = next;
    while (end < next + count && left >= static_cast<int64_t>(ranges[end].iov_len))
      left -= static_cast<int64_t>(ranges[end++].iov_len);
    if (end == next) break;
    next = end;
  }
  return next;
}

int64_t Window::page_bytes() { return ::sysconf(_SC_PAGESIZE); }

}  // namespace rec_kernels::host
