#include "host/block_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "core/host_device.h"
#include "host/checksum.h"
#include "host/window.h"

namespace rec_kernels::host {
namespace {

constexpr char kFileMagic[] = "RKROWFIL", kStateMagic[] = "RKROWSTA";
constexpr uint32_t kFileVersion = 1;
constexpr int64_t kPage = 4096, kStateOffset = kPage, kLayoutOffset = 3 * kPage;
constexpr int64_t kMostBytes = int64_t{1} << 46, kMostBlockBytes = int64_t{1} << 26,
                  kMostLayoutBytes = int64_t{1} << 28, kMostStates = int64_t{1} << 62;

struct Header {
  char magic[8];
  uint32_t version, checksum;
  int64_t num_bytes, block_bytes, layout_bytes;
  uint64_t identity, zeros[2];
};
static_assert(sizeof(Header) == 64);

struct State {
  char magic[8];
  uint32_t phase, checksum;
  int64_t sequence, generation;
  uint64_t digest, identity;
};
static_assert(sizeof(State) == 48);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file's integers are little-endian");

int64_t round_up(int64_t bytes, int64_t unit) { return ceil_div(bytes, unit) * unit; }

uint64_t digest_term(int64_t block, uint32_t checksum) {
  if (checksum == 0) return 0;
  uint64_t z = static_cast<uint64_t>(block) * 0x9e3779b97f4a7c15 + checksum;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

// Returns a description of the invalid size, or an empty string.
std::string describe_bad_size(int64_t num_bytes, int64_t block_bytes) {
  const int64_t page = Window::page_bytes();
  if (num_bytes < 0 || num_bytes > kMostBytes)
    return join("num_bytes is ", num_bytes, ", allowed are 0 to ", kMostBytes);
  if (block_bytes < page || block_bytes > kMostBlockBytes || block_bytes & (block_bytes - 1))
    return join("block_bytes is ", block_bytes, ", allowed are powers of two from ", page,
                ", this machine's page size, to ", kMostBlockBytes);
  return {};
}

// Excerpt of a possibly long text around its first difference from another text.
std::string excerpt(const std::string& text, size_t differs) {
  constexpr size_t kBefore = 60, kMost = 400;
  const auto begins = [&](size_t i) {
    return i >= text.size() || (text[i] & 0xc0) != 0x80;
  };  // start of a UTF-8 character
  size_t first = text.size() <= kMost || differs < kBefore ? 0 : differs - kBefore;
  while (!begins(first)) ++first;
  size_t last = std::min(text.size(), first + kMost);
  while (!begins(last)) ++last;
  return join(first ? "..." : "", "'", text.substr(first, last - first), "'", last < text.size() ? "..." : "");
}

}  // namespace

void BlockFile::place(int64_t num_bytes, int64_t block_bytes, int64_t layout_bytes) {
  num_bytes_ = num_bytes;
  block_bytes_ = block_bytes;
  num_blocks_ = ceil_div(num_bytes, block_bytes);
  checksum_offset_ = round_up(kLayoutOffset + layout_bytes, kPage);
  const int64_t end = checksum_offset_ + num_blocks_ * static_cast<int64_t>(sizeof(uint32_t));
  data_offset_ = round_up(end, std::max(kPage, block_bytes));
  file_bytes_ = data_offset_ + num_blocks_ * block_bytes;
}

void BlockFile::check_sizes(int64_t num_bytes, int64_t block_bytes) {
  const std::string wrong = describe_bad_size(num_bytes, block_bytes);
  check_value(wrong.empty(), wrong);
}

BlockFile BlockFile::create(const std::string& path, int64_t num_bytes, int64_t block_bytes,
                            const std::string& layout) {
  const auto layout_bytes = static_cast<int64_t>(layout.size());
  check_value(layout_bytes <= kMostLayoutBytes, "layout has ", layout_bytes, " bytes, allowed are ", kMostLayoutBytes);
  BlockFile created(File(path, O_CREAT | O_EXCL));
  try {
    created.file_.lock();
    created.place(num_bytes, block_bytes, layout_bytes);
    created.checksums_.resize(static_cast<size_t>(created.num_blocks_));
    std::random_device random;
    created.identity_ = uint64_t{random()} << 32 | random();
    created.file_.truncate(created.file_bytes_);
    created.file_.write(layout.data(), layout_bytes, kLayoutOffset);
    created.sequence_ = -1;
    created.write_state(false, 0, 0);
    Header header{{}, kFileVersion, 0, num_bytes, block_bytes, layout_bytes, created.identity_, {}};
    std::memcpy(header.magic, kFileMagic, sizeof header.magic);
    header.checksum = checksum_of(header, layout);
    created.file_.write(&header, sizeof header, 0);
    created.file_.sync();
    created.file_.sync_folder();
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
  return created;
}

BlockFile BlockFile::open(const std::string& path, const std::string& layout) {
  // The log's name is derived from the file's: under another name, a generation in the log would not be found.
  BlockFile opened{File(resolved(path), 0)};
  const int64_t links = opened.file_.link_count();
  check_value(links == 1, opened.path(), " has ", links, " names (hard links), and the log of another ",
              "name may have a newer generation: remove the other names, or make copies of the file and its log");
  opened.file_.lock();
  opened.read_header(layout);
  opened.read_state();
  return opened;
}

void BlockFile::read_header(const std::string& layout) {
  const std::string& path = file_.path();
  const int64_t size = file_.size();
  Header header{};
  if (size >= kLayoutOffset) file_.read(&header, sizeof header, 0);
  check_value(std::memcmp(header.magic, kFileMagic, sizeof header.magic) == 0, path, " is not a row file: it ",
              size < kLayoutOffset ? join("has ", size, " bytes, at least ", kLayoutOffset, " are expected")
                                   : "does not begin with RKROWFIL (or its creation was cut short)");
  check_value(header.version == kFileVersion, path, " has version ", header.version,
              " of the format of row files, expected ", kFileVersion);
  const std::string wrong = describe_bad_size(header.num_bytes, header.block_bytes);
  const bool fits = header.layout_bytes >= 0 && header.layout_bytes <= std::min(size - kLayoutOffset, kMostLayoutBytes);
  std::string found(fits ? static_cast<size_t>(header.layout_bytes) : 0, 0);
  file_.read(found.data(), static_cast<int64_t>(found.size()), kLayoutOffset);
  if (!fits || checksum_of(header, found) != header.checksum)
    throw corrupted("the header (bytes 0 to 63) or the layout (from byte 12288) is damaged: wrong checksum", path);
  check_value(wrong.empty(), path, " cannot be used: ", wrong);
  place(header.num_bytes, header.block_bytes, header.layout_bytes);
  if (size != file_bytes_)
    throw SystemError(EIO, join("the file has ", size, " bytes, but its header requires ", file_bytes_), path);
  identity_ = header.identity;
  if (found == layout) return;
  const auto differs = std::mismatch(found.begin(), found.end(), layout.begin(), layout.end()).first - found.begin();
  check_value(false, path, " was created with another layout: ", excerpt(found, differs), ", expected ",
              excerpt(layout, differs));
}

void BlockFile::read_state() {
  State newest{};
  newest.sequence = -1;
  for (int64_t i = 0; i < 2; ++i) {
    State state;
    file_.read(&state, sizeof state, kStateOffset + i * kPage);
    const bool sound =
        std::memcmp(state.magic, kStateMagic, sizeof state.magic) == 0 && state.checksum == checksum_of(state) &&
        state.identity == identity_ && state.sequence >= 0 && state.sequence < kMostStates && state.sequence % 2 == i &&
        state.phase == static_cast<uint32_t>(i) && state.generation >= 0 && state.generation < kMostStates;
    if (sound && state.sequence > newest.sequence) newest = state;
  }
  if (newest.sequence < 0) throw corrupted("the states at bytes 4096 and 8192 are damaged: wrong checksums", path());
  sequence_ = newest.sequence;
  generation_ = newest.generation;
  being_overwritten_ = newest.phase == 1;
  read_checksums(newest.digest);
}

void BlockFile::read_checksums(uint64_t digest) {
  checksums_.resize(static_cast<size_t>(num_blocks_));
  const auto bytes = num_blocks_ * static_cast<int64_t>(sizeof(uint32_t));
  file_.read(checksums_.data(), bytes, checksum_offset_);
  for (int64_t i = 0; i < num_blocks_; ++i) digest_ += digest_term(i, checksum(i));
  if (!being_overwritten_ && digest_ != digest)
    throw corrupted(join("the checksums of the blocks (bytes ", checksum_offset_, " to ", checksum_offset_ + bytes - 1,
                         ") or the state before them are damaged: wrong digest"),
                    path());
}

uint64_t BlockFile::digest_with(const std::vector<LogEntry>& entries) const {
  uint64_t digest = digest_;
  for (const LogEntry& e : entries)
    digest += digest_term(e.block, e.checksum) - digest_term(e.block, checksum(e.block));
  return digest;
}

void BlockFile::check_digest(const std::vector<LogEntry>& entries, uint64_t digest) const {
  if (digest_with(entries) != digest)
    throw corrupted(join("the checksums of the blocks (from byte ", checksum_offset_, ") are damaged: wrong digest"),
                    path());
}

void BlockFile::read(int64_t first, int64_t count, uint8_t* to) const {
  file_.read(to, count * block_bytes_, offset(first));
}

void BlockFile::write(int64_t first, int64_t count, const uint8_t* from) const {
  file_.write(from, count * block_bytes_, offset(first));
}

void BlockFile::write_state(bool being_overwritten, int64_t generation, uint64_t digest) {
  // Place 0 is for phase 0, place 1 for phase 1, so that the valid state is never overwritten.
  const int64_t place = being_overwritten ? 1 : 0;
  const int64_t sequence = sequence_ % 2 == place ? sequence_ + 2 : sequence_ + 1;
  State state{{}, being_overwritten ? 1u : 0u, 0, sequence, generation, digest, identity_};
  std::memcpy(state.magic, kStateMagic, sizeof state.magic);
  state.checksum = checksum_of(state);
  file_.write(&state, sizeof state, kStateOffset + place * kPage);
  sequence_ = sequence;
}

void BlockFile::begin_overwriting(int64_t generation) {
  if (being_overwritten_) return;
  write_state(true, generation, digest_);
  file_.sync();
  being_overwritten_ = true;
  generation_ = generation;
}

void BlockFile::end_overwriting(const std::vector<LogEntry>& entries, uint64_t digest) {
  check_digest(entries, digest);
  digest_ = digest;
  for (const LogEntry& e : entries) checksums_[static_cast<size_t>(e.block)] = e.checksum;
  write_checksums(entries);
  file_.sync();
  write_state(false, generation_, digest_);
  file_.sync();
  being_overwritten_ = false;
}

// Writes whole pages of checksums; adjacent pages in one call.
void BlockFile::write_checksums(const std::vector<LogEntry>& entries) const {
  constexpr int64_t kPerPage = kPage / static_cast<int64_t>(sizeof(uint32_t));
  for (size_t i = 0; i < entries.size();) {
    const int64_t first = entries[i].block / kPerPage;
    int64_t end = first + 1;
    for (; i < entries.size() && entries[i].block / kPerPage <= end; ++i) end = entries[i].block / kPerPage + 1;
    const int64_t begin = first * kPerPage, count = std::min(end * kPerPage, num_blocks_) - begin;
    file_.write(checksums_.data() + begin, count * static_cast<int64_t>(sizeof(uint32_t)),
                checksum_offset_ + begin * static_cast<int64_t>(sizeof(uint32_t)));
  }
}

}  // namespace rec_kernels::host
