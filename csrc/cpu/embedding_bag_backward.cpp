// Backward of embedding_bag on the CPU: sort the occurrences by row, sum each row's gradient in the order of
// docs/numerics.md, then store it (dense, sparse) or update the row once (fused optimizers).
#include "cpu/embedding_bag_backward.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/parallel.h"
#include "cpu/embedding_bag_input.h"
#include "cpu/row_sort.h"

namespace rec_kernels {
namespace {

// Floats of gradient read per piece of work.
constexpr int64_t kPieceFloats = 16384;

// What a feature's table occupies: rows of state, or floats of `weights`.
struct Extent {
  int64_t begin, end;
  const Feature* feature;
};

bool same_table(const Feature& a, const Feature& b) {
  return a.row_offset == b.row_offset && a.weight_offset == b.weight_offset && a.num_embeddings == b.num_embeddings &&
         a.embedding_dim == b.embedding_dim;
}

void check_extents_apart(const BagInput& in, std::vector<Extent> extents, const char* name) {
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < extents.size(); ++i) {
    const Extent &a = extents[i - 1], &b = extents[i];
    check_value(a.end <= b.begin || same_table(*a.feature, *b.feature), name, "[", b.feature - in.features.get(),
                "] = ", b.begin, " lies in the table of feature ", a.feature - in.features.get(),
                ": features share a whole table or nothing");
  }
}

// Features share a table or have nothing in common: a partial overlap would make a row's width ambiguous, and two
// threads would write the same weights.
void check_tables_apart(const BagInput& in) {
  std::vector<Extent> rows, floats;
  for (int64_t i = 0; i < in.num_features; ++i) {
    const Feature& f = in.features[i];
    if (f.num_embeddings == 0) continue;  // occupies nothing
    rows.push_back({f.row_offset, f.row_offset + f.num_embeddings, &f});
    floats.push_back({f.weight_offset, f.weight_offset + f.num_embeddings * f.embedding_dim, &f});
  }
  check_extents_apart(in, std::move(rows), "row_offsets");
  check_extents_apart(in, std::move(floats), "weight_offsets");
}

// Everything the kernels read about sorted occurrences.
struct Occurrences {
  RowSort sort;
  std::unique_ptr<uint32_t[]> bag_of;
  std::unique_ptr<float[]> coefficients;
};

// Writes the sort entries of bags [begin, end) and what a term needs to know of its bag.
class EntryWriter {
 public:
  EntryWriter(const BagInput& in, uint64_t* entries, int payload_bits, uint32_t* bag_of, float* coefficients)
      : in_(in),
        entries_(entries),
        payload_bits_(payload_bits),
        bag_of_(bag_of),
        coefficients_(coefficients),
        base_(in.num_bags ? in.bags.offset(0) : 0) {}

  // Returns the number of occurrences left out; the first bad position goes to *bad.
  int64_t write(int64_t begin, int64_t end, int64_t* bad) const {
    int64_t left_out = 0;
    for (int64_t bag = begin; bag < end; ++bag) left_out += write_bag(bag, bad);
    return left_out;
  }

 private:
  int64_t write_bag(int64_t bag, int64_t* bad) const {
    const Bags& bags = in_.bags;
    const Feature& f = in_.features[bag / bags.batch];
    const int64_t start = bags.offset(bag), stop = bags.offset(bag + 1);
    int64_t counted = 0;
    for (int64_t i = start; i < stop; ++i) {
      const int64_t id = bags.id(i), occurrence = i - base_;
      const bool in_range = bags.in_range(id, f), counts = in_range && id != bags.padding_idx;
      if (!in_range) *bad = std::min(*bad, i);
      counted += counts;
      // Entries that are left out sort behind every row.
      const uint64_t row = static_cast<uint64_t>(counts ? f.row_offset + id : in_.num_rows);
      entries_[occurrence] = row << payload_bits_ | static_cast<uint64_t>(bag_of_ ? occurrence : bag);
      if (bag_of_) bag_of_[occurrence] = static_cast<uint32_t>(bag);
    }
    if (coefficients_) write_coefficients(f, start, stop, counted);
    return stop - start - counted;
  }

  void write_coefficients(const Feature& f, int64_t start, int64_t stop, int64_t counted) const {
    const float each = f.mean && counted ? 1.0f / static_cast<float>(counted) : 1.0f;
    const float* weights = in_.bags.per_sample_weights;
    for (int64_t i = start; i < stop; ++i) coefficients_[i - base_] = weights ? weights[i] * each : each;
  }

  const BagInput& in_;
  uint64_t* entries_;
  int payload_bits_;
  uint32_t* bag_of_;
  float* coefficients_;
  int64_t base_;
};

Occurrences sort_occurrences(const BagInput& in) {
  Bounds bounds;
  if (in.num_bags) bounds.position = in.bags.bad_offset(0, in.num_bags);
  in.raise(bounds);
  const int64_t count = in.num_bags ? in.bags.offset(in.num_bags) - in.bags.offset(0) : 0;
  bool weighted = in.bags.per_sample_weights != nullptr;
  for (int64_t f = 0; f < in.num_features; ++f) weighted = weighted || in.features[f].mean;

  Occurrences out;
  const int payload_bits = bit_width(static_cast<uint64_t>(std::max(weighted ? count : in.num_bags, int64_t{1})));
  const int row_bits = bit_width(static_cast<uint64_t>(in.num_rows));
  check_value(payload_bits + row_bits <= 64, "too many rows (", in.num_rows, ") and ids (", count,
              ") for one call: their numbers must fit in 64 bits together");
  std::unique_ptr<uint64_t[]> entries(new uint64_t[static_cast<size_t>(count)]);
  if (weighted) {
    out.bag_of.reset(new uint32_t[static_cast<size_t>(count)]);
    out.coefficients.reset(new float[static_cast<size_t>(count)]);
  }
  const EntryWriter writer(in, entries.get(), payload_bits, out.bag_of.get(), out.coefficients.get());
  const int64_t workers = workers_for(count + in.num_bags, 8192), piece = 1 + in.num_bags / (8 * workers);
  std::vector<int64_t> left_out(static_cast<size_t>(workers), 0), bad(static_cast<size_t>(workers), kNoBadPosition);
  parallel_pieces(in.num_bags, piece, workers, [&](int64_t begin, int64_t end, int64_t worker) {
    const auto w = static_cast<size_t>(worker);
    left_out[w] += writer.write(begin, end, &bad[w]);
  });
  int64_t valid = count;
  for (size_t w = 0; w < left_out.size(); ++w) {
    valid -= left_out[w];
    bounds.position = std::min(bounds.position, bad[w]);
  }
  in.raise(bounds);
  out.sort = sort_rows(std::move(entries), count, valid, row_bits, payload_bits);
  return out;
}

// Chunk sums of the runs that are longer than a chunk, level by level until at most kChunk remain of each.
class LongRuns {
 public:
  LongRuns(const RunArgs& args, int64_t num_runs, int64_t max_dim) : args_(args), max_dim_(max_dim) {
    for (int64_t r = 0; r < num_runs; ++r) {
      const int64_t start = args.starts[r], count = args.starts[r + 1] - start;
      if (count <= kChunk) continue;
      runs_.push_back({r, nullptr, count});
      firsts_.push_back(start);
    }
    while (sum_level()) continue;
  }

  const std::vector<LongRun>& runs() const { return runs_; }

 private:
  int64_t dim_of(int64_t entry) const {
    const uint64_t payload = args_.sorted[entry] & ((uint64_t{1} << args_.payload_bits) - 1);
    const int64_t bag = args_.bag_of ? args_.bag_of[payload] : static_cast<int64_t>(payload);
    return args_.features[bag / args_.batch].embedding_dim;
  }

  // Replaces the terms of every run that has more than kChunk by their chunk sums; false when there was none.
  bool sum_level() {
    std::vector<ChunkSum> chunks;
    int64_t floats = 0;
    for (size_t i = 0; i < runs_.size(); ++i)
      if (runs_[i].count > kChunk) floats += ceil_div(runs_[i].count, kChunk) * dim_of(firsts_[i]);
    if (floats == 0) return false;
    buffers_.emplace_back(new float[static_cast<size_t>(floats)]);
    float* out = buffers_.back().get();
    for (size_t i = 0; i < runs_.size(); ++i) {
      LongRun& run = runs_[i];
      if (run.count <= kChunk) continue;
      const int64_t n = ceil_div(run.count, kChunk), D = dim_of(firsts_[i]);
      for (int64_t c = 0, done = 0; c < n; ++c, done += kChunk)
        chunks.push_back({firsts_[i] + done, run.partials ? run.partials + done * D : nullptr,
                          std::min(kChunk, run.count - done), D, out + c * D});
      run.partials = out;
      run.count = n;
      out += n * D;
    }
    const auto sum_chunks = kernels<EmbeddingBagBackwardKernels>().sum_chunks;
    const int64_t total = static_cast<int64_t>(chunks.size()), piece = 1 + kPieceFloats / (kChunk * max_dim_);
    parallel_pieces(total, piece, workers_for(total, piece),
                    [&](int64_t begin, int64_t end, int64_t) { sum_chunks(args_, chunks.data(), begin, end); });
    return true;
  }

  RunArgs args_;
  int64_t max_dim_;
  std::vector<LongRun> runs_;
  std::vector<int64_t> firsts_;  // of each run: its first sorted occurrence
  std::vector<std::unique_ptr<float[]>> buffers_;
};

using FinishRuns = void (*)(const RunArgs&, const RowTarget&, float*, int64_t, int64_t);

RunArgs run_args(const BagInput& in, const Occurrences& o, const Tensor& grad, float inverse_scale) {
  return {in.features.get(),
          o.sort.entries.get(),
          o.sort.payload_bits,
          o.bag_of.get(),
          o.coefficients.get(),
          in.bags.batch,
          grad.const_data_ptr<float>(),
          in.output_dim,
          o.sort.starts.get(),
          nullptr,
          0,
          inverse_scale};
}

// Sums every run and hands it to `finish` (a kernel of EmbeddingBagBackwardKernels) with `target`.
void finish_all(const BagInput& in, const Occurrences& o, RunArgs args, const RowTarget& target, FinishRuns finish) {
  const LongRuns long_runs(args, o.sort.num_runs, in.max_dim);
  args.long_runs = long_runs.runs().data();
  args.num_long_runs = static_cast<int64_t>(long_runs.runs().size());
  const int64_t runs = o.sort.num_runs, floats = runs ? o.sort.starts[runs] * in.max_dim + runs * 16 : 0;
  const int64_t workers = workers_for(1 + floats / kPieceFloats, 1);
  const int64_t pieces = pieces_for(floats, kPieceFloats, workers);
  const int64_t row = (in.max_dim + 63) / 64 * 64;
  std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(workers * row)]);
  parallel_pieces(runs, ceil_div(runs, pieces), workers, [&](int64_t begin, int64_t end, int64_t worker) {
    finish(args, target, scratch.get() + worker * row, begin, end);
  });
}

// The single table of a call without a layout, from the shape its gradient is to have.
BagInput read_bags_for(const std::vector<int64_t>& weights_shape, const Tensor& values, const Tensor& offsets,
                       const OptionalTensor& per_sample_weights, const TableLayout& layout, const BagOptions& options) {
  const size_t rank = layout.embedding_dims ? 1 : 2;
  check_value(weights_shape.size() == rank, "weights_shape must have ", rank, " element(s), got ",
              weights_shape.size());
  return read_bags(values, offsets, per_sample_weights, layout, options, weights_shape[0],
                   rank == 2 ? weights_shape[1] : 1);
}

Tensor backward_dense(const Tensor& grad_in, const std::vector<int64_t>& weights_shape, const Tensor& values,
                      const Tensor& offsets, const OptionalTensor& per_sample_weights,
                      const OptionalTensor& weight_offsets, const OptionalTensor& row_offsets,
                      const OptionalTensor& num_embeddings, const OptionalTensor& embedding_dims,
                      const OptionalTensor& output_offsets, const OptionalTensor& mean, int64_t output_dim,
                      const std::string& pooling, int64_t padding_idx, const std::string& bounds_check) {
  const TableLayout layout{weight_offsets, row_offsets, num_embeddings, embedding_dims,
                           output_offsets, mean,        output_dim};
  const BagOptions options = parse_bag_options(pooling, padding_idx, bounds_check);
  const BagInput in = read_bags_for(weights_shape, values, offsets, per_sample_weights, layout, options);
  check_gradient(grad_in, values, in.bags.batch, in.output_dim);
  check_tables_apart(in);
  const Tensor grad = as_contiguous(grad_in);
  const Occurrences o = sort_occurrences(in);
  Tensor out = torch::stable::new_zeros(grad, {weights_shape.data(), weights_shape.size()}, ScalarType::Float);
  RowTarget target{};
  target.weights = out.mutable_data_ptr<float>();
  finish_all(in, o, run_args(in, o, grad, 1.0f), target, kernels<EmbeddingBagBackwardKernels>().dense);
  return out;
}

// Rows touched per feature's table, and where each table's gradients start in the flat output.
struct SparseLayout {
  std::vector<int64_t> row_counts;
  std::vector<int64_t> grad_start;
  int64_t floats = 0;
};

SparseLayout sparse_layout(const BagInput& in, const RowSort& sort) {
  SparseLayout out{std::vector<int64_t>(static_cast<size_t>(in.num_features), 0),
                   std::vector<int64_t>(static_cast<size_t>(in.num_features), 0), 0};
  const auto runs_before = [&](int64_t linear_row) {
    const int64_t* starts = sort.starts.get();
    return std::partition_point(starts, starts + sort.num_runs,
                                [&](int64_t entry) {
                                  return static_cast<int64_t>(sort.entries[entry] >> sort.payload_bits) < linear_row;
                                }) -
           starts;
  };
  std::vector<int64_t> order(static_cast<size_t>(in.num_features));
  for (size_t f = 0; f < order.size(); ++f) order[f] = static_cast<int64_t>(f);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return in.features[a].row_offset < in.features[b].row_offset; });
  int64_t previous_end = -1;
  for (const int64_t f : order) {
    const Feature& table = in.features[f];
    if (table.num_embeddings == 0) continue;
    const int64_t first = runs_before(table.row_offset), end = runs_before(table.row_offset + table.num_embeddings);
    const auto i = static_cast<size_t>(f);
    out.row_counts[i] = end - first;
    // Tables come one after another in the output; features that share one share its place.
    if (table.row_offset < previous_end) out.floats -= (end - first) * table.embedding_dim;
    out.grad_start[i] = out.floats - first * table.embedding_dim;
    out.floats += (end - first) * table.embedding_dim;
    previous_end = table.row_offset + table.num_embeddings;
  }
  return out;
}

std::tuple<Tensor, Tensor, Tensor> backward_sparse(
    const Tensor& grad_in, const std::vector<int64_t>& weights_shape, const Tensor& values, const Tensor& offsets,
    const OptionalTensor& per_sample_weights, const OptionalTensor& weight_offsets, const OptionalTensor& row_offsets,
    const OptionalTensor& num_embeddings, const OptionalTensor& embedding_dims, const OptionalTensor& output_offsets,
    const OptionalTensor& mean, int64_t output_dim, const std::string& pooling, int64_t padding_idx,
    const std::string& bounds_check) {
  const TableLayout layout{weight_offsets, row_offsets, num_embeddings, embedding_dims,
                           output_offsets, mean,        output_dim};
  const BagOptions options = parse_bag_options(pooling, padding_idx, bounds_check);
  const BagInput in = read_bags_for(weights_shape, values, offsets, per_sample_weights, layout, options);
  check_gradient(grad_in, values, in.bags.batch, in.output_dim);
  check_tables_apart(in);
  const Tensor grad = as_contiguous(grad_in);
  const Occurrences o = sort_occurrences(in);
  const SparseLayout sparse = sparse_layout(in, o.sort);
  Tensor rows = new_tensor(grad, {o.sort.num_runs}, ScalarType::Long);
  Tensor row_grads = new_tensor(grad, {sparse.floats}, ScalarType::Float);
  Tensor row_counts = new_tensor(grad, {in.num_features}, ScalarType::Long);
  std::copy(sparse.row_counts.begin(), sparse.row_counts.end(), row_counts.mutable_data_ptr<int64_t>());
  RowTarget target{};
  target.weights = row_grads.mutable_data_ptr<float>();
  target.rows = rows.mutable_data_ptr<int64_t>();
  target.grad_start = sparse.grad_start.data();
  finish_all(in, o, run_args(in, o, grad, 1.0f), target, kernels<EmbeddingBagBackwardKernels>().sparse);
  return {rows, row_grads, row_counts};
}

// The value of an optional one-element float32 tensor.
float scalar_or(const OptionalTensor& t, const Tensor& like, const char* name, float otherwise) {
  if (!t) return otherwise;
  check_value(t->numel() == 1, name, " must have one element, got shape ", shape_of(*t));
  check_dtype(*t, ScalarType::Float, name);
  check_same_device(*t, like, name, "weights");
  return *t->const_data_ptr<float>();
}

bool forward_found_bad_ids(const OptionalTensor& status, const Tensor& weights, const BagOptions& options) {
  if (!status || !options.raise) return false;
  check_shape(*status, {2}, "status");
  check_dtype(*status, ScalarType::Long, "status");
  check_same_device(*status, weights, "status", "weights");
  return *status->const_data_ptr<int64_t>() != kNoBadPosition;
}

void backward_fused(const Tensor& weights, const OptionalTensor& sum, const Tensor& step, const Tensor& lr,
                    const Tensor& grad_in, const Tensor& values, const Tensor& offsets,
                    const OptionalTensor& per_sample_weights, const OptionalTensor& weight_offsets,
                    const OptionalTensor& row_offsets, const OptionalTensor& num_embeddings,
                    const OptionalTensor& embedding_dims, const OptionalTensor& output_offsets,
                    const OptionalTensor& mean, int64_t output_dim, const std::string& pooling, int64_t padding_idx,
                    const std::string& bounds_check, const std::string& optimizer_name, double eps,
                    const OptionalTensor& status, const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  const TableLayout layout{weight_offsets, row_offsets, num_embeddings, embedding_dims,
                           output_offsets, mean,        output_dim};
  const BagOptions options = parse_bag_options(pooling, padding_idx, bounds_check);
  const Optimizer optimizer = parse_optimizer(optimizer_name);
  check_update(weights, sum, step, lr, optimizer);
  const BagInput in = read_bags(values, offsets, per_sample_weights, layout, options, weights);
  check_gradient(grad_in, values, in.bags.batch, in.output_dim);
  check_tables_apart(in);
  check_value(!sum || sum->numel() >= in.num_rows, "sum must have one element per row (", in.num_rows, "), got ",
              sum ? sum->numel() : 0);
  const float scale = scalar_or(grad_scale, weights, "grad_scale", 1.0f);
  const bool overflowed = scalar_or(found_inf, weights, "found_inf", 0.0f) != 0.0f;
  if (overflowed || forward_found_bad_ids(status, weights, options)) return;

  const KeepDenormals guard;  // also for what is computed once: eps, 1 / scale
  const Tensor grad = as_contiguous(grad_in);
  const Occurrences o = sort_occurrences(in);
  RowTarget target{};
  target.weights = weights.mutable_data_ptr<float>();
  target.sum = sum ? sum->mutable_data_ptr<float>() : nullptr;
  target.lr = *lr.const_data_ptr<float>();
  target.eps = static_cast<float>(eps);
  const EmbeddingBagBackwardKernels& k = kernels<EmbeddingBagBackwardKernels>();
  finish_all(in, o, run_args(in, o, grad, 1.0f / scale), target,
             optimizer == Optimizer::kSgd ? k.sgd : k.rowwise_adagrad);
  ++*step.mutable_data_ptr<int64_t>();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) {
  m.impl("embedding_bag_backward_dense", TORCH_BOX(&backward_dense));
  m.impl("embedding_bag_backward_sparse", TORCH_BOX(&backward_sparse));
  m.impl("embedding_bag_backward_fused_", TORCH_BOX(&backward_fused));
}

}  // namespace rec_kernels
