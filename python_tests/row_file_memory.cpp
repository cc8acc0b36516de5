// A row file without memory: every allocation of every call fails once, and the call is repeated. System calls transfer
// few bytes at a time.
#include <dirent.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "host/row_file.h"

namespace {

// Number of allocations before one fails, once; if negative, none fails.
std::atomic<int64_t> allocations_left{-1};

void* allocate(size_t bytes) {
  if (allocations_left.load() >= 0 && allocations_left.fetch_sub(1) == 0) throw std::bad_alloc();
  void* const memory = std::malloc(bytes ? bytes : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes); }
void* operator new[](size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

// System calls may transfer less than requested: here a block and a half.
constexpr size_t kMostMoved = 6000;
extern "C" ssize_t pread(int file, void* to, size_t bytes, off_t offset) noexcept {
  return ::syscall(SYS_pread64, file, to, std::min(bytes, kMostMoved), offset);
}
extern "C" ssize_t pwritev(int file, const iovec* ranges, int count, off_t offset) noexcept {
  size_t done = 0;
  for (int i = 0; i < count && done < kMostMoved; ++i) {
    const size_t bytes = std::min(ranges[i].iov_len, kMostMoved - done);
    if (::pwrite(file, ranges[i].iov_base, bytes, offset + static_cast<off_t>(done)) < 0) return -1;
    done += bytes;
  }
  return static_cast<ssize_t>(done);
}

namespace {

using rec_kernels::host::RowFile;
using rec_kernels::host::Span;

constexpr int64_t kBlocks = 40, kBudget = 9, kBytes = 4096;

void insist(bool ok, const char* what, int64_t number) {
  if (ok) return;
  std::fprintf(stderr, "%s: %lld\n", what, static_cast<long long>(number));
  std::abort();
}

int64_t failures = 0;

// Repeats the call with each allocation failing in turn, then with none; `after` checks the state after a failure.
void try_each(const std::function<void()>& call, const std::function<void()>& after) {
  for (int64_t last = 0;; ++last) {
    bool failed = false;
    allocations_left = last;
    try {
      call();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    const bool reached = allocations_left.exchange(-1) < 0;
    if (!failed) {
      if (!reached) return;
      continue;  // an allocation outside of the call failed
    }
    ++failures;
    after();
  }
}

class Trial {
 public:
  explicit Trial(const std::string& folder) : path_(folder + "/rows"), bytes_(kBlocks, 0) {
    try_each([&] { file_ = RowFile::create(path_, kBlocks * kBytes, kBytes, "layout", kBudget * kBytes, 2); },
             [&] { insist(!file_ && access(path_.c_str(), F_OK) != 0, "a file is left", failures); });
  }

  void calls(uint32_t seed, int64_t count) {
    std::mt19937 random(seed);
    for (int64_t i = 0; i < count; ++i) one_call(random);
  }

  void check() {
    for (int64_t b = 0; b < kBlocks; ++b) {
      file_->load({{b, b}}, false);
      holds(b);
    }
    file_->unpin();
  }

  // A block is damaged: the blocks read with it stay intact, whatever fails.
  void damage() {
    for (int64_t b = 2; b < 6; ++b) load({{b, b}}, 7, true, [] {});
    file_->flush(true);
    file_.reset();
    std::FILE* const opened = std::fopen(path_.c_str(), "r+b");
    std::fseek(opened, (4 - kBlocks) * kBytes, SEEK_END);
    std::fputc(8, opened);
    std::fclose(opened);
    file_ = RowFile::open(path_, "layout", kBudget * kBytes, 2, std::nullopt);
    const auto load_damaged = [&] {
      try {
        file_->load({{2, 5}}, false);
        insist(false, "damage was not found", 4);
      } catch (const rec_kernels::host::SystemError&) {
      }
    };
    try_each(load_damaged, [&] {
      for (const int64_t b : {2, 3, 5}) load({{b, b}}, 0, false, [] {});
      for (int64_t b = 10; b < 10 + kBudget; ++b) load({{b, b}}, 0, false, [] {});  // evicts them
    });
  }

  // Reopens the file with the flushed contents.
  void reopen() {
    file_->flush(false);
    file_.reset();
    try_each([&] { file_ = RowFile::open(path_, "layout", kBudget * kBytes, 2, std::nullopt); }, [] {});
    check();
  }

 private:
  void holds(int64_t block) const {
    const uint8_t* const found = file_->window()->data() + block * kBytes;
    const uint8_t value = bytes_[static_cast<size_t>(block)];
    insist(found[0] == value && found[kBytes - 1] == static_cast<uint8_t>(2 * value), "wrong bytes of", block);
  }

  void one_call(std::mt19937& random) {
    std::vector<Span> spans;
    for (int64_t i = 0; i < 4; ++i) {
      const auto block = static_cast<int64_t>(random() % kBlocks);
      spans.push_back({block, block});
    }
    const auto after = [&] { insist(file_->stats().resident_bytes <= kBudget * kBytes, "over budget", failures); };
    switch (random() % 8) {
      case 0:
        return try_each([&] { file_->flush(random() % 2 == 0); }, after);
      case 1:
        return try_each([&] { file_->apply(); }, after);
      case 2:
        file_->unpin();
        return try_each([&] { file_->cancel_prefetch(); }, after);
      case 3:
      case 4:
        file_->unpin();
        file_->cancel_prefetch();
        return try_each([&] { file_->prefetch(spans); }, after);
      default:
        load(spans, static_cast<uint8_t>(random()), random() % 2 == 0, after);
    }
  }

  void load(const std::vector<Span>& spans, uint8_t value, bool write, const std::function<void()>& after) {
    try_each([&] { file_->load(spans, write); }, after);
    for (const Span& span : spans) holds(span.first);
    if (!write) return;
    for (const Span& span : spans) {
      uint8_t* const block = file_->window()->data() + span.first * kBytes;
      std::memset(block, value, kBytes / 2);
      std::memset(block + kBytes / 2, 2 * value, kBytes / 2);
      bytes_[static_cast<size_t>(span.first)] = value;
    }
  }

  const std::string path_;
  std::vector<uint8_t> bytes_;
  std::unique_ptr<RowFile> file_;
};

}  // namespace

// Arguments: an empty folder, a seed, a number of calls.
int main(int, char** arguments) {
  alarm(120);  // ends a call that hangs
  Trial trial(arguments[1]);
  for (uint32_t round = 0; round < 4; ++round) {
    trial.calls(static_cast<uint32_t>(std::atoi(arguments[2])) + round, std::atoi(arguments[3]));
    trial.check();
    trial.reopen();
  }
  trial.damage();
  std::printf("%lld failures\n", static_cast<long long>(failures));
}
