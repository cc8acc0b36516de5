// A file with positional reads and writes; every failed system call throws with the path.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <string>
#include <vector>

#include "host/errors.h"

namespace rec_kernels::host {

class File {
 public:
  // Opens it for reading and writing; `flags` are more flags of open(2).
  File(std::string path, int flags);
  File(File&& other) noexcept;
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const;
  // Number of names (hard links) of the file.
  int64_t names() const;
  // Read or write all bytes, or throw. Thread-safe.
  void read(void* to, int64_t bytes, int64_t offset) const;
  void write(const void* from, int64_t bytes, int64_t offset) const;
  // Writes ranges of memory consecutively.
  void write(std::vector<iovec> ranges, int64_t offset) const;
  void truncate(int64_t bytes) const;
  void sync() const;
  // Makes the file's name durable.
  void sync_folder() const;
  // Locks the file exclusively; throws EWOULDBLOCK if it is open with a lock, in this process or another.
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
