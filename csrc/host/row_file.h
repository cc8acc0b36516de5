// Embedding tables in a file that is larger than memory: a window of virtual memory into which blocks are loaded and
// from which they are evicted. docs/row_file.md has the contract and explains why a crash leaves one generation or the
// next; block_file.h and block_log.h have the format.
//
// One call at a time (`turn_`) changes which blocks are loaded, while the pool's threads process the chunks of its
// batch. A chunk evicts blocks, then loads at least as many, so memory stays within the budget in any order of chunks.
// `mutex_` guards all state; files are read and written without it.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "host/block_file.h"
#include "host/block_log.h"
#include "host/block_table.h"
#include "host/checksum.h"
#include "host/io_pool.h"
#include "host/window.h"

namespace rec_kernels::host {

struct Move;

// The blocks, first to last inclusive, that a range of bytes overlaps.
struct Span {
  int64_t first, last;
};

struct RowFileStats {
  int64_t loads = 0, hits = 0, prefetched = 0;
  int64_t blocks_read = 0, blocks_written = 0;
  int64_t resident_bytes = 0, dirty_bytes = 0, log_bytes = 0, bookkeeping_bytes = 0;
};

class RowFile {
 public:
  static std::unique_ptr<RowFile> create(const std::string& path, int64_t num_bytes, int64_t block_bytes,
                                         const std::string& layout, int64_t memory_budget, int64_t threads);
  static std::unique_ptr<RowFile> open(const std::string& path, const std::string& layout, int64_t memory_budget,
                                       int64_t threads, std::optional<int64_t> generation);
  ~RowFile();

  // The blocks of n byte ranges; sizes has 1 or n elements.
  std::vector<Span> spans(const int64_t* starts, const int64_t* sizes, int64_t n, bool one_size) const;

  void load(const std::vector<Span>& spans, bool write);
  void prefetch(const std::vector<Span>& spans);
  void mark_dirty(const std::vector<Span>& spans);
  void unpin();
  void cancel_prefetch();
  int64_t flush(bool apply);
  void apply();
  void close();

  bool closed() const;
  int64_t generation() const;
  RowFileStats stats() const;
  const std::shared_ptr<Window>& window() const { return window_; }
  const std::string& path() const { return main_.path(); }
  uint64_t identity() const { return main_.identity(); }
  int64_t num_bytes() const { return main_.num_bytes(); }
  int64_t block_bytes() const { return main_.block_bytes(); }
  int64_t memory_budget() const { return memory_budget_; }
  bool is_owner_process() const;

 private:
  struct Batch;
  using Lock = std::unique_lock<std::mutex>;

  RowFile(BlockFile main, int64_t memory_budget, int64_t threads);
  void recover(std::optional<int64_t> generation);
  Lock locked(std::mutex& mutex) const;
  Lock begin_call();

  std::vector<int64_t> mark_wanted(const std::vector<Span>& spans);
  void clear_wanted(const std::vector<int64_t>& wanted);
  int64_t count(const std::vector<int64_t>& blocks, uint8_t any) const;
  void check_budget(const char* call, const std::vector<Span>& spans, const std::vector<int64_t>& wanted,
                    int64_t others) const;
  void prepare_log(Lock& lock, const std::vector<int64_t>& wanted);
  std::shared_ptr<Batch> plan(const std::vector<int64_t>& wanted);
  void load_pinned(Lock& lock);
  void release_pins();
  void end_prefetch(Lock& lock);
  void wait_for_prefetches(Lock& lock);

  // Process a chunk, on any thread.
  void execute(Batch& batch, int64_t chunk);
  bool evict_victims(Batch& batch, int64_t chunk, std::exception_ptr& error);
  void read_run(Batch& batch, size_t first, size_t last, std::exception_ptr& error);
  void finish_chunk(Batch& batch, int64_t chunk, bool room, const std::exception_ptr& error);
  void write_to_log(Move* first, Move* last) const;
  void mark_written(const Move& move);
  SystemError damaged(const Move& read) const;

  std::exception_ptr in_chunks(int64_t count, const std::function<void(int64_t, int64_t)>& work);
  void write_dirty(Lock& lock);
  void check_log();
  void copy_log_to_main(Lock& lock);
  void copy_entries(const LogEntry* entries, int64_t count) const;
  void read_entries(const LogEntry* entries, int64_t count, uint8_t* to) const;
  uint8_t* address(int64_t block) const { return window_->data() + block * block_bytes_; }

  BlockFile main_;
  const int64_t block_bytes_, memory_budget_;
  const BlockChecksum checksum_of_;
  const std::shared_ptr<Window> window_;
  const pid_t process_;

  std::mutex turn_;  // locked before mutex_
  mutable std::mutex mutex_;
  std::condition_variable chunk_finished_;  // a chunk has finished
  BlockTable table_;
  RowFileStats counts_;
  int64_t generation_ = 0;
  bool owns_log_ = false;  // recover() has examined the existing log, so this object may empty it
  bool closed_ = false;
  std::vector<int64_t> pinned_;                    // by the last load
  std::vector<int64_t> prefetched_;                // may include blocks whose prefetch has failed
  std::vector<std::shared_ptr<Batch>> in_flight_;  // prefetches in progress
  int64_t background_chunks_ = 0;
  std::unique_ptr<IoPool> pool_;  // reset first when closing
  BlockLog log_;                  // last member: no log file is created if an earlier member throws
};

}  // namespace rec_kernels::host
