// A range of virtual memory as large as the data of a row file. Only pages written since they were last dropped have
// physical memory; the others read as zeros.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace rec_kernels::host {

class Window {
 public:
  explicit Window(int64_t num_bytes);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  uint8_t* data() const { return data_; }
  // Releases the memory of whole pages.
  void drop(int64_t offset, int64_t bytes) const;
  // Releases the memory of ranges.
  void drop(const std::vector<iovec>& ranges) const;
  // Populates ranges with zeroed pages before they are written, if the kernel can do so in one call.
  void populate(const std::vector<iovec>& ranges) const;
  static int64_t page_bytes();

 private:
  size_t advise(const std::vector<iovec>& ranges, int advice) const;

  uint8_t* data_;
  int64_t num_bytes_;
  int self_;                                  // pidfd of this process, or -1
  mutable std::atomic<bool> together_{true};  // the kernel accepts several ranges per call
};

}  // namespace rec_kernels::host
