// A file that is read and written at offsets; every refusal of the operating system is an exception with the path.
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
  // All of the bytes, or an exception. Any number of threads at once.
  void read(void* to, int64_t bytes, int64_t offset) const;
  void write(const void* from, int64_t bytes, int64_t offset) const;
  // Writes ranges of memory one behind the other.
  void write(std::vector<iovec> ranges, int64_t offset) const;
  void truncate(int64_t bytes) const;
  void sync() const;
  // Makes the file's name durable.
  void sync_folder() const;
  // Nobody else may have it open with a lock: an exception with EWOULDBLOCK otherwise.
  void lock() const;
  // Gives the lock back, too, also where a forked process still has the file.
  void close() noexcept;

 private:
  std::string path_;
  int handle_;
};

// The path of what `path` names, without symbolic links; `path` itself where there is nothing.
std::string resolved(const std::string& path);

}  // namespace rec_kernels::host
