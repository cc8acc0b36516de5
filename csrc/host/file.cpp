#include "host/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <utility>

namespace rec_kernels::host {
namespace {

template <class Call>
auto retried(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace

SystemError corrupted(const std::string& text, const std::string& path) { return {EBADMSG, text, path}; }

SystemError failed_call(int code, const std::string& what, const std::string& path) {
  return {code, what + ": " + std::generic_category().message(code), path};
}

File::File(std::string path, int flags) : path_(std::move(path)) {
  handle_ = retried([&] { return ::open(path_.c_str(), O_RDWR | O_CLOEXEC | flags, 0666); });
  if (handle_ < 0 && errno == ELOOP && (flags & O_NOFOLLOW))
    throw SystemError(errno, "is a symbolic link, and its target would be overwritten: remove the link", path_);
  if (handle_ < 0) throw failed_call(errno, flags & O_EXCL ? "cannot be created" : "cannot be opened", path_);
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), handle_(std::exchange(other.handle_, -1)) {}

File::~File() { close(); }

void File::close() noexcept {
  if (handle_ < 0) return;
  ::flock(handle_, LOCK_UN);
  ::close(std::exchange(handle_, -1));
}

int64_t File::size() const {
  // Nothing else uses the file position. (glibc before 2.33 does not export fstat.)
  const off_t end = ::lseek(handle_, 0, SEEK_END);
  if (end < 0) throw failed_call(errno, "its size cannot be read", path_);
  return end;
}

int64_t File::link_count() const {
  struct statx found{};
  if (::statx(handle_, "", AT_EMPTY_PATH, STATX_NLINK, &found) != 0)
    throw failed_call(errno, "its number of hard links cannot be read", path_);
  return found.stx_nlink;
}

// Linux transfers at most 2 GiB per call and returns the number of bytes.
void File::read(void* to, int64_t bytes, int64_t offset) const {
  for (int64_t done = 0; done < bytes;) {
    const int64_t left = bytes - done;
    const ssize_t got = retried(
        [&] { return ::pread(handle_, static_cast<char*>(to) + done, left, static_cast<off_t>(offset + done)); });
    if (got < 0) throw failed_call(errno, join("reading ", left, " bytes at byte ", offset + done), path_);
    if (got == 0)
      throw SystemError(
          EIO, join("the file ends at byte ", offset + done, ", expected at least ", offset + bytes, " bytes"), path_);
    done += got;
  }
}

void File::write(const void* from, int64_t bytes, int64_t offset) const {
  write({{const_cast<void*>(from), static_cast<size_t>(bytes)}}, offset);
}

void File::write(std::vector<iovec> ranges, int64_t offset) const {
  int64_t left = 0;
  for (const iovec& range : ranges) left += static_cast<int64_t>(range.iov_len);
  for (iovec* next = ranges.data(); left > 0;) {
    const auto count = static_cast<int>(std::min<int64_t>(ranges.data() + ranges.size() - next, IOV_MAX));
    const ssize_t put = retried([&] { return ::pwritev(handle_, next, count, static_cast<off_t>(offset)); });
    if (put <= 0) throw failed_call(put < 0 ? errno : EIO, join("writing ", left, " bytes at byte ", offset), path_);
    left -= put;
    offset += put;
    auto done = static_cast<size_t>(put);
    for (; left > 0 && done >= next->iov_len; ++next) done -= next->iov_len;
    next->iov_base = static_cast<char*>(next->iov_base) + done;
    next->iov_len -= done;
  }
}

void File::truncate(int64_t bytes) const {
  if (retried([&] { return ::ftruncate(handle_, static_cast<off_t>(bytes)); }) != 0)
    throw failed_call(errno, join("its size cannot be set to ", bytes, " bytes"), path_);
}

void File::sync() const {
  if (retried([&] { return ::fsync(handle_); }) != 0) throw failed_call(errno, "cannot be synced to the disk", path_);
}

void File::sync_folder() const {
  const size_t slash = path_.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  const int handle = retried([&] { return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (handle < 0) throw failed_call(errno, "cannot be opened", folder);
  const int failed = retried([&] { return ::fsync(handle); }) != 0 ? errno : 0;
  ::close(handle);
  if (failed) throw failed_call(failed, "cannot be synced to the disk", folder);
}

void File::lock() const {
  if (retried([&] { return ::flock(handle_, LOCK_EX | LOCK_NB); }) == 0) return;
  if (errno == EWOULDBLOCK)
    throw SystemError(errno, "is open already, in this process or another; close it there first", path_);
  throw failed_call(errno, "cannot be locked", path_);
}

std::string resolved(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> found(::realpath(path.c_str(), nullptr), std::free);
  return found ? found.get() : path;
}

}  // namespace rec_kernels::host
