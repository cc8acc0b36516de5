#include "host/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <utility>

namespace rec_kernels::host {
namespace {

// One call moves at most 2 GiB on Linux.
constexpr int64_t kMostAtOnce = int64_t{1} << 30;

template <class Call>
auto retried(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace

SystemError corrupted(const std::string& text, const std::string& path) { return {EBADMSG, text, path}; }

SystemError refused(int code, const std::string& what, const std::string& path) {
  return {code, what + ": " + std::generic_category().message(code), path};
}

File::File(std::string path, int flags) : path_(std::move(path)) {
  handle_ = retried([&] { return ::open(path_.c_str(), O_RDWR | O_CLOEXEC | flags, 0666); });
  if (handle_ < 0 && errno == ELOOP && (flags & O_NOFOLLOW))
    throw SystemError(errno, "is a symbolic link, and what it names would be overwritten: remove the link", path_);
  if (handle_ < 0) throw refused(errno, flags & O_EXCL ? "cannot be created" : "cannot be opened", path_);
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), handle_(std::exchange(other.handle_, -1)) {}

File::~File() { close(); }

void File::close() noexcept {
  if (handle_ < 0) return;
  ::flock(handle_, LOCK_UN);
  ::close(std::exchange(handle_, -1));
}

int64_t File::size() const {
  // Nothing reads or writes at the file's own position. (fstat has a name that glibc before 2.33 lacks.)
  const off_t end = ::lseek(handle_, 0, SEEK_END);
  if (end < 0) throw refused(errno, "its size cannot be read", path_);
  return end;
}

int64_t File::names() const {
  struct statx found{};
  if (::statx(handle_, "", AT_EMPTY_PATH, STATX_NLINK, &found) != 0)
    throw refused(errno, "the number of its names cannot be read", path_);
  return found.stx_nlink;
}

void File::read(void* to, int64_t bytes, int64_t offset) const {
  for (int64_t done = 0; done < bytes;) {
    const int64_t most = bytes - done < kMostAtOnce ? bytes - done : kMostAtOnce;
    const ssize_t got = retried(
        [&] { return ::pread(handle_, static_cast<char*>(to) + done, most, static_cast<off_t>(offset + done)); });
    if (got < 0) throw refused(errno, join("reading ", most, " bytes at byte ", offset + done), path_);
    if (got == 0)
      throw SystemError(EIO, join("the file ends at byte ", offset + done, ", expected bytes up to ", offset + bytes),
                        path_);
    done += got;
  }
}

void File::write(const void* from, int64_t bytes, int64_t offset) const {
  for (int64_t done = 0; done < bytes;) {
    const int64_t most = bytes - done < kMostAtOnce ? bytes - done : kMostAtOnce;
    const ssize_t put = retried([&] {
      return ::pwrite(handle_, static_cast<const char*>(from) + done, most, static_cast<off_t>(offset + done));
    });
    if (put < 0) throw refused(errno, join("writing ", most, " bytes at byte ", offset + done), path_);
    done += put;
  }
}

void File::truncate(int64_t bytes) const {
  if (retried([&] { return ::ftruncate(handle_, static_cast<off_t>(bytes)); }) != 0)
    throw refused(errno, join("setting its size to ", bytes, " bytes"), path_);
}

void File::sync() const {
  if (retried([&] { return ::fsync(handle_); }) != 0) throw refused(errno, "bringing it to the disk", path_);
}

void File::sync_folder() const {
  const size_t slash = path_.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  const int handle = retried([&] { return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (handle < 0) throw refused(errno, "cannot be opened", folder);
  const int failed = retried([&] { return ::fsync(handle); }) != 0 ? errno : 0;
  ::close(handle);
  if (failed) throw refused(failed, "bringing it to the disk", folder);
}

void File::lock() const {
  if (retried([&] { return ::flock(handle_, LOCK_EX | LOCK_NB); }) == 0) return;
  if (errno == EWOULDBLOCK)
    throw SystemError(errno, "is open already, in this process or another; close it there first", path_);
  throw refused(errno, "cannot be locked", path_);
}

std::string resolved(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> found(::realpath(path.c_str(), nullptr), std::free);
  return found ? found.get() : path;
}

}  // namespace rec_kernels::host
