// Backward of embedding_bag on the CPU: sort the occurrences by row, sum each row's gradient in the order of
// docs/numerics.md, then store it (dense, sparse) or update the row once (fused optimizers).
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/boxing.h"
#include "core/cpu/parallel.h"
#include "embedding_bag/cpu/cache_input.h"
#include "embedding_bag/cpu/shared_rows.h"
#include "embedding_bag/cpu/sort.h"

namespace rec_kernels {
namespace {

// Floats of gradient read per piece of work.
constexpr int64_t kPieceFloats = 16384;

// Chunk sums of runs longer than kChunk, level by level until each has at most kChunk partial sums. The constructor
// plans the levels and allocates; sum() computes.
class LongRuns {
 public:
  // Plans the runs of tables [begin, end), which must outlive it. Reads no gradient.
  LongRuns(const TableRuns* begin, const TableRuns* end, int64_t max_dim) : max_dim_(max_dim) {
    for (const TableRuns* table = begin; table < end; ++table)
      for (int64_t r = 0; r < table->num_runs; ++r) {
        const int64_t start = table->starts[r], count = table->starts[r + 1] - start;
        if (count <= kChunk) continue;
        runs_.push_back({table->first_run + r, nullptr, count});
        origins_.push_back({table, start});
      }
    while (plan_level()) continue;
  }

  const std::vector<LongRun>& runs() const { return runs_; }
  int64_t workers() const { return levels_.empty() ? 1 : levels_.front().workers; }  // maximum over levels

  // `scratch` has `floats` floats per worker.
  void sum(const RunArgs& args, float* scratch, int64_t floats) const {
    const auto sum_chunks = kernels<EmbeddingBagBackwardKernels>().sum_chunks;
    for (const Level& level : levels_) {
      const auto total = static_cast<int64_t>(level.chunks.size());
      parallel_pieces(total, piece(), level.workers, [&](int64_t begin, int64_t end, int64_t worker) {
        sum_chunks(args, level.chunks.data(), scratch + worker * floats, begin, end);
      });
    }
  }

 private:
  struct Origin {
    const TableRuns* table;
    int64_t first;  // index of the run's first sorted occurrence
  };
  struct Level {
    std::vector<ChunkSum> chunks;
    Scratch<float> sums;
    int64_t workers;
  };

  int64_t piece() const { return 1 + kPieceFloats / (kChunk * max_dim_); }

  // Replaces the terms of every run of more than kChunk by their chunk sums; returns false if no run is that long.
  bool plan_level() {
    std::vector<ChunkSum> chunks;
    int64_t floats = 0;
    for (size_t i = 0; i < runs_.size(); ++i)
      if (runs_[i].count > kChunk) floats += ceil_div(runs_[i].count, kChunk) * dim_of(origins_[i]);
    if (floats == 0) return false;
    Scratch<float> sums(floats);
    float* out = sums.get();
    for (size_t i = 0; i < runs_.size(); ++i) {
      LongRun& run = runs_[i];
      if (run.count <= kChunk) continue;
      const int64_t n = ceil_div(run.count, kChunk), D = dim_of(origins_[i]);
      for (int64_t c = 0, done = 0; c < n; ++c, done += kChunk)
        chunks.push_back({origins_[i].table, origins_[i].first + done, run.partials ? run.partials + done * D : nullptr,
                          std::min(kChunk, run.count - done), out + c * D});
      run.partials = out;
      run.count = n;
      out += n * D;
    }
    int64_t workers = workers_for(static_cast<int64_t>(chunks.size()), piece());
    if (!levels_.empty()) workers = std::min(workers, levels_.front().workers);
    levels_.push_back({std::move(chunks), std::move(sums), workers});
    return true;
  }

  static int64_t dim_of(const Origin& o) { return o.table->part->embedding_dim; }

  int64_t max_dim_;
  std::vector<LongRun> runs_;
  std::vector<Origin> origins_;  // per run
  std::vector<Level> levels_;
};

// Runs [begin, end) of a table.
struct Piece {
  const TableRuns* table;
  int64_t begin, end;
};

int64_t cost_of(const TableRuns& t, int64_t begin, int64_t end) {
  return (t.starts[end] - t.starts[begin]) * t.part->embedding_dim + (end - begin) * 16;
}

// All runs of some tables, split into pieces of about equal cost (in floats).
class RunPieces {
 public:
  explicit RunPieces(std::vector<TableRuns> tables) : tables_(std::move(tables)) {
    int64_t total = 0;
    for (const TableRuns& t : tables_) total += cost_of(t, 0, t.num_runs);
    workers_ = workers_for(1 + total / kPieceFloats, 1);
    const int64_t most = 1 + total / pieces_for(total, kPieceFloats, workers_);
    for (const TableRuns& t : tables_) {
      const int64_t n = ceil_div(cost_of(t, 0, t.num_runs), most);
      for (int64_t i = 0; i < n; ++i) pieces_.push_back({&t, t.num_runs * i / n, t.num_runs * (i + 1) / n});
    }
  }
  RunPieces(RunPieces&&) = default;  // not copyable: pieces point to tables_

  int64_t workers() const { return workers_; }

  // Calls body(piece, worker) for every piece.
  template <class Body>
  void run(const Body& body) const {
    parallel_pieces(static_cast<int64_t>(pieces_.size()), 1, workers_,
                    [&](int64_t i, int64_t, int64_t worker) { body(pieces_[static_cast<size_t>(i)], worker); });
  }

 private:
  std::vector<TableRuns> tables_;
  std::vector<Piece> pieces_;
  int64_t workers_ = 1;
};

int64_t product_floats_of(const TableRuns& table) {
  return table.multiplied ? table.num_runs * table.part->embedding_dim : 0;
}

// Selects the tables whose updates need no precomputed sums: greedily by size, each table that is not multiplied with
// one selected before. `tables` are the tables of the occurrences starting at index `first`.
std::vector<bool> select_direct_tables(const BagInput& in, const Occurrences& o, size_t first,
                                       const std::vector<TableRuns>& tables) {
  std::vector<size_t> order(tables.size());
  for (size_t t = 0; t < order.size(); ++t) order[t] = t;
  const auto size = [&](size_t t) { return tables[t].num_runs * tables[t].part->embedding_dim; };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return size(a) > size(b); });
  std::vector<bool> direct(tables.size(), true), selected(static_cast<size_t>(in.bags.num_features), false);
  for (const size_t t : order) {
    if (!tables[t].multiplied) continue;
    for (const bool sets : {false, true})
      for (int64_t p = 0; p < in.bags.num_parts && direct[t]; ++p) {
        if (o.part_tables[static_cast<size_t>(p)] != static_cast<int64_t>(first + t)) continue;
        if (in.parts[p].combine != Combine::kMult) continue;
        const auto feature = static_cast<size_t>(in.parts[p].feature);
        if (sets) selected[feature] = true;
        else direct[t] = !selected[feature];
      }
  }
  return direct;
}

// Tables that are multiplied with each other, and the gradients of their bags, are read twice. Tables are processed in
// ranges of about this many floats of gradients per thread, so that the second read hits the core's cache.
constexpr int64_t kRangeFloats = 1 << 17;

// Tables [begin, end) of a call.
struct TableRange {
  size_t begin, end;

  int64_t product_floats(const Occurrences& o) const {
    int64_t floats = 0;
    for (size_t t = begin; t < end; ++t) floats += product_floats_of(o.tables[t]);
    return floats;
  }
};

// Splits the tables into ranges to process one after the other. Tables that are multiplied are in the same range.
std::vector<TableRange> split_tables(const BagInput& in, const Occurrences& o) {
  const size_t tables = o.tables.size();
  const int64_t enough = kRangeFloats * torch::stable::get_num_threads();
  // `first` and `last` table of each feature; `reach`: last table that must be in the same range as a first table.
  std::vector<size_t> first(static_cast<size_t>(in.bags.num_features), tables), last(first.size(), 0), reach(tables, 0);
  for (size_t p = 0; p < o.part_tables.size(); ++p) {
    const auto feature = static_cast<size_t>(in.parts[p].feature), table = static_cast<size_t>(o.part_tables[p]);
    first[feature] = std::min(first[feature], table);
    last[feature] = std::max(last[feature], table);
  }
  for (size_t f = 0; f < first.size(); ++f) reach[first[f]] = std::max(reach[first[f]], last[f]);
  std::vector<TableRange> ranges;
  size_t begin = 0, range_last = 0;
  int64_t floats = 0;
  for (size_t t = 0; t < tables; ++t) {
    range_last = std::max(range_last, reach[t]);
    floats += cost_of(o.tables[t], 0, o.tables[t].num_runs);
    if (t + 1 < tables && (range_last > t || floats < enough)) continue;
    ranges.push_back({begin, t + 1});
    begin = t + 1;
    floats = 0;
  }
  return ranges;
}

// The work on one range of tables, with all memory for it. Gradients of products need the rows before the update: of
// tables that are multiplied with each other, the sums of all but the largest are computed before any row is updated
// (`presummed`). The largest is then summed and updated directly, and the others are updated last.
struct RangePlan {
  LongRuns long_runs;
  RunPieces direct, presummed;

  // `memory` has TableRange::product_floats() floats.
  static RangePlan of(const BagInput& in, const Occurrences& o, const TableRange& range, bool products, float* memory) {
    const TableRuns *begin = o.tables.data() + range.begin, *end = o.tables.data() + range.end;
    std::vector<TableRuns> direct(begin, end), presummed;
    if (products) {
      const std::vector<bool> is_direct = select_direct_tables(in, o, range.begin, direct);
      size_t kept = 0;
      for (size_t t = 0; t < is_direct.size(); ++t) {
        if (is_direct[t]) {
          direct[kept++] = direct[t];
          continue;
        }
        presummed.push_back(direct[t]);
        presummed.back().sums = memory;
        memory += product_floats_of(direct[t]);
      }
      direct.resize(kept);
    }
    return {LongRuns(begin, end, in.max_dim), RunPieces(std::move(direct)), RunPieces(std::move(presummed))};
  }

  int64_t workers() const { return std::max({long_runs.workers(), direct.workers(), presummed.workers()}); }

  // `scratch` has `floats` floats per worker.
  void run(RunArgs args, float* scratch, int64_t floats, const RowTarget& target, FinishRuns finish) const {
    long_runs.sum(args, scratch, floats);
    args.long_runs = long_runs.runs().data();
    args.num_long_runs = static_cast<int64_t>(long_runs.runs().size());
    const auto sum_runs = kernels<EmbeddingBagBackwardKernels>().sum_runs;
    presummed.run(
        [&](const Piece& p, int64_t worker) { sum_runs(args, *p.table, scratch + worker * floats, p.begin, p.end); });
    for (const RunPieces* pieces : {&direct, &presummed})
      pieces->run([&](const Piece& p, int64_t worker) {
        finish(args, target, *p.table, scratch + worker * floats, p.begin, p.end);
      });
  }
};

// Sums every run and passes it to `target` with `finish`, a kernel of EmbeddingBagBackwardKernels.
void finish_all(const BagInput& in, const Occurrences& o, const Tensor& grad, const uint8_t* weights,
                float inverse_scale, const RowTarget& target, FinishRuns finish) {
  RunArgs args{in.bags,
               in.parts.get(),
               weights,
               o.entries.get(),
               o.payload_bits,
               in.bags.num_bags ? in.bags.offset(0) : 0,
               o.bag_of.get(),
               o.coefficients.get(),
               grad.const_data_ptr<float>(),
               in.output_dim,
               nullptr,
               0,
               inverse_scale,
               0};
  for (const TableRuns& t : o.tables)
    if (t.multiplied) args.product_dim = std::max(args.product_dim, t.part->embedding_dim);
  const bool products = args.product_dim > 0;
  const std::vector<TableRange> ranges = products ? split_tables(in, o) : std::vector<TableRange>{{0, o.tables.size()}};
  int64_t most = 0, workers = 1;
  for (const TableRange& range : ranges) most = std::max(most, range.product_floats(o));
  // Allocate everything before any row is updated: a call that runs out of memory must change nothing.
  const Scratch<float> memory = products ? Scratch<float>(most) : Scratch<float>();
  std::vector<RangePlan> plans;
  plans.reserve(ranges.size());
  for (const TableRange& range : ranges) {
    plans.push_back(RangePlan::of(in, o, range, products, memory.get()));
    workers = std::max(workers, plans.back().workers());
  }
  const int64_t floats = scratch_floats(in.max_dim) + scratch_factors(args.product_dim);
  const Scratch<float> scratch(workers * floats);
  for (const RangePlan& plan : plans) plan.run(args, scratch.get(), floats, target, finish);
}

// Sums the gradients of deduplicated bags and points the input to them.
SharedRows sum_shared(const Tensor& grad, BagInput* in) {
  SharedRows shared(*in, sizeof(float));
  shared.sum(grad.const_data_ptr<float>());
  in->bags.shared_rows = shared.rows();
  return shared;
}

// Input of a gradient of tables of floats: those in `weights`, which products read, or one float32 table of a shape.
BagInput read_gradient(const Tensor& grad, const Tensor& weights, const BagArguments& bags) {
  const Layout layout = read_layout(bags.layout, bags.layout_sizes, bags.values);
  check_trainable(layout);
  check_weights(weights, bags.values, layout);
  BagInput in = read_bags(bags, layout, limits_of(layout.num_parts, weights));
  check_gradient(grad, bags.values, in.bags.output_rows(), in.output_dim);
  return in;
}
BagInput read_gradient(const Tensor& grad, const Shape& shape, const OneTableBags& bags) {
  BagInput in = read_bags(bags, read_one_table(shape, parse_pooling(bags.pooling)));
  check_gradient(grad, bags.values, in.bags.output_rows(), in.output_dim);
  return in;
}
const uint8_t* rows_of(const Tensor& weights) { return static_cast<const uint8_t*>(weights.const_data_ptr()); }
const uint8_t* rows_of(const Shape&) { return nullptr; }

template <class Weights, class Arguments>
Tensor backward_dense(const Tensor& grad_in, const Weights& weights, const Arguments& bags) {
  BagInput in = read_gradient(grad_in, weights, bags);
  const Tensor grad = as_contiguous(grad_in);
  const SharedRows shared = sum_shared(grad, &in);
  const Occurrences o = sort_occurrences(in, grad);
  Tensor out = new_zeros(grad, sizes_of(weights), type_of(weights));
  RowTarget target{};
  target.weights = static_cast<uint8_t*>(out.mutable_data_ptr());
  finish_all(in, o, grad, rows_of(weights), 1.0f, target, kernels<EmbeddingBagBackwardKernels>().store);
  return out;
}

template <class Weights, class Arguments>
std::tuple<Tensor, Tensor, Tensor> backward_sparse(const Tensor& grad_in, const Weights& weights,
                                                   const Arguments& bags) {
  BagInput in = read_gradient(grad_in, weights, bags);
  const Tensor grad = as_contiguous(grad_in);
  const SharedRows shared = sum_shared(grad, &in);
  const Occurrences o = sort_occurrences(in, grad);
  Tensor rows = new_tensor(grad, {o.num_runs}, ScalarType::Long);
  Tensor row_grads = new_tensor(grad, {o.num_floats}, ScalarType::Float);
  Tensor row_counts = new_tensor(grad, {in.bags.num_parts}, ScalarType::Long);
  for (int64_t p = 0; p < in.bags.num_parts; ++p)
    row_counts.mutable_data_ptr<int64_t>()[p] =
        o.tables[static_cast<size_t>(o.part_tables[static_cast<size_t>(p)])].num_runs;
  RowTarget target{};
  target.weights = static_cast<uint8_t*>(row_grads.mutable_data_ptr());
  target.rows = rows.mutable_data_ptr<int64_t>();
  finish_all(in, o, grad, rows_of(weights), 1.0f, target, kernels<EmbeddingBagBackwardKernels>().store);
  return {rows, row_grads, row_counts};
}

FinishRuns kernel_of(Optimizer optimizer) {
  const EmbeddingBagBackwardKernels& k = kernels<EmbeddingBagBackwardKernels>();
  return is_elementwise(optimizer) ? k.elementwise : k.scaled;
}

// Checks the values of an update's tensors, which a GPU call cannot read.
void check_step_and_lr(const Tensor& step, const Tensor& lr) {
  const float* rates = lr.const_data_ptr<float>();
  for (int64_t i = 0; i < lr.numel(); ++i) {
    if (std::isfinite(rates[i])) continue;
    const std::string place = lr.dim() == 0 ? "" : "[" + std::to_string(i) + "]";
    check_value(false, "lr", place, " = ", rates[i], " must be finite");
  }
  const int64_t updates = *step.const_data_ptr<int64_t>();
  check_value(updates >= 0, "step = ", updates, " must be at least 0, the number of updates so far");
}

void backward_fused(const Tensor& weights, const OptionalTensor& sum, const Tensor& step, const Tensor& lr,
                    const Tensor& grad_in, const BagArguments& bags, const UpdateArguments& fused,
                    const OptionalTensor& status, const OptionalTensor& grad_scale, const OptionalTensor& found_inf,
                    const CachedRows& cached, const OptionalTensor& cache_dirty) {
  const Tensor& values = bags.values;
  const KeepDenormals guard;  // also needed here, for eps as float32 and 1 / scale
  Update update = read_update(values, sum, step, lr, fused, grad_scale);
  const Layout layout = read_layout(bags.layout, bags.layout_sizes, values);
  update.records = layout.parts;
  check_weights(weights, values, layout);
  const CacheArguments arguments = cached.with(cache_dirty);
  const bool has_cache = check_cache(arguments, layout, values, CacheUse::kUpdate);
  BagInput in = read_bags(bags, layout, limits_of(layout.num_parts, weights, arguments, &update));
  check_gradient(grad_in, values, in.bags.output_rows(), in.output_dim);
  check_row_state(update, in.num_rows);
  check_step_and_lr(step, lr);
  const int64_t next_step = advanced(step, "step");
  const CacheInput cache = has_cache ? read_cache(arguments, in) : CacheInput{};
  if (cached.slots) check_slots_of_ids(*cached.slots, values);
  const float* overflow = optional_scalar(found_inf, values, "found_inf");
  const int64_t* found = in.raises ? optional_status(status, values) : nullptr;
  if ((overflow && *overflow != 0.0f) || (found && *found != kNoBadPosition)) return;

  const Tensor grad = as_contiguous(grad_in);
  const SharedRows shared = sum_shared(grad, &in);
  const Occurrences o = sort_occurrences(in, grad);
  const Scratch<int64_t> slots(has_cache ? o.num_runs : 0);
  RowTarget target{};
  target.weights = static_cast<uint8_t*>(weights.mutable_data_ptr());
  target.update = update;
  target.cache = cache.view;
  target.slots = slots.get();
  target.rounding = {make_noise(update.seed ? *update.seed : 0, *update.step), update.stochastic};
  finish_all(in, o, grad, target.weights, inverse_of(update.grad_scale), target, kernel_of(update.optimizer));
  *step.mutable_data_ptr<int64_t>() = next_step;
  if (!fused.beta_powers) return;
  const BetaPowers powers = update.powers();
  fused.beta_powers->mutable_data_ptr<float>()[0] = powers.first;
  fused.beta_powers->mutable_data_ptr<float>()[1] = powers.second;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) {
  implement<&backward_dense<Tensor, BagArguments>>(m, "embedding_bag_backward_dense.layout");
  implement<&backward_dense<Shape, OneTableBags>>(m, "embedding_bag_backward_dense.table");
  implement<&backward_sparse<Tensor, BagArguments>>(m, "embedding_bag_backward_sparse.layout");
  implement<&backward_sparse<Shape, OneTableBags>>(m, "embedding_bag_backward_sparse.table");
  implement<&backward_fused>(m, "embedding_bag_backward_fused_.layout");
}

}  // namespace rec_kernels
