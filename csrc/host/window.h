// A range of virtual memory as large as the data of a row file. Memory is behind those of its pages that were written
// and not dropped since; the others read as zeros.
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
  // Gives the memory of whole pages back.
  void drop(int64_t offset, int64_t bytes) const;
  // Drops ranges of addresses.
  void drop(const std::vector<iovec>& ranges) const;
  // Gives ranges of addresses memory, of zeros, before they are written to, where the kernel does so for all at once.
  void populate(const std::vector<iovec>& ranges) const;
  static int64_t page_bytes();

 private:
  size_t advise(const std::vector<iovec>& ranges, int advice) const;

  uint8_t* data_;
  int64_t num_bytes_;
  int self_;                                  // a handle of this process, or -1
  mutable std::atomic<bool> together_{true};  // whether the kernel takes several ranges at once
};

}  // namespace rec_kernels::host
