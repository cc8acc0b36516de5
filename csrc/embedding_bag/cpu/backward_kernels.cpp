// Backward of embedding_bag. Compiled once per instruction set: no torch header and no std template here.
//
// Occurrences arrive sorted by row. A row's terms are summed in registers, column block by column block, into a scratch
// row that stays in the first-level cache; then the target (gradient or optimizer) reads it once. Rows to come are
// fetched a few runs ahead.
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

// out [D] = the sum of occurrences [first, first + count) of a table; gradients of those up to `end` are fetched. Not
// inlined, as sum_products: a call costs nothing here, and copies would take long to compile.
__attribute__((noinline)) void sum_sorted(const RunArgs& a, const TableRuns& table, int64_t end, int64_t first,
                                          int64_t count, float* out) {
  const int64_t D = table.part->embedding_dim;
  if (table.other) sum_terms(SortedProducts(a, table, end), first, count, D, out);
  else if (a.bag_of) sum_terms(SortedTerms<true>(a, table, end), first, count, D, out);
  else sum_terms(SortedTerms<false>(a, table, end), first, count, D, out);
}

// Up to kChunk terms of a multiplied table: gradients, and what they are multiplied by.
struct Products {
  static constexpr int64_t kAhead = 8;  // terms between the prefetch of a gradient and its use

  const float* rows[kChunk];
  const float* factors[kChunk];
  float coefficients[kChunk];
  int64_t count;
  bool far;  // no cache holds the factors
};

// out = the sum of terms begin .. end - 1, of which those to come are fetched. A coefficient of 1 changes no bit.
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

// Sums over a multiplied table. `scratch` is scratch_factors(D) floats; there is none for other tables.
class ProductRuns {
 public:
  ProductRuns(const RunArgs& a, const TableRuns& table, float* scratch)
      : a_(a), table_(table), D_(table.part->embedding_dim) {
    if (!table.multiplied) return;
    ones_ = scratch;
    held_ = ones_ + D_;
    rows_ = held_ + D_;
    for (int64_t c = 0; c < D_; ++c) ones_[c] = 1.0f;
  }

  // Occurrences [first, first + count) of the sorted list, count <= kChunk.
  void sum(int64_t first, int64_t count, float* out) {
    take(first, count);
    sum_products({t_, 0, count, out}, D_);
  }
  // Run r, which is not long. Runs are asked for in ascending order, and taken together as far as they fit.
  void sum_run(int64_t r, int64_t end, float* out) {
    if (r >= last_run_) {
      last_run_ = r + 1;
      while (last_run_ < end && table_.starts[last_run_ + 1] - table_.starts[r] <= kChunk) ++last_run_;
      first_ = table_.starts[r];
      take(first_, table_.starts[last_run_] - first_);
    }
    sum_products({t_, table_.starts[r] - first_, table_.starts[r + 1] - first_, out}, D_);
  }

 private:
  void take(int64_t first, int64_t count) {
    t_.count = count;
    t_.far = false;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t payload = payload_of(a_, first + i);
      const BagPlace place = place_of(a_, table_, bag_of(a_, payload));
      t_.rows[i] = place.gradient;
      t_.factors[i] = ones_;
      t_.coefficients[i] = a_.coefficients ? a_.coefficients[payload] : 1.0f;
      if (place.part->combine == Combine::kMult) multiply(*place.part, a_.bags.id(a_.first_id + payload), i);
    }
    for (int64_t i = 0; t_.far && i < count; ++i) prefetch_bytes(t_.factors[i], D_ * 4);
    for (int64_t i = 0; i < count && i < Products::kAhead; ++i) prefetch_bytes(t_.rows[i], D_ * 4);
  }
  // Multiplies by the rows of the id's other parts. A second one needs the product with the first in memory.
  void multiply(const Part& own, int64_t id, int64_t i) {
    const int64_t first = a_.bags.first_part(own.number), count = a_.bags.first_part(own.number + 1) - first;
    const Part* parts = a_.parts + first;
    float* row = rows_ + i * D_;
    if (count > 2) {
      multiply_by_others(parts, count, &own, a_.weights, id, t_.rows[i], held_, row);
      t_.rows[i] = row;
      return;
    }
    const Part& other = parts[parts == &own ? 1 : 0];
    t_.factors[i] = row_of_part(other, a_.weights, id, row);
    t_.far = t_.far || is_far(other);
  }

  const RunArgs& a_;
  const TableRuns& table_;
  int64_t D_;
  float *ones_ = nullptr, *held_ = nullptr, *rows_ = nullptr;  // [D], [D], [kChunk, D]
  int64_t first_ = 0, last_run_ = 0;
  Products t_;
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
    const bool goes_on = i + 1 < end && chunks[i + 1].table == c.table && !chunks[i + 1].partials;
    const int64_t seen = goes_on ? chunks[i + 1].first + chunks[i + 1].count : last;  // gradients to come are fetched
    if (c.partials) sum_partials(c.partials, c.count, c.table->part->embedding_dim, c.out);
    else if (c.table->multiplied && !c.table->other) ProductRuns(a, *c.table, scratch).sum(c.first, c.count, c.out);
    else sum_sorted(a, *c.table, seen, c.first, c.count, c.out);
  }
}

// Hands over a row's gradient g [D], which may be overwritten.
template <class Target>
RK_HOST_DEVICE void finish_summed(Target& target, int64_t row, int64_t run, float inverse_scale, float* g) {
  if (inverse_scale != 1.0f)
    for (int64_t c = 0; c < target.D; ++c) g[c] *= inverse_scale;
  target.finish(row, run, g);
}

// Takes the target as a copy and returns it, so that a caller's own stays in registers.
template <class Target>
__attribute__((noinline)) Target after_summed(Target target, int64_t row, int64_t run, float inverse_scale, float* g) {
  finish_summed(target, row, run, inverse_scale, g);
  return target;
}

// The first long run at or behind `run`, which counts over all tables.
const LongRun* first_long_run(const RunArgs& a, int64_t run) {
  return a.long_runs + first_behind(0, a.num_long_runs, [&](int64_t i) { return a.long_runs[i].run >= run; });
}

// The sums of runs that are not those of a table's occurrences as they are sorted: of long runs, which have partial
// sums, of tables that are multiplied with several, and those that are known.
class OtherSums {
 public:
  OtherSums(const RunArgs& a, const TableRuns& table, float* scratch, int64_t begin, int64_t end)
      : table_(table),
        D_(table.part->embedding_dim),
        end_(end),
        next_long_(first_long_run(a, table.first_run + begin)),
        products_(a, table, scratch + scratch_floats(D_)),
        out_(scratch) {}

  bool has(int64_t count) const { return count > kChunk || table_.sums || (table_.multiplied && !table_.other); }
  // Run r of `count` occurrences. Runs are asked for in ascending order, and may be written to until the next call.
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

// Runs [begin, end) of a table in order: in_order(target, row, run, first occurrence, count) for each that is a sum of
// the table's occurrences. The memory of rows to come is fetched ahead() runs before their turn, for which
// `columns` are as targets want them.
template <class Target, class InOrder>
RK_HOST_DEVICE void for_runs(const RunArgs& a, Target target, const TableRuns& table, float* scratch, int64_t begin,
                             int64_t end, int64_t columns, const InOrder& in_order) {
  const int64_t* const starts = table.starts;
  const uint64_t* const sorted = a.sorted;
  const int payload_bits = a.payload_bits;
  const int64_t ahead = target.ahead();
  const auto row_of = [=](int64_t run) { return static_cast<int64_t>(sorted[starts[run]] >> payload_bits); };
  for (int64_t r = begin; r < end && r < begin + ahead; ++r) target.prefetch(row_of(r), r, columns);
  OtherSums others(a, table, scratch, begin, end);
  for (int64_t r = begin; r < end; ++r) {
    if (r + ahead < end) target.prefetch(row_of(r + ahead), r + ahead, columns);
    const int64_t start = starts[r], count = starts[r + 1] - start, row = row_of(r);
    target.select(r);
    if (__builtin_expect(others.has(count), 0))
      target = after_summed(target, row, r, a.inverse_scale, others.sum(r, count));
    else in_order(target, row, r, start, count);
  }
  target.flush();
}

// for_blocks of rows that fit in the registers: sum, statistic and target without touching memory between.
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

// Finishes runs of rows that fit in the registers; false if these do not.
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
             float* const g = target.place(row, run, scratch);
             sum_sorted(a, table, table.starts[end], start, count, g);
             finish_summed(target, row, run, a.inverse_scale, g);
           });
}

// Gradients that are returned: dense, a row's at its place in the table's, or sparse, beside the number of their row.
void store(const RunArgs& a, const RowTarget& t, const TableRuns& table, float* scratch, int64_t begin, int64_t end) {
  const Part& f = *table.part;
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
// True if the table's rows are floats in memory, and none of them may be in a cache.
bool is_plain(const RunArgs& a, const RowTarget& t, const Part& f) {
  return f.format == RowFormat::kFp32 && !is_cached(a, t, f);
}
FloatRows float_rows(const RowTarget& t, const Part& f) {
  return {f.embedding_dim, reinterpret_cast<float*>(t.weights + f.weight_offset)};
}
// Finds the slots of runs [begin, end) of a cached table; returns those of all its runs.
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
KeptRows kept_rows(const RunArgs& a, const RowTarget& t, const TableRuns& table, float* scratch, int64_t begin,
                   int64_t end) {
  const Part& f = *table.part;
  const int64_t* slots = is_cached(a, t, f) ? slots_of_runs(a, t, table, begin, end) : nullptr;
  return {f, t, &f - a.parts, slots, scratch + scratch_held(f.embedding_dim)};
}

// Finishes runs with make(the table's rows): a target for rows of floats in memory, or for others.
template <class Make>
void update(const RunArgs& a, const RowTarget& t, const TableRuns& table, float* scratch, int64_t begin, int64_t end,
            const Make& make) {
  if (is_plain(a, t, *table.part)) finish_runs(a, make(float_rows(t, *table.part)), table, scratch, begin, end);
  else finish_runs(a, make(kept_rows(a, t, table, scratch, begin, end)), table, scratch, begin, end);
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
