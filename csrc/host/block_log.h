// The log of a row file, `<path>.log`: blocks changed since the generation in the main file.
//
// All integers are little-endian; gaps between the parts are zeros.
//
//   byte 0,     the commit, 64 bytes, twice: magic "RKROWLOG"; u32 version = 1; u32 CRC32C of these 64 bytes (with
//   byte 2048   this field zero); u64 identity of the main file; i64 generation, one more than the main file's;
//               i64 entries; u32 CRC32C of the index; u32 zero; u64 digest of the main file's checksums once the blocks
//               are there (block_file.h); zeros. Written once everything below is durable. If it is zeros, the log is
//               ignored; anything else without a whole copy is damage.
//   byte 4096   slots, block_bytes each: the blocks, in the order in which they were first logged.
//   then        index, 16 bytes for each slot: i64 block; u32 checksum of the block, as in the main file; u32 zero.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "host/block_file.h"
#include "host/checksum.h"
#include "host/file.h"

namespace rec_kernels::host {

// The owner's mutex guards the entries. Slots can be read and written by any thread without it; the rest of the file
// only by one thread.
class BlockLog {
 public:
  // Throws ValueError if the file with the log's name is not a log.
  explicit BlockLog(const BlockFile& main);

  const std::string& path() const { return file_.path(); }
  // True if the log has a complete generation that the main file does not have.
  bool committed() const { return committed_; }
  int64_t generation() const { return generation_; }
  uint64_t digest() const { return digest_; }
  int64_t num_entries() const { return static_cast<int64_t>(entries_.size()); }
  int64_t bytes() const;
  int64_t bookkeeping_bytes() const;

  // Returns the generation of the file's commit, if any; adopt() then loads its index.
  std::optional<int64_t> find_commit();
  void adopt();

  // Slot of the block, or -1.
  int64_t find(int64_t block) const;
  // Reserves memory for `count` more entries, before assign().
  void reserve(int64_t count);
  // Slot of the block, newly assigned if it has none.
  int64_t assign(int64_t block);
  uint32_t checksum(int64_t slot) const { return entries_[static_cast<size_t>(slot)].checksum; }
  void set_checksum(int64_t slot, uint32_t checksum) { entries_[static_cast<size_t>(slot)].checksum = checksum; }
  // Entries sorted by block.
  std::vector<LogEntry> sorted_entries() const;

  // Read or write adjacent slots.
  void read(int64_t first, int64_t count, uint8_t* to) const { file_.read(to, count * block_bytes_, offset(first)); }
  void write(int64_t first, std::vector<iovec> blocks) const { file_.write(std::move(blocks), offset(first)); }
  int64_t offset(int64_t slot) const;

  // Removes a partially written commit; must be called before slots are written.
  void make_writable();
  // Commits the entries durably; the owner then calls set_committed.
  void write_commit(int64_t generation, uint64_t digest);
  void set_committed(int64_t generation, uint64_t digest);
  // Empties the file once its blocks are in the main file or no longer needed; then call forget() to clear the entries.
  void truncate();
  void forget();
  // truncate() and forget(), for a log without a valid commit.
  void discard();
  void close() noexcept { file_.close(); }

 private:
  struct Entry {
    int64_t block;
    uint32_t checksum, zero;
  };
  struct Commit;

  void check_is_log() const;
  std::optional<Commit> read_commit() const;
  std::vector<Entry> read_index(const Commit& commit) const;
  void rewrite();
  size_t place(int64_t block) const;

  File file_;
  BlockChecksum checksum_of_;
  int64_t block_bytes_, num_blocks_;
  uint64_t identity_;
  bool committed_ = false;
  bool commit_uncertain_ = false;  // a commit that was reported as failed may be on the disk
  bool must_rewrite_ = false;      // a failed commit may have lost slots: the next one rewrites all of them
  int64_t generation_ = 0;
  uint64_t digest_ = 0;
  std::vector<Entry> entries_;  // by slot
  std::vector<int64_t> table_;  // open addressing: slot by block, -1 if empty; at most half full
};

}  // namespace rec_kernels::host
