// Insertion into the row cache, set by set, and what it would do: docs/numerics.md, "Row cache".
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

// State of slots and rows, and statistics of tables; null where the policy has none.
struct Memory {
  int64_t *tags, *stamps;
  uint8_t *marks, *dirty, *counts, *row_counts;
  int64_t* stats;
  bool by_part;  // statistics are of parts, not of tables
};

// An id whose row is in no slot.
struct Missing {
  int64_t set, row, part, position;
};

// A row that wants a slot of its set: Missing [first, last) name it.
struct Candidate {
  int64_t row, part, first, last;
  uint8_t count;
};

// A row that comes into a slot, and the one that leaves it: -1 if the slot was empty.
struct Move {
  int64_t slot, row, part, leaves, part_left;
  uint8_t count_left;
  bool written_back;
};

// Statistics of one worker: added up at the end.
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

  // After prepare(), from here on no row is moved and no use of a row counted: the rows are listed whose bytes in the
  // tables would change, or may have to by the time of the insertion: those that leave, and those that are left out,
  // which are updated where they are. `memory`, but for row_counts, is a copy of the slots of missing_sets() alone, in
  // their order, and `slots` of run() are numbers there, or -1. `halves`: counts of rows first.
  void only_plan(const Memory& memory, bool halves) {
    memory_ = memory;
    plans_ = true;
    halves_ = halves;
  }
  // Those that rows are missing in, ascending.
  std::vector<int64_t> missing_sets() const {
    std::vector<int64_t> numbers;
    for (int64_t i = 0; i < sets(); ++i) numbers.push_back(at(start(i)).set);
    return numbers;
  }
  const std::vector<int64_t>& written() const { return written_; }

  // All that may fail for want of memory: nothing is written. `slots`: of the ids, as row_cache_lookup finds them.
  void prepare(const int64_t* slots) {
    const int64_t most = sort_by_set(collect(slots));
    workers_.assign(static_cast<size_t>(workers_for(sets(), 8 * kSetsAtOnce)), Worker(num_tables_));
    for (Worker& w : workers_) {
      w.candidates.reserve(static_cast<size_t>(most));
      w.moves.reserve(static_cast<size_t>(2 * kSetsTogether * std::min(most, cache_.ways)));
    }
  }

  // `slots`: the same, completed with those of the rows that come in.
  void run(int64_t* slots) {
    touch_all(slots);
    parallel_pieces(sets(), kSetsAtOnce, static_cast<int64_t>(workers_.size()),
                    [&](int64_t begin, int64_t end, int64_t worker) {
                      Worker& w = workers_[static_cast<size_t>(worker)];
                      for (; begin < end; begin += kSetsTogether)
                        insert_into(begin, std::min(begin + kSetsTogether, end), slots, &w);
                      move_rows(&w, static_cast<int64_t>(w.moves.size()));
                    });
    for (const Worker& w : workers_) {
      add_up(w.counters);
      written_.insert(written_.end(), w.written.begin(), w.written.end());
    }
    add_up(found_);
  }

 private:
  static constexpr int64_t kSetsAtOnce = 32;
  static constexpr int64_t kIdsTogether = 64;
  static constexpr int64_t kSetsTogether = 8;

  struct Worker {
    explicit Worker(int64_t tables) : counters(tables) {}

    Counters counters;
    std::vector<int64_t> written;
    std::vector<Candidate> candidates;  // of one set
    std::vector<Move> moves;            // that are still to be made
    CachedTables::Rows rows{};          // around the last candidate's
  };

  const Missing& at(int64_t i) const { return missing_[i]; }
  int64_t start(int64_t set) const { return starts_[static_cast<size_t>(set)]; }
  int64_t sets() const { return static_cast<int64_t>(starts_.size()) - 1; }
  // Table that a part's statistics count for.
  int64_t table_of(int64_t part) const { return memory_.by_part ? part : int64_t{in_.parts[part].shard.table}; }
  int64_t table_of_row(int64_t row) const { return table_of(tables_.part_of(row)); }
  uint8_t raised(uint8_t count, int64_t row) const { return raised_count(count, row, salt_); }

  void add_up(const Counters& counters) const {
    if (memory_.stats) counters.add_to(memory_.stats);
  }

  // body(feature, begin, end, worker) for ids [begin, end) of a feature; those of all features, split among workers.
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

  // The ids of rows that are in no slot; counts all.
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

  // Fills missing_ and starts_: by set, row and position. Returns the most rows of a set.
  int64_t sort_by_set(const std::vector<Missing>& unsorted) {
    const auto count = static_cast<int64_t>(unsorted.size());
    int64_t sets = 0;  // of the cache
    for (int64_t p = 0; p < in_.bags.num_parts; ++p)
      sets = std::max(sets, cache_.places[p].first + cache_.places[p].sets);
    const int place_bits = bit_width(static_cast<uint64_t>(count) + 1);
    const uint64_t mask = (uint64_t{1} << place_bits) - 1;
    constexpr int64_t kAtOnce = 1 << 13;
    const int64_t workers = workers_for(count, kAtOnce);
    const RowSort sort(count, bit_width(static_cast<uint64_t>(sets)), place_bits);
    const Scratch<uint64_t> sorted(count + 1), other(count + 1);
    uint64_t* entries = sort.first_buffer(sorted.get(), other.get());
    parallel_pieces(count, kAtOnce, workers, [&](int64_t begin, int64_t end, int64_t) {
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
    parallel_pieces(runs, kSetsAtOnce, workers, [&](int64_t first, int64_t last, int64_t worker) {
      for (int64_t i = start(first); i < start(last); ++i)
        missing_[i] = unsorted[static_cast<size_t>(sorted[i] & mask)];
      for (int64_t set = first; set < last; ++set) {
        int64_t& rows = most[static_cast<size_t>(worker)];
        rows = std::max(rows, sort_rows(missing_.get() + start(set), missing_.get() + start(set + 1)));
      }
    });
    return *std::max_element(most.begin(), most.end());
  }

  // Sorts the rows of one set; returns their number.
  static int64_t sort_rows(Missing* begin, Missing* end) {
    std::sort(begin, end, [](const Missing& a, const Missing& b) {
      return a.row != b.row ? a.row < b.row : a.position < b.position;
    });
    int64_t rows = 0;
    for (const Missing* m = begin; m < end; ++m) rows += m == begin || m->row != m[-1].row;
    return rows;
  }

  // Ids [begin, end) of a feature whose part this is.
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

  // Marks the rows that are in slots.
  void touch_all(const int64_t* slots) const {
    for_ids(split_bags(in_), [&](int64_t feature, int64_t begin, int64_t end, size_t) {
      const int64_t part = in_.bags.first_part(feature);
      if (cache_.places[part].sets == 0) return;
      for (; begin < end; begin += kIdsTogether) touch_some(slots, in_.parts[part], begin, end);
    });
  }

  // Marks those of the first ids of [begin, end). The ids of rows that were not seen in this step are listed before,
  // without a branch: whether a row was seen cannot be guessed.
  void touch_some(const int64_t* slots, const Part& f, int64_t begin, int64_t end) const {
    for (int64_t i = begin + kIdsTogether; i < std::min(begin + 2 * kIdsTogether, end); ++i)
      prefetch_slot(std::max<int64_t>(slots[i], 0));
    int64_t fresh[kIdsTogether], count = 0;
    for (int64_t i = begin; i < std::min(begin + kIdsTogether, end); ++i) {
      const bool seen = stamp_of(std::max<int64_t>(slots[i], 0)) == clock_;
      fresh[count] = i;
      count += (slots[i] >= 0) & !seen;
    }
    for (int64_t j = 0; j < count; ++j) touch(slots[fresh[j]], f, fresh[j]);
  }

  // Other threads may touch the slot at the same time.
  int64_t stamp_of(int64_t slot) const { return __atomic_load_n(memory_.stamps + slot, __ATOMIC_RELAXED); }
  void prefetch_slot(int64_t slot) const {
    __builtin_prefetch(memory_.stamps + slot, 1);
    if (memory_.counts) __builtin_prefetch(memory_.counts + slot, 1);
  }

  // Many ids may name a row, and many threads may see them: the first of all raises the count. Those after it, but
  // for ids that were listed with it, write nothing, for which cores would have to pass the memory on. The row is that
  // of id i of a feature's only part.
  void touch(int64_t slot, const Part& f, int64_t i) const {
    int64_t* stamp = memory_.stamps + slot;
    if (!memory_.counts) return __atomic_store_n(stamp, clock_, __ATOMIC_RELAXED);
    if (__atomic_exchange_n(stamp, clock_, __ATOMIC_RELAXED) == clock_) return;
    memory_.counts[slot] = raised(memory_.counts[slot], f.row_offset + f.row(in_.bags.id(i)));
  }

  // Reads the candidates of one set, in the order in which they are served.
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

  // Sets [begin, end) take their rows in; the rows of the sets before them move meanwhile, whose memory has come.
  // Memory of many rows is asked for in one go: each costs a walk through the page table, and walks overlap if nothing
  // else lies between them.
  void insert_into(int64_t begin, int64_t end, int64_t* slots, Worker* w) const {
    if (!plans_)
      for (int64_t i = end; i < std::min(end + kSetsTogether, sets()); ++i) prefetch_set(i);
    const auto before = static_cast<int64_t>(w->moves.size());
    for (int64_t i = begin; i < end; ++i) {
      read_candidates(start(i), start(i + 1), &w->candidates);
      take_in(slots, plans_ ? (i - at(start(i)).set) * cache_.ways : 0, w);
    }
    for (size_t i = static_cast<size_t>(before); i < w->moves.size(); ++i) prefetch_move(w->moves[i]);
    move_rows(w, before);
  }

  void prefetch_move(const Move& m) const {
    tables_.prefetch_slot(m.part, m.slot);
    prefetch_line(memory_.marks + m.slot);
    if (m.leaves < 0) return;
    if (memory_.row_counts) prefetch_line(memory_.row_counts + m.leaves);
    if (m.written_back) tables_.prefetch_row(m.part_left, m.leaves);
  }

  // Prefetches the state that decides in set i, and the rows that are read for it.
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

  // `shift`: how far behind the cache's slots those of the set lie in `memory_`.
  void take_in(int64_t* slots, int64_t shift, Worker* worker) const {
    Counters* counters = &worker->counters;
    for (const Candidate& c : worker->candidates) {
      if (!worker->rows.have(c.row)) worker->rows = tables_.rows_around(c.row);
      const int64_t slot = slot_for(c, worker->rows, shift), table = table_of_row(c.row);
      if (slot < 0) {
        counters->add(table, kLeftOut);
        if (plans_) worker->written.push_back(c.row);
        continue;
      }
      leave(slot, c, worker);
      memory_.tags[slot] = c.row;
      memory_.stamps[slot] = clock_;
      memory_.dirty[slot] = 0;
      if (memory_.counts) memory_.counts[slot] = c.count;
      counters->add(table, kInserted);
      for (int64_t i = c.first; i < c.last; ++i) slots[at(i).position] = slot;
    }
  }

  // An empty slot of the row's set, or that of the victim, or -1. `rows`: among which it is. Without branches that are
  // hard to guess: the first smallest of numbers that sort as the rule says.
  int64_t slot_for(const Candidate& c, const CachedTables::Rows& rows, int64_t shift) const {
    const int64_t first = at(c.first).set * cache_.ways + shift;
    uint64_t least = kLocked;
    int64_t victim = -1;
    for (int64_t slot = first; slot < first + cache_.ways; ++slot) {
      const int64_t row = memory_.tags[slot];
      if (row >= 0 && !rows.have(row) && tables_.part_at(slot - shift, row) < 0) continue;
      const uint64_t priority = priority_of(slot);
      victim = priority < least ? slot : victim;
      least = priority < least ? priority : least;
    }
    if (victim < 0 || memory_.tags[victim] < 0) return victim;
    return memory_.counts && c.count <= memory_.counts[victim] ? -1 : victim;
  }

  // Order in which slots are given up: empty ones first, locked ones last. Stamps are of steps between -2^55 and 2^55.
  static constexpr uint64_t kLocked = ~uint64_t{0}, kMiddle = uint64_t{1} << 55;
  uint64_t priority_of(int64_t slot) const {
    const int64_t stamp = memory_.stamps[slot];
    const uint64_t count = memory_.counts ? memory_.counts[slot] : uint8_t{0};
    const uint64_t used = count << 56 | ((static_cast<uint64_t>(stamp) + kMiddle) & (kLocked >> 8));
    return memory_.tags[slot] < 0 ? 0 : (stamp == clock_ ? kLocked : used);
  }

  // Evicts the slot's row, if any, in favour of the candidate.
  void leave(int64_t slot, const Candidate& c, Worker* worker) const {
    const int64_t row = memory_.tags[slot];
    Move move{slot, c.row, c.part, row, -1, 0, false};
    if (row >= 0) {
      move.part_left = tables_.part_of(row);
      move.count_left = memory_.counts ? memory_.counts[slot] : uint8_t{0};
      // A row of the batch before may still be updated.
      const bool may_change = plans_ && memory_.stamps[slot] == clock_ - 1;
      move.written_back = memory_.dirty[slot] || may_change;
      worker->counters.add(table_of(move.part_left), kEvicted);
      if (move.written_back && plans_) worker->written.push_back(row);
      else if (move.written_back) worker->counters.add(table_of(move.part_left), kWritten);
    }
    if (!plans_) worker->moves.push_back(move);
  }

  // Makes the first `count` moves.
  void move_rows(Worker* worker, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const Move& m = worker->moves[static_cast<size_t>(i)];
      if (m.leaves >= 0 && memory_.counts) memory_.row_counts[m.leaves] = m.count_left;
      if (m.written_back) tables_.encode(m.part_left, m.leaves, m.slot);
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
  Counters found_;  // of collect()
  Scratch<Missing> missing_;
  std::vector<int64_t> starts_;  // of the sets in missing_, and its end
  std::vector<Worker> workers_;
  bool plans_ = false, halves_ = false;
  std::vector<int64_t> written_;
};

}  // namespace rec_kernels
