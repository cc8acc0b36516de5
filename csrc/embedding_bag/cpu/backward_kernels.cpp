// Backward of embedding_bag. Compiled once per instruction set: no torch header and no std template here.
//
// Occurrences are sorted by row. A row's terms are summed in registers, one block of columns at a time, into a scratch
// row that stays in the L1 cache; then the target (gradient or optimizer) reads it once. Rows are prefetched a few runs
// ahead.
#include "embedding_bag/cpu/gradient_sums.h"
#include "embedding_bag/cpu/pool_composed.h"
#include "embedding_bag/cpu/slot_finder.h"
#include "embedding_bag/cpu/targets.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// out [D] = the sum of terms [first, first + count).
template <class Terms>
RK_HOST_DEVICE void sum_terms(const Terms& terms, int64_t first, int64_t count, int64_t D, float* out) {
  for_blocks(D, SumInto<Terms>{terms, first, count, out});
}
__attribute__((noinline)) void sum_partials(const float* partials, int64_t count, int64_t D, float* out) {
  sum_terms(RowsInMemory{partials, D}, 0, count, D, out);
}

// out [D] = the sum of occurrences [first, first + count) of a table; prefetches gradients of occurrences before `end`.
// Like sum_products(), not inlined: a call is cheap here, and copies would be slow to compile.
__attribute__((noinline)) void sum_sorted(const RunArgs& a, const TableRuns& table, int64_t end, int64_t first,
                                          int64_t count, float* out) {
  const int64_t D = table.part->embedding_dim;
  if (table.other) sum_terms(SortedProducts(a, table, end), first, count, D, out);
  else if (a.bag_of) sum_terms(SortedTerms<true>(a, table, end), first, count, D, out);
  else sum_terms(SortedTerms<false>(a, table, end), first, count, D, out);
}

// Up to kChunk terms of a multiplied table: gradients and their factors.
struct Products {
  static constexpr int64_t kAhead = 8;  // prefetch distance in terms

  const float* rows[kChunk];
  const float* factors[kChunk];
  float coefficients[kChunk];
  int64_t count;
  bool far;  // factors are read from a table that exceeds the cache
};

// Body of for_blocks: out = the sum of terms [begin, end). A coefficient of 1 changes no bit.
struct SumProducts {
  const Products& t;
  int64_t begin, end;
  float* out;

  template <int NV, bool kTail>
  RK_HOST_DEVICE void block(int64_t column, int tail) const {
    Vec sum[NV];
    for (int64_t i = begin; i < end; ++i) {
      if (i + Products::kAhead < t.count) prefetch_bytes(t.rows[i + Products::kAhead] + column, NV * W * 4);
      Vec g[NV], factor[NV];
      load_row<NV, kTail>(t.rows[i] + column, tail, g);
      load_row<NV, kTail>(t.factors[i] + column, tail, factor);
      const Vec c = Vec::broadcast(t.coefficients[i]);
      for (int v = 0; v < NV; ++v) {
        const Vec product = g[v] * factor[v];
        sum[v] = i == begin ? c * product : fused_multiply_add(c, product, sum[v]);
      }
    }
    store_columns<NV, kTail>(sum, out + column, tail);
  }
};

__attribute__((noinline)) void sum_products(const SumProducts& sum, int64_t D) { for_blocks(D, sum); }

// Sums over a multiplied table. `scratch` has scratch_factors(D) floats; unused for other tables.
class ProductRuns {
 public:
  ProductRuns(const RunArgs& a, const TableRuns& table, float* scratch)
      : a_(a), table_(table), D_(table.part->embedding_dim) {
    if (!table.multiplied) return;
    ones_ = scratch;
    decoded_ = ones_ + D_;
    rows_ = decoded_ + D_;
    for (int64_t c = 0; c < D_; ++c) ones_[c] = 1.0f;
  }

  // out = the sum of sorted occurrences [first, first + count), count <= kChunk.
  void sum(int64_t first, int64_t count, float* out) {
    gather(first, count);
    sum_products({terms_, 0, count, out}, D_);
  }
  // out = the sum of run r of at most kChunk occurrences. Calls must have ascending r; runs are gathered in batches.
  void sum_run(int64_t r, int64_t end, float* out) {
    if (r >= last_run_) {
      last_run_ = r + 1;
      while (last_run_ < end && table_.starts[last_run_ + 1] - table_.starts[r] <= kChunk) ++last_run_;
      first_ = table_.starts[r];
      gather(first_, table_.starts[last_run_] - first_);
    }
    sum_products({terms_, table_.starts[r] - first_, table_.starts[r + 1] - first_, out}, D_);
  }

 private:
  void gather(int64_t first, int64_t count) {
    terms_.count = count;
    terms_.far = false;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t payload = payload_of(a_, first + i);
      const BagPlace place = place_of(a_, table_, bag_of(a_, payload));
      terms_.rows[i] = place.gradient;
      terms_.factors[i] = ones_;
      terms_.coefficients[i] = a_.coefficients ? a_.coefficients[payload] : 1.0f;
      if (place.part->combine == Combine::kMult) multiply(*place.part, a_.bags.id(a_.first_id + payload), i);
    }
    for (int64_t i = 0; terms_.far && i < count; ++i) prefetch_bytes(terms_.factors[i], D_ * 4);
    for (int64_t i = 0; i < count && i < Products::kAhead; ++i) prefetch_bytes(terms_.rows[i], D_ * 4);
  }
  // Sets the factor to the id's row in the other part; with several other parts, multiplies in memory.
  void multiply(const Part& own, int64_t id, int64_t i) {
    const int64_t first = a_.bags.first_part(own.feature), count = a_.bags.first_part(own.feature + 1) - first;
    const Part* parts = a_.parts + first;
    float* row = rows_ + i * D_;
    if (count > 2) {
      multiply_by_others(parts, count, &own, a_.weights, id, terms_.rows[i], decoded_, row);
      terms_.rows[i] = row;
      return;
    }
    const Part& other = parts[parts == &own ? 1 : 0];
    terms_.factors[i] = row_of_part(other, a_.weights, id, row);
    terms_.far = terms_.far || exceeds_cache(other);
  }

  const RunArgs& a_;
  const TableRuns& table_;
  int64_t D_;
  float *ones_ = nullptr, *decoded_ = nullptr, *rows_ = nullptr;  // [D], [D], [kChunk, D]
  int64_t first_ = 0, last_run_ = 0;
  Products terms_;
};

// Sums the short runs of a multiplied table.
void sum_runs(const RunArgs& a, const TableRuns& table, float* scratch, int64_t begin, int64_t end) {
  const int64_t D = table.part->embedding_dim;
  ProductRuns runs(a, table, scratch);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t first = table.starts[r], count = table.starts[r + 1] - first;
    if (count > kChunk) continue;
    if (!table.other) runs.sum_run(r, end, table.sums + r * D);
    else sum_sorted(a, table, table.starts[end], first, count, table.sums + r * D);
  }
}

void sum_chunks(const RunArgs& a, const ChunkSum* chunks, float* scratch, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const ChunkSum& c = chunks[i];
    const int64_t last = c.first + c.count;
    const bool same_table = i + 1 < end && chunks[i + 1].table == c.table && !chunks[i + 1].partials;
    const int64_t prefetch_end = same_table ? chunks[i + 1].first + chunks[i + 1].count : last;
    if (c.partials) sum_partials(c.partials, c.count, c.table->part->embedding_dim, c.out);
    else if (c.table->multiplied && !c.table->other) ProductRuns(a, *c.table, scratch).sum(c.first, c.count, c.out);
    else sum_sorted(a, *c.table, prefetch_end, c.first, c.count, c.out);
  }
}

// Scales a row's gradient g [D] and passes it to the target; both may overwrite it.
template <class Target>
RK_HOST_DEVICE void finish_row(Target& target, int64_t row, int64_t run, float inverse_scale, float* g) {
  if (inverse_scale != 1.0f)
    for (int64_t c = 0; c < target.D; ++c) g[c] *= inverse_scale;
  target.finish(row, run, g);
}

// Takes the target by value and returns it, so that the caller's copy stays in registers.
template <class Target>
__attribute__((noinline)) Target finish_by_value(Target target, int64_t row, int64_t run, float inverse_scale,
                                                 float* g) {
  finish_row(target, row, run, inverse_scale, g);
  return target;
}

// The first long run with an index of at least `run`, counted over all tables.
const LongRun* first_long_run(const RunArgs& a, int64_t run) {
  return a.long_runs + first_behind(0, a.num_long_runs, [&](int64_t i) { return a.long_runs[i].run >= run; });
}

// Sums of runs that are not plain sums over sorted occurrences: long runs, which have partial sums; runs of tables that
// are multiplied with several others; and runs with precomputed sums.
class SpecialSums {
 public:
  SpecialSums(const RunArgs& a, const TableRuns& table, float* scratch, int64_t begin, int64_t end)
      : table_(table),
        D_(table.part->embedding_dim),
        end_(end),
        next_long_(first_long_run(a, table.first_run + begin)),
        products_(a, table, scratch + scratch_floats(D_)),
        out_(scratch) {}

  bool has(int64_t count) const { return count > kChunk || table_.sums || (table_.multiplied && !table_.other); }
  // The sum of run r of `count` occurrences. Calls must have ascending r; the result may be overwritten.
  float* sum(int64_t r, int64_t count) {
    if (count > kChunk) {
      sum_partials(next_long_->partials, next_long_->count, D_, out_);
      ++next_long_;
    } else if (table_.sums) {
      return table_.sums + r * D_;
    } else {
      products_.sum_run(r, end_, out_);
    }
    return out_;
  }

 private:
  const TableRuns& table_;
  int64_t D_, end_;
  const LongRun* next_long_;
  ProductRuns products_;
  float* out_;
};

// Finishes runs [begin, end) of a table in order. Calls body(target, row, run, first occurrence, count) for each plain
// sum over sorted occurrences, and handles the other runs itself. Rows are prefetched ahead() runs earlier; `columns`
// is the argument of Target::prefetch().
template <class Target, class Body>
RK_HOST_DEVICE void for_runs(const RunArgs& a, Target target, const TableRuns& table, float* scratch, int64_t begin,
                             int64_t end, int64_t columns, const Body& body) {
  const int64_t* const starts = table.starts;
  const uint64_t* const sorted = a.sorted;
  const int payload_bits = a.payload_bits;
  const int64_t ahead = target.ahead();
  const auto row_of = [=](int64_t run) { return static_cast<int64_t>(sorted[starts[run]] >> payload_bits); };
  for (int64_t r = begin; r < end && r < begin + ahead; ++r) target.prefetch(row_of(r), r, columns);
  SpecialSums special(a, table, scratch, begin, end);
  for (int64_t r = begin; r < end; ++r) {
    if (r + ahead < end) target.prefetch(row_of(r + ahead), r + ahead, columns);
    const int64_t start = starts[r], count = starts[r + 1] - start, row = row_of(r);
    target.select(r);
    if (__builtin_expect(special.has(count), 0))
      target = finish_by_value(target, row, r, a.inverse_scale, special.sum(r, count));
    else body(target, row, r, start, count);
  }
  target.flush();
}

// Body of for_blocks for rows that fit in registers: sum, statistics and target without intermediate memory.
template <class Target, class Terms>
struct FinishNarrow {
  const RunArgs& a;
  const Target& target;
  const TableRuns& table;
  float* scratch;
  int64_t begin, end;

  template <int NV, bool kTail>
  void block(int64_t column, int tail) const {
    const Terms terms(a, table, table.starts[end]);
    const float inverse_scale = a.inverse_scale;
    for_runs(a, target, table, scratch, begin, end, NV * W,
             [=](Target& target, int64_t row, int64_t run, int64_t start, int64_t count) {
               Vec g[NV];
               sum_columns<NV, kTail>(terms, start, count, column, tail, g);
               if (inverse_scale != 1.0f)
                 for (int v = 0; v < NV; ++v) g[v] = g[v] * Vec::broadcast(inverse_scale);
               target.template finish_registers<NV, kTail>(row, run, g, tail);
             });
  }
};

// Finishes runs of rows that fit in registers; returns false if they do not.
template <class Target>
bool finish_narrow(const RunArgs& a, const Target& target, const TableRuns& table, float* scratch, int64_t begin,
                   int64_t end) {
  const int64_t D = target.D;
  if (D > kBlock || target.has_step()) return false;
  if (table.other && !table.sums) {
    if constexpr (!Target::kProductsInRegisters) return false;
    else for_blocks(D, FinishNarrow<Target, SortedProducts>{a, target, table, scratch, begin, end});
  } else if (a.bag_of) {
    for_blocks(D, FinishNarrow<Target, SortedTerms<true>>{a, target, table, scratch, begin, end});
  } else {
    for_blocks(D, FinishNarrow<Target, SortedTerms<false>>{a, target, table, scratch, begin, end});
  }
  return true;
}

template <class Target>
void finish_runs(const RunArgs& a, const Target& target, const TableRuns& table, float* scratch, int64_t begin,
                 int64_t end) {
  if (begin == end) return;
  if constexpr (Target::kInRegisters)
    if (finish_narrow(a, target, table, scratch, begin, end)) return;
  for_runs(a, target, table, scratch, begin, end, target.D,
           [&](Target& target, int64_t row, int64_t run, int64_t start, int64_t count) {
             float* const g = target.buffer(row, run, scratch);
             sum_sorted(a, table, table.starts[end], start, count, g);
             finish_row(target, row, run, a.inverse_scale, g);
           });
}

// Stores gradients to be returned: dense, indexed by row, in the table's format, or sparse, as floats with row indices.
void store(const RunArgs& a, const RowTarget& t, const TableRuns& table, float* scratch, int64_t begin, int64_t end) {
  const Part& f = *table.part;
  if (f.format != RowFormat::kFp32 && !t.rows) {
    const EncodedRows rows(f, t, scratch + scratch_rows(f.embedding_dim));
    return finish_runs(a, EncodedGradients{f.embedding_dim, rows}, table, scratch, begin, end);
  }
  StoredGradients target{f.embedding_dim, reinterpret_cast<float*>(t.weights + f.weight_offset), nullptr};
  if (t.rows) {
    target.gradients = reinterpret_cast<float*>(t.weights) + table.first_float;
    target.rows = t.rows + table.first_run;
  }
  finish_runs(a, target, table, scratch, begin, end);
}

// True if rows of the table may be in a cache.
bool is_cached(const RunArgs& a, const RowTarget& t, const Part& f) {
  return t.cache.tags && t.cache.places[&f - a.parts].sets > 0;
}
// True if the table is float32 and not cached.
bool is_plain(const RunArgs& a, const RowTarget& t, const Part& f) {
  return f.format == RowFormat::kFp32 && !is_cached(a, t, f);
}
FloatRows float_rows(const RowTarget& t, const Part& f) {
  return {f.embedding_dim, reinterpret_cast<float*>(t.weights + f.weight_offset)};
}
// Finds the slots of runs [begin, end) of a cached table; returns the slots of all its runs.
__attribute__((noinline)) const int64_t* slots_of_runs(const RunArgs& a, const RowTarget& t, const TableRuns& table,
                                                       int64_t begin, int64_t end) {
  const Part& f = *table.part;
  int64_t* slots = t.slots + table.first_run;
  const auto read = [&](int64_t first, int64_t count, int64_t* rows) {
    for (int64_t j = 0; j < count; ++j)
      rows[j] = f.row_offset + static_cast<int64_t>(a.sorted[table.starts[begin + first + j]] >> a.payload_bits);
  };
  SlotFinder(t.cache, t.cache.places[&f - a.parts]).find(end - begin, read, slots + begin);
  return slots;
}
StoredRows stored_rows(const RunArgs& a, const RowTarget& t, const TableRuns& table, float* scratch, int64_t begin,
                       int64_t end) {
  const Part& f = *table.part;
  const int64_t* slots = is_cached(a, t, f) ? slots_of_runs(a, t, table, begin, end) : nullptr;
  return {f, t, &f - a.parts, slots, scratch + scratch_rows(f.embedding_dim)};
}

// Finishes runs with the target make(rows), where rows are FloatRows or StoredRows.
template <class Make>
void update(const RunArgs& a, const RowTarget& t, const TableRuns& table, float* scratch, int64_t begin, int64_t end,
            const Make& make) {
  if (is_plain(a, t, *table.part)) finish_runs(a, make(float_rows(t, *table.part)), table, scratch, begin, end);
  else finish_runs(a, make(stored_rows(a, t, table, scratch, begin, end)), table, scratch, begin, end);
}

float lr_of(const RowTarget& t, const TableRuns& table) { return t.update.lr_of(table.part->shard.table); }

void scaled(const RunArgs& a, const RowTarget& t, const TableRuns& table, float* scratch, int64_t begin, int64_t end) {
  const Part& f = *table.part;
  const Update& u = t.update;
  const float lr = lr_of(t, table), shrinkage = u.shrinkage(f.shard.table);
  float* const sum = u.state.sum ? u.state.sum + f.row_offset : nullptr;
  update(a, t, table, scratch, begin, end,
         [&](auto rows) { return ScaledTarget<decltype(rows)>{f.embedding_dim, u, lr, shrinkage, sum, rows}; });
}

void elementwise(const RunArgs& a, const RowTarget& t, const TableRuns& table, float* scratch, int64_t begin,
                 int64_t end) {
  const Part& f = *table.part;
  const int64_t D = f.embedding_dim, first = t.update.records[table.part - a.parts].state_offset;
  const Elementwise o = elementwise_of(t.update);
  const float lr = lr_of(t, table);
  OptimizerState state = t.update.state;
  if (state.sum) state.sum = state.moment(state.sum, first);
  if (state.exp_avg) state.exp_avg = state.moment(state.exp_avg, first);
  if (o.needs_mean_square()) state.exp_avg_sq += f.row_offset;
  else if (state.exp_avg_sq) state.exp_avg_sq = state.moment(state.exp_avg_sq, first);
  const MomentRows moments{D, state, t, f.shard, scratch + scratch_moments(D)};
  update(a, t, table, scratch, begin, end,
         [&](auto rows) { return ElementwiseTarget<decltype(rows)>{D, o, lr, t.update.gradient_step, moments, rows}; });
}

}  // namespace
}  // namespace RK_ISA

template <>
const EmbeddingBagBackwardKernels EmbeddingBagBackwardKernels::table<CpuIsa::RK_ISA> = {
    RK_ISA::sum_chunks, RK_ISA::sum_runs, RK_ISA::store, RK_ISA::scaled, RK_ISA::elementwise};

}  // namespace rec_kernels
