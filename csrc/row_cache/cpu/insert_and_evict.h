// Insertion into the row cache, set by set, and its dry run for row_cache_plan (docs/numerics.md, "Row cache").
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "core/cpu/radix_sort.h"
#include "core/cpu/scratch.h"
#include "core/prefetch.h"
#include "embedding_bag/cpu/split_bags.h"
#include "row_cache/cpu/tables.h"

namespace rec_kernels {

// State of slots and rows, and statistics of tables; null if the policy does not use them.
struct Memory {
  int64_t *tags, *stamps;
  uint8_t *marks, *dirty, *counts, *row_counts;
  int64_t* stats;
  bool by_part;  // statistics are indexed by part, not by table
};

// An id whose row is not cached.
struct Missing {
  int64_t set, row, part, position;
};

// A row to insert; its ids are Missing [first, last).
struct Candidate {
  int64_t row, part, first, last;
  uint8_t count;
};

// A row to insert into a slot, and the row to evict, or -1 if the slot was empty.
struct Move {
  int64_t slot, row, part, evicted, evicted_part;
  uint8_t evicted_count;
  bool written_back;
};

// Statistics of one worker, summed at the end.
class Counters {
 public:
  explicit Counters(int64_t tables) : counts_(static_cast<size_t>(tables * kCacheStats)) {}
  void add(int64_t table, CacheStat stat, int64_t n = 1) {
    counts_[static_cast<size_t>(table * kCacheStats + stat)] += n;
  }
  void add(const Counters& other) { other.add_to(counts_.data()); }
  void add_to(int64_t* stats) const {
    for (size_t i = 0; i < counts_.size(); ++i) stats[i] += counts_[i];
  }

 private:
  std::vector<int64_t> counts_;
};

class Insertion {
 public:
  Insertion(const BagInput& in, const CacheView& cache, const Memory& memory, const CachedTables& tables, uint64_t salt,
            int64_t clock, int64_t num_tables)
      : in_(in),
        cache_(cache),
        memory_(memory),
        tables_(tables),
        salt_(salt),
        clock_(clock),
        num_tables_(num_tables),
        found_(num_tables) {}

  // Makes run() a dry run; called after prepare(). It moves no row and counts no use, but lists the rows whose bytes in
  // the tables would or might change: evicted rows, and rows that get no slot and are updated in their table. `memory`,
  // except row_counts, is a copy of only the slots of missing_sets(), in that order, and the `slots` of run() are
  // indices into this copy, or -1. `halves`: row counts are halved first.
  void plan_only(const Memory& memory, bool halves) {
    memory_ = memory;
    plans_ = true;
    halves_ = halves;
  }
  // The sets that rows are to be inserted into, ascending.
  std::vector<int64_t> missing_sets() const {
    std::vector<int64_t> out;
    for (int64_t i = 0; i < sets(); ++i) out.push_back(at(start(i)).set);
    return out;
  }
  const std::vector<int64_t>& written() const { return written_; }

  // Allocates all memory, before anything is written. `slots`: per id, as row_cache_lookup returns them.
  void prepare(const int64_t* slots) {
    const int64_t most = sort_by_set(collect(slots));
    workers_.assign(static_cast<size_t>(workers_for(sets(), 8 * kSetsPerPiece)), Worker(num_tables_));
    for (Worker& w : workers_) {
      w.candidates.reserve(static_cast<size_t>(most));
      w.moves.reserve(static_cast<size_t>(2 * kSetsPerBatch * std::min(most, cache_.ways)));
    }
  }

  // Inserts the rows and adds their slots to `slots`, the same array.
  void run(int64_t* slots) {
    touch_all(slots);
    parallel_pieces(sets(), kSetsPerPiece, static_cast<int64_t>(workers_.size()),
                    [&](int64_t begin, int64_t end, int64_t worker) {
                      Worker& w = workers_[static_cast<size_t>(worker)];
                      for (; begin < end; begin += kSetsPerBatch)
                        insert_into(begin, std::min(begin + kSetsPerBatch, end), slots, &w);
                      move_rows(&w, static_cast<int64_t>(w.moves.size()));
                    });
    for (const Worker& w : workers_) {
      add_stats(w.counters);
      written_.insert(written_.end(), w.written.begin(), w.written.end());
    }
    add_stats(found_);
  }

 private:
  static constexpr int64_t kSetsPerPiece = 32;
  static constexpr int64_t kIdsPerBatch = 64;
  static constexpr int64_t kSetsPerBatch = 8;

  struct Worker {
    explicit Worker(int64_t tables) : counters(tables) {}

    Counters counters;
    std::vector<int64_t> written;
    std::vector<Candidate> candidates;  // of the current set
    std::vector<Move> moves;            // pending
    CachedTables::Rows rows{};          // contains the last candidate's row
  };

  const Missing& at(int64_t i) const { return missing_[i]; }
  int64_t start(int64_t set) const { return starts_[static_cast<size_t>(set)]; }
  int64_t sets() const { return static_cast<int64_t>(starts_.size()) - 1; }
  // Index of a part's statistics.
  int64_t table_of(int64_t part) const { return memory_.by_part ? part : int64_t{in_.parts[part].shard.table}; }
  int64_t table_of_row(int64_t row) const { return table_of(tables_.part_of(row)); }
  uint8_t raised(uint8_t count, int64_t row) const { return raised_count(count, row, salt_); }

  void add_stats(const Counters& counters) const {
    if (memory_.stats) counters.add_to(memory_.stats);
  }

  // Calls body(feature, begin, end, worker) for ranges of ids [begin, end) of each feature, in parallel.
  template <class Body>
  void for_ids(const BagSplit& split, const Body& body) const {
    parallel_pieces(in_.bags.num_bags, split.bags_per_piece, split.workers,
                    [&](int64_t begin, int64_t end, int64_t worker) {
                      while (begin < end) {
                        const int64_t feature = in_.bags.feature_of(begin);
                        const int64_t stop = std::min(end, in_.bags.first_bag(feature + 1));
                        body(feature, in_.bags.offset(begin), in_.bags.offset(stop), static_cast<size_t>(worker));
                        begin = stop;
                      }
                    });
  }

  // Collects the ids whose row is not cached, and counts lookups and hits.
  std::vector<Missing> collect(const int64_t* slots) {
    const BagSplit split = split_bags(in_);
    std::vector<Counters> counters(static_cast<size_t>(split.workers), Counters(num_tables_));
    std::vector<std::vector<Missing>> missing(static_cast<size_t>(split.workers));
    for_ids(split, [&](int64_t feature, int64_t begin, int64_t end, size_t worker) {
      read_feature(in_.bags.first_part(feature), begin, end, slots, &missing[worker], &counters[worker]);
    });
    for (const Counters& c : counters) found_.add(c);
    for (size_t i = 1; i < missing.size(); ++i)
      missing[0].insert(missing[0].end(), missing[i].begin(), missing[i].end());
    return std::move(missing[0]);
  }

  // Sorts into missing_ by set, row and position, and fills starts_. Returns the maximum number of rows per set.
  int64_t sort_by_set(const std::vector<Missing>& unsorted) {
    const auto count = static_cast<int64_t>(unsorted.size());
    int64_t sets = 0;  // upper bound of set indices
    for (int64_t p = 0; p < in_.bags.num_parts; ++p)
      sets = std::max(sets, cache_.places[p].first + cache_.places[p].sets);
    const int place_bits = bit_width(static_cast<uint64_t>(count) + 1);
    const uint64_t mask = (uint64_t{1} << place_bits) - 1;
    constexpr int64_t kGrain = 1 << 13;
    const int64_t workers = workers_for(count, kGrain);
    const RowSort sort(count, bit_width(static_cast<uint64_t>(sets)), place_bits);
    const Scratch<uint64_t> sorted(count + 1), other(count + 1);
    uint64_t* entries = sort.first_buffer(sorted.get(), other.get());
    parallel_pieces(count, kGrain, workers, [&](int64_t begin, int64_t end, int64_t) {
      for (int64_t i = begin; i < end; ++i)
        entries[i] =
            static_cast<uint64_t>(unsorted[static_cast<size_t>(i)].set) << place_bits | static_cast<uint64_t>(i);
    });
    sort.sort(sorted.get(), other.get(), workers);
    auto* starts = reinterpret_cast<int64_t*>(other.get());
    const int64_t runs = find_runs(sorted.get(), count, place_bits, 0, starts, workers);
    starts_.assign(starts, starts + runs + 1);
    missing_ = Scratch<Missing>(count + 1);
    std::vector<int64_t> most(static_cast<size_t>(workers));
    parallel_pieces(runs, kSetsPerPiece, workers, [&](int64_t first, int64_t last, int64_t worker) {
      for (int64_t i = start(first); i < start(last); ++i)
        missing_[i] = unsorted[static_cast<size_t>(sorted[i] & mask)];
      for (int64_t set = first; set < last; ++set) {
        int64_t& rows = most[static_cast<size_t>(worker)];
        rows = std::max(rows, sort_rows(missing_.get() + start(set), missing_.get() + start(set + 1)));
      }
    });
    return *std::max_element(most.begin(), most.end());
  }

  // Sorts the ids of one set by row; returns the number of rows.
  static int64_t sort_rows(Missing* begin, Missing* end) {
    std::sort(begin, end, [](const Missing& a, const Missing& b) {
      return a.row != b.row ? a.row < b.row : a.position < b.position;
    });
    int64_t rows = 0;
    for (const Missing* m = begin; m < end; ++m) rows += m == begin || m->row != m[-1].row;
    return rows;
  }

  // Collects ids [begin, end) of a feature with this single part.
  void read_feature(int64_t part, int64_t begin, int64_t end, const int64_t* slots, std::vector<Missing>* missing,
                    Counters* counters) const {
    const CachePlace& place = cache_.places[part];
    if (place.sets == 0) return;
    const Part& f = in_.parts[part];
    const int64_t padding = in_.bags.padding_of(f);
    int64_t hits = 0, lookups = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (slots[i] >= 0) {
        ++hits;
        continue;
      }
      const int64_t id = in_.bags.id(i);
      if (!in_.bags.counts(id, f, padding)) continue;
      ++lookups;
      const int64_t row = f.row_offset + f.row(id);
      missing->push_back({place.set(row), row, part, i});
    }
    counters->add(table_of(part), kLookups, hits + lookups);
    counters->add(table_of(part), kHits, hits);
  }

  // Records the use of all rows that are in slots.
  void touch_all(const int64_t* slots) const {
    for_ids(split_bags(in_), [&](int64_t feature, int64_t begin, int64_t end, size_t) {
      const int64_t part = in_.bags.first_part(feature);
      if (cache_.places[part].sets == 0) return;
      for (; begin < end; begin += kIdsPerBatch) touch_batch(slots, in_.parts[part], begin, end);
    });
  }

  // Records the uses of the first kIdsPerBatch ids of [begin, end). First lists the ids whose row has not been used in
  // this step, without a branch, which would be unpredictable.
  void touch_batch(const int64_t* slots, const Part& f, int64_t begin, int64_t end) const {
    for (int64_t i = begin + kIdsPerBatch; i < std::min(begin + 2 * kIdsPerBatch, end); ++i)
      prefetch_slot(std::max<int64_t>(slots[i], 0));
    int64_t unseen[kIdsPerBatch], count = 0;
    for (int64_t i = begin; i < std::min(begin + kIdsPerBatch, end); ++i) {
      const bool seen = stamp_of(std::max<int64_t>(slots[i], 0)) == clock_;
      unseen[count] = i;
      count += (slots[i] >= 0) & !seen;
    }
    for (int64_t j = 0; j < count; ++j) touch(slots[unseen[j]], f, unseen[j]);
  }

  // Other threads may touch the slot at the same time.
  int64_t stamp_of(int64_t slot) const { return __atomic_load_n(memory_.stamps + slot, __ATOMIC_RELAXED); }
  void prefetch_slot(int64_t slot) const {
    __builtin_prefetch(memory_.stamps + slot, 1);
    if (memory_.counts) __builtin_prefetch(memory_.counts + slot, 1);
  }

  // Several threads may touch a row; the first one raises its count. Later ones, except for ids in the same batch,
  // write nothing, which avoids bouncing the cache line between cores. The row is that of ids[i] in the feature's only
  // part.
  void touch(int64_t slot, const Part& f, int64_t i) const {
    int64_t* stamp = memory_.stamps + slot;
    if (!memory_.counts) return __atomic_store_n(stamp, clock_, __ATOMIC_RELAXED);
    if (__atomic_exchange_n(stamp, clock_, __ATOMIC_RELAXED) == clock_) return;
    memory_.counts[slot] = raised(memory_.counts[slot], f.row_offset + f.row(in_.bags.id(i)));
  }

  // Lists the candidates of one set in the order in which they are inserted.
  void read_candidates(int64_t begin, int64_t end, std::vector<Candidate>* out) const {
    out->clear();
    for (int64_t i = begin; i < end; ++i) {
      if (i > begin && at(i).row == at(i - 1).row) {
        ++out->back().last;
        continue;
      }
      uint8_t count = 0;
      if (memory_.counts) {
        const uint8_t before = memory_.row_counts[at(i).row];
        count = raised(halves_ ? halved_count(before) : before, at(i).row);
        if (!plans_) memory_.row_counts[at(i).row] = count;
      }
      out->push_back({at(i).row, at(i).part, i, i + 1, count});
    }
    if (memory_.counts)
      std::stable_sort(out->begin(), out->end(),
                       [](const Candidate& a, const Candidate& b) { return a.count > b.count; });
  }

  // Chooses slots for the rows of sets [begin, end), prefetches their memory, and moves the rows of the previous sets,
  // whose prefetches have completed. Prefetches are issued back to back, so that their page walks overlap.
  void insert_into(int64_t begin, int64_t end, int64_t* slots, Worker* w) const {
    if (!plans_)
      for (int64_t i = end; i < std::min(end + kSetsPerBatch, sets()); ++i) prefetch_set(i);
    const auto before = static_cast<int64_t>(w->moves.size());
    for (int64_t i = begin; i < end; ++i) {
      read_candidates(start(i), start(i + 1), &w->candidates);
      choose_slots(slots, plans_ ? (i - at(start(i)).set) * cache_.ways : 0, w);
    }
    for (size_t i = static_cast<size_t>(before); i < w->moves.size(); ++i) prefetch_move(w->moves[i]);
    move_rows(w, before);
  }

  void prefetch_move(const Move& m) const {
    tables_.prefetch_slot(m.part, m.slot);
    prefetch_line(memory_.marks + m.slot);
    if (m.evicted < 0) return;
    if (memory_.row_counts) prefetch_line(memory_.row_counts + m.evicted);
    if (m.written_back) tables_.prefetch_row(m.evicted_part, m.evicted);
  }

  // Prefetches the replacement state of set i, and the table rows to insert.
  void prefetch_set(int64_t i) const {
    const int64_t slot = at(start(i)).set * cache_.ways, ways = cache_.ways;
    prefetch_bytes(memory_.tags + slot, ways * 8);
    prefetch_bytes(memory_.stamps + slot, ways * 8);
    prefetch_bytes(memory_.dirty + slot, ways);
    if (memory_.counts) prefetch_bytes(memory_.counts + slot, ways);
    for (int64_t m = start(i); m < start(i + 1); ++m) {
      if (memory_.row_counts) prefetch_line(memory_.row_counts + at(m).row);
      tables_.prefetch_row(at(m).part, at(m).row);
    }
  }

  // `shift`: index of a slot in `memory_` minus its index in the cache.
  void choose_slots(int64_t* slots, int64_t shift, Worker* worker) const {
    Counters* counters = &worker->counters;
    for (const Candidate& c : worker->candidates) {
      if (!worker->rows.contains(c.row)) worker->rows = tables_.rows_of(c.row);
      const int64_t slot = slot_for(c, worker->rows, shift), table = table_of_row(c.row);
      if (slot < 0) {
        counters->add(table, kLeftOut);
        if (plans_) worker->written.push_back(c.row);
        continue;
      }
      evict(slot, c, worker);
      memory_.tags[slot] = c.row;
      memory_.stamps[slot] = clock_;
      memory_.dirty[slot] = 0;
      if (memory_.counts) memory_.counts[slot] = c.count;
      counters->add(table, kInserted);
      for (int64_t i = c.first; i < c.last; ++i) slots[at(i).position] = slot;
    }
  }

  // Returns an empty slot of the row's set, the slot of the victim, or -1. `rows` contains the row. Takes the first
  // minimum of the slots' priorities, without unpredictable branches.
  int64_t slot_for(const Candidate& c, const CachedTables::Rows& rows, int64_t shift) const {
    const int64_t first = at(c.first).set * cache_.ways + shift;
    uint64_t least = kLocked;
    int64_t victim = -1;
    for (int64_t slot = first; slot < first + cache_.ways; ++slot) {
      const int64_t row = memory_.tags[slot];
      if (row >= 0 && !rows.contains(row) && tables_.part_at(slot - shift, row) < 0) continue;
      const uint64_t priority = priority_of(slot);
      victim = priority < least ? slot : victim;
      least = priority < least ? priority : least;
    }
    if (victim < 0 || memory_.tags[victim] < 0) return victim;
    return memory_.counts && c.count <= memory_.counts[victim] ? -1 : victim;
  }

  // Eviction order of slots: empty ones first, locked ones last. Stamps are in (-2^55, 2^55).
  static constexpr uint64_t kLocked = ~uint64_t{0}, kMiddle = uint64_t{1} << 55;
  uint64_t priority_of(int64_t slot) const {
    const int64_t stamp = memory_.stamps[slot];
    const uint64_t count = memory_.counts ? memory_.counts[slot] : uint8_t{0};
    const uint64_t used = count << 56 | ((static_cast<uint64_t>(stamp) + kMiddle) & (kLocked >> 8));
    return memory_.tags[slot] < 0 ? 0 : (stamp == clock_ ? kLocked : used);
  }

  // Records the eviction of the slot's row, if any, and the insertion of the candidate.
  void evict(int64_t slot, const Candidate& c, Worker* worker) const {
    const int64_t row = memory_.tags[slot];
    Move move{slot, c.row, c.part, row, -1, 0, false};
    if (row >= 0) {
      move.evicted_part = tables_.part_of(row);
      move.evicted_count = memory_.counts ? memory_.counts[slot] : uint8_t{0};
      // The update of the previous batch may still make the row dirty.
      const bool may_change = plans_ && memory_.stamps[slot] == clock_ - 1;
      move.written_back = memory_.dirty[slot] || may_change;
      worker->counters.add(table_of(move.evicted_part), kEvicted);
      if (move.written_back && plans_) worker->written.push_back(row);
      else if (move.written_back) worker->counters.add(table_of(move.evicted_part), kWritten);
    }
    if (!plans_) worker->moves.push_back(move);
  }

  // Executes the first `count` moves.
  void move_rows(Worker* worker, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const Move& m = worker->moves[static_cast<size_t>(i)];
      if (m.evicted >= 0 && memory_.counts) memory_.row_counts[m.evicted] = m.evicted_count;
      if (m.written_back) tables_.encode(m.evicted_part, m.evicted, m.slot);
      tables_.decode(m.part, m.row, m.slot);
      memory_.marks[m.slot] = mark_of(m.row);
    }
    worker->moves.erase(worker->moves.begin(), worker->moves.begin() + count);
  }

  const BagInput& in_;
  const CacheView& cache_;
  Memory memory_;
  const CachedTables& tables_;
  uint64_t salt_;
  int64_t clock_, num_tables_;
  Counters found_;  // statistics of collect()
  Scratch<Missing> missing_;
  std::vector<int64_t> starts_;  // start of each set in missing_, and its end
  std::vector<Worker> workers_;
  bool plans_ = false, halves_ = false;
  std::vector<int64_t> written_;
};

}  // namespace rec_kernels
