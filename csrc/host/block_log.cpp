#include "host/block_log.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace rec_kernels::host {
namespace {

constexpr char kLogMagic[] = "RKROWLOG";
constexpr uint32_t kLogVersion = 1;
constexpr int64_t kSlotOffset = 4096, kSecondCopy = 2048;  // the copies of the commit are in separate sectors

}  // namespace

struct BlockLog::Commit {
  char magic[8];
  uint32_t version, checksum;
  uint64_t identity;
  int64_t generation, entries;
  uint32_t index_checksum, zero;
  uint64_t digest, zeros;
};

BlockLog::BlockLog(const BlockFile& main)
    : file_(main.path() + ".log", O_CREAT | O_NOFOLLOW),
      checksum_of_(main.block_bytes()),
      block_bytes_(main.block_bytes()),
      num_blocks_(main.num_blocks()),
      identity_(main.identity()) {
  static_assert(sizeof(Commit) == 64 && sizeof(Entry) == 16);
  check_is_log();
  file_.sync_folder();
}

// Rejects a file of this name that is not a log, since logs are emptied. After a crash, a log starts with the magic,
// with zeros if it was not written yet, or with a mixture if the write was torn.
void BlockLog::check_is_log() const {
  char found[sizeof Commit::magic] = {};
  file_.read(found, std::min<int64_t>(file_.size(), sizeof found), 0);
  for (size_t i = 0; i < sizeof found; ++i)
    check_value(found[i] == 0 || found[i] == kLogMagic[i], path(),
                " is not the log of a row file (it does not begin with RKROWLOG), but has the name of the log of ",
                path().substr(0, path().size() - 4), "; move it away, or move the row file");
}

int64_t BlockLog::offset(int64_t slot) const { return kSlotOffset + slot * block_bytes_; }

int64_t BlockLog::bytes() const { return entries_.empty() && !committed_ ? 0 : offset(num_entries()); }

int64_t BlockLog::bookkeeping_bytes() const {
  return static_cast<int64_t>(entries_.capacity() * sizeof(Entry) + table_.capacity() * sizeof(int64_t));
}

// The commit has two copies. The second is durable before the first is written, so a crash leaves either one whole copy
// or zeros in place of the first. Anything else without a whole copy is damage.
std::optional<BlockLog::Commit> BlockLog::read_commit() const {
  bool begun = false;
  for (const int64_t place : {int64_t{0}, kSecondCopy}) {
    Commit commit{};
    const int64_t bytes = std::min<int64_t>(file_.size() - place, sizeof commit);
    if (bytes > 0) file_.read(&commit, bytes, place);
    if (std::memcmp(commit.magic, kLogMagic, sizeof commit.magic) == 0 && commit.checksum == checksum_of(commit))
      return commit;
    const Commit none{};
    begun = begun || (place == 0 && std::memcmp(&commit, &none, sizeof commit) != 0);
  }
  if (begun)
    throw corrupted(join("both copies of the log's commit (bytes 0 to ", sizeof(Commit) - 1, " and ", kSecondCopy,
                         " to ", kSecondCopy + static_cast<int64_t>(sizeof(Commit)) - 1,
                         ") are damaged, and the log may have a generation; move it away to continue without it"),
                    path());
  return std::nullopt;
}

std::optional<int64_t> BlockLog::find_commit() {
  const std::optional<Commit> found = read_commit();
  if (!found) return std::nullopt;
  const Commit& commit = *found;
  check_value(commit.version == kLogVersion, path(), " has version ", commit.version,
              " of the format of logs of row files, expected ", kLogVersion);
  check_value(commit.identity == identity_, path(),
              " is the log of another row file; move it away to continue without it");
  return commit.generation;
}

std::vector<BlockLog::Entry> BlockLog::read_index(const Commit& commit) const {
  const int64_t size = file_.size();
  const bool sound = commit.entries >= 0 && commit.entries <= num_blocks_;
  const int64_t index = offset(sound ? commit.entries : 0), bytes = sound ? commit.entries * 16 : 0;
  if (!sound || size < index + bytes)
    throw corrupted(join("the log has a commit of ", commit.entries, " blocks of generation ", commit.generation,
                         ", but only ", size, " bytes"),
                    path());
  std::vector<Entry> entries(static_cast<size_t>(commit.entries));
  file_.read(entries.data(), bytes, index);
  if (crc32c(entries.data(), static_cast<size_t>(bytes)) != commit.index_checksum)
    throw corrupted(join("the log's index (bytes ", index, " to ", index + bytes - 1, ") is damaged: wrong checksum"),
                    path());
  return entries;
}

void BlockLog::adopt() {
  const Commit commit = read_commit().value();
  const std::vector<Entry> entries = read_index(commit);
  reserve(commit.entries);
  for (const Entry& entry : entries) {
    if (entry.block < 0 || entry.block >= num_blocks_ || find(entry.block) >= 0)
      throw corrupted(join("the log's index names block ", entry.block, " twice or outside [0, ", num_blocks_, ")"),
                      path());
    set_checksum(assign(entry.block), entry.checksum);
  }
  set_committed(commit.generation, commit.digest);
}

size_t BlockLog::place(int64_t block) const {
  const size_t mask = table_.size() - 1;
  size_t i = static_cast<size_t>(static_cast<uint64_t>(block) * 0x9e3779b97f4a7c15 >> 20) & mask;
  while (table_[i] >= 0 && entries_[static_cast<size_t>(table_[i])].block != block) i = (i + 1) & mask;
  return i;
}

int64_t BlockLog::find(int64_t block) const { return table_.empty() ? -1 : table_[place(block)]; }

int64_t BlockLog::assign(int64_t block) {
  const size_t i = place(block);
  if (table_[i] < 0) {
    entries_.push_back({block, 0, 0});
    table_[i] = num_entries() - 1;
  }
  return table_[i];
}

void BlockLog::reserve(int64_t count) {
  const size_t most = std::min(entries_.size() + static_cast<size_t>(count), static_cast<size_t>(num_blocks_));
  if (most > entries_.capacity()) entries_.reserve(std::max(most, 2 * entries_.size()));
  size_t places = std::max<size_t>(table_.size(), 64);
  while (places < 2 * most) places *= 2;
  if (places == table_.size()) return;
  table_.assign(places, -1);
  for (size_t slot = 0; slot < entries_.size(); ++slot)
    table_[place(entries_[slot].block)] = static_cast<int64_t>(slot);
}

std::vector<LogEntry> BlockLog::sorted_entries() const {
  std::vector<LogEntry> sorted;
  sorted.reserve(entries_.size());
  for (const Entry& e : entries_) sorted.push_back({e.block, static_cast<int64_t>(sorted.size()), e.checksum});
  std::sort(sorted.begin(), sorted.end(), [](const LogEntry& a, const LogEntry& b) { return a.block < b.block; });
  return sorted;
}

void BlockLog::make_writable() {
  if (!commit_uncertain_) return;
  const Commit none{};
  for (const int64_t place : {int64_t{0}, kSecondCopy}) file_.write(&none, sizeof none, place);
  file_.sync();
  commit_uncertain_ = false;
}

// After a failed fsync the kernel no longer knows which pages are dirty, so all slots must be written again.
void BlockLog::rewrite() {
  std::vector<uint8_t> block(static_cast<size_t>(block_bytes_));
  for (int64_t slot = 0; slot < num_entries(); ++slot) {
    read(slot, 1, block.data());
    if (checksum_of_(block.data()) != checksum(slot))
      throw corrupted(join("block ", entries_[static_cast<size_t>(slot)].block, " in slot ", slot, " of the log (byte ",
                           offset(slot), ") is damaged: wrong checksum"),
                      path());
    file_.write(block.data(), block_bytes_, offset(slot));
  }
}

void BlockLog::write_commit(int64_t generation, uint64_t digest) {
  make_writable();
  if (must_rewrite_) rewrite();
  const auto bytes = static_cast<size_t>(num_entries()) * sizeof(Entry);
  file_.write(entries_.data(), static_cast<int64_t>(bytes), offset(num_entries()));
  must_rewrite_ = true;  // until the commit succeeds
  file_.sync();
  Commit commit{{}, kLogVersion, 0, identity_, generation, num_entries(), crc32c(entries_.data(), bytes), 0, digest, 0};
  std::memcpy(commit.magic, kLogMagic, sizeof commit.magic);
  commit.checksum = checksum_of(commit);
  commit_uncertain_ = true;
  // Pads each copy to the start of the next part, so that a log without slots has its full size.
  std::vector<uint8_t> half(kSecondCopy);
  std::memcpy(half.data(), &commit, sizeof commit);
  for (const int64_t place : {kSecondCopy, int64_t{0}}) {
    file_.write(half.data(), kSecondCopy, place);
    file_.sync();
  }
  commit_uncertain_ = must_rewrite_ = false;
}

void BlockLog::set_committed(int64_t generation, uint64_t digest) {
  committed_ = true;
  generation_ = generation;
  digest_ = digest;
}

void BlockLog::truncate() {
  file_.truncate(0);
  commit_uncertain_ = must_rewrite_ = false;
}

void BlockLog::discard() {
  if (file_.size() > 0) {
    truncate();
    file_.sync();
  }
  forget();
}

void BlockLog::forget() {
  committed_ = false;
  entries_ = {};
  table_ = {};
}

}  // namespace rec_kernels::host
