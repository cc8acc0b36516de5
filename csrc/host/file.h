// A file with positional reads and writes. Every failed system call throws SystemError with the path.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <string>
#include <vector>

#include "host/errors.h"

namespace rec_kernels::host {

class File {
 public:
  // Opens the file for reading and writing; `flags` are additional flags of open(2).
  File(std::string path, int flags);
  File(File&& other) noexcept;
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const;
  int64_t link_count() const;
  // Read or write all bytes, or throw. Thread-safe.
  void read(void* to, int64_t bytes, int64_t offset) const;
  void write(const void* from, int64_t bytes, int64_t offset) const;
  // Writes ranges of memory consecutively.
  void write(std::vector<iovec> ranges, int64_t offset) const;
  void truncate(int64_t bytes) const;
  void sync() const;
  // Makes the file's name durable.
  void sync_folder() const;
  // Locks the file exclusively; throws EWOULDBLOCK if this or another process has it locked.
  void lock() const;
  // Also releases the lock, even if a forked process still has the file open.
  void close() noexcept;

 private:
  std::string path_;
  int handle_;
};

// Resolves symbolic links; returns `path` itself if it does not exist.
std::string resolved(const std::string& path);

}  // namespace rec_kernels::host
