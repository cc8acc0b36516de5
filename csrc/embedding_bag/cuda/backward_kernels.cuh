// Kernels of embedding_bag's backward that sum a run's gradient and finish its row, generic over the target.
//
// A group of lanes takes a row (a run of sorted occurrences), a lane four adjacent columns. The chunks of rows with
// more than kChunk occurrences are summed in parallel first. Bytes moved: the gradient of every occurrence read, every
// touched row and its state read and written once.
#pragma once

#include "core/cuda/warp_dot.cuh"
#include "embedding_bag/cuda/sort.cuh"
#include "embedding_bag/update.h"
#include "rows/optimizers/sgd_rowwise_adagrad.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Threads per block of finish_kernel. Small blocks use registers well: room for 20 warps fits ten blocks of 64 threads,
// but only two of 256.
constexpr int kFinishThreads = 64;

// Blocks that search the chunks for long runs: several per multiprocessor of a large GPU.
constexpr int64_t kLongRunBlocks = kMostBlocks < 1024 ? kMostBlocks : 1024;

// Lanes that prefetch the same memory, each a share of its sectors.
struct PrefetchLanes {
  int lane, count;

  __device__ __forceinline__ void bytes(const void* p, int64_t bytes) const {
    constexpr int64_t kSector = 32;
#pragma unroll 1
    for (int64_t i = kSector * lane; i < bytes; i += kSector * count) prefetch(static_cast<const uint8_t*>(p) + i);
  }
  __device__ __forceinline__ void one(const void* p) const {
    if (lane == 0) prefetch(p);
  }
};

// Float rows whose weights are loaded while the optimizer's factor is computed.
template <int G, int kBlocks, class Target>
constexpr bool kReadsAhead = Target::kUpdates && !Target::kEncodes && !Target::kElementwise && !kTakesWider<kBlocks, G>;

// Writes a float row. g is its gradient; for a wider row, gradient(column, last, read) computes it block by block,
// where read(c) returns columns c .. c+3 of the weights. w is the weights if kReadsAhead.
template <int G, int kBlocks, class Target, class Gradient>
__device__ __forceinline__ void put_row(const Target& target, const Part& f, int64_t row, int64_t run, float factor,
                                        const Group<G>& group, Vec4 (&g)[kBlocks], Vec4 (&w)[kBlocks],
                                        const Gradient& gradient) {
  constexpr int64_t kWidth = kBlocks * 4 * G;
  const int64_t D = f.embedding_dim;
  float* out = target.place(f, row, run);
  const bool aligned = rows_aligned(out, D);
  for (int64_t column = 0; column < columns_behind<kBlocks, G>(D); column += kWidth) {
    if (is_wider<G, kBlocks>(D)) gradient(column, true, [&](int64_t c) { return load_columns(out, c, D, aligned); });
    // Issue all loads before the first store: the compiler does not move loads above stores.
    if constexpr (Target::kUpdates && !kReadsAhead<G, kBlocks, Target>) load_row(out, column, D, aligned, group, w);
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) w[k] = target.updated(f, w[k], g[k], factor);
    store_row(out, column, D, aligned, group, w);
  }
}

// Clipping and weight decay between a row's gradient and the optimizer (rows/optimizers/clipping_and_decay.h): none for
// gradients that are stored.
template <class Target, bool = Target::kUpdates>
struct StepOf {
  __device__ explicit StepOf(const Target&) {}
  __device__ static bool clips_norm() { return false; }
  __device__ void clip(float) {}
  template <class Group, class Columns, class Read>
  __device__ void take(int64_t, int64_t, const Group&, Columns&, const Read&) const {}
};

template <class Target>
struct StepOf<Target, true> {
  RowStep row;

  __device__ __forceinline__ explicit StepOf(const Target& target) : row(target.u.gradient_step) {}
  __device__ __forceinline__ bool clips_norm() const { return row.step.clips_norm(); }
  __device__ __forceinline__ void clip(float square_sum) { row.clip_norm(square_sum); }

  // Clips the gradient of the columns starting at `column` and, once the norm is known, adds L2 decay.
  template <int G, int kBlocks, class Read>
  __device__ __forceinline__ void take(int64_t column, int64_t D, const Group<G>& group, Vec4 (&g)[kBlocks],
                                       const Read& read) const {
    if (!row.step.is_active()) return;
    for (int k = 0; k < kBlocks; ++k)
      for (int j = 0; j < 4; ++j) g[k].v[j] = row.clipped(g[k].v[j]);
    if (row.adds_decay()) add_weights(column, D, group, g, read);
  }
  // Adds the decay of an optimizer that turns gradients into directions.
  template <int G, int kBlocks, class Read>
  __device__ __forceinline__ void decay_direction(int64_t column, int64_t D, const Group<G>& group, Vec4 (&r)[kBlocks],
                                                  const Read& read) const {
    if (row.step.decays_weights()) add_weights(column, D, group, r, read);
  }

 private:
  template <int G, int kBlocks, class Read>
  __device__ __forceinline__ void add_weights(int64_t column, int64_t D, const Group<G>& group, Vec4 (&g)[kBlocks],
                                              const Read& read) const {
    for (int k = 0; k < kBlocks; ++k) {
      const int64_t c = column + (k * G + group.lane) * 4;
      if (c >= D) continue;
      const Vec4 w = read(c);
      for (int j = 0; j < 4; ++j) g[k].v[j] = row.decayed(g[k].v[j], w.v[j]);
    }
  }
};

// Computes a row's gradient in g and returns its square sum if it is needed. For a row wider than a group holds, g has
// some of its columns. sum_scaled(column, read) computes the columns starting at `column`. Clipping by norm takes
// another pass, which sums all terms of a wider row again; a loop over both passes compiles their common code once.
template <int G, int kBlocks, class Target, class SumScaled, class Read>
__device__ __forceinline__ float sum_row(const Target& target, int64_t D, const Group<G>& group, StepOf<Target>* step,
                                         Vec4 (&g)[kBlocks], const SumScaled& sum_scaled, const Read& read) {
  if constexpr (kTakesWider<kBlocks, G>) {
    float square_sum = 0.0f;
#pragma unroll 1
    for (int pass = step->clips_norm() ? 0 : 1; pass < 2; ++pass) {
      const bool all = pass == 0 || target.needs_mean_square();
      SquareSum<G, kBlocks> squares{group};
      for (int64_t column = 0; column < D && (all || column == 0); column += kBlocks * 4 * G) {
        sum_scaled(column, read);
        squares.add(column, D, g);
      }
      if (all) square_sum = squares.total();
      if (pass == 0) step->clip(square_sum);
    }
    return square_sum;
  } else {
    const auto squares_of = [&] {
      SquareSum<G, kBlocks> squares{group};
      squares.add(0, D, g);
      return squares.total();
    };
    sum_scaled(0, read);
    if (step->clips_norm()) {
      step->clip(squares_of());
      step->take(0, D, group, g, read);  // clipping by value again changes nothing
    }
    return target.needs_mean_square() ? squares_of() : 0.0f;
  }
}

// Sums a row's gradient and passes it to the target. Groups are in step: a group without a row takes part with no
// columns, and reads the data of run 0 and part 0, except rows and their state, which others may write.
template <int G, int kBlocks, class Target, class Sum>
__device__ __forceinline__ void finish_row(const SumArgs& a, const Target& target, const Group<G>& group, int64_t part,
                                           const Part& f, int64_t row, int64_t run, const Sum& sum) {
  const int64_t D = f.embedding_dim;
  const float inverse = inverse_of(a.grad_scale), before = D > 0 ? target.state_before(row) : 0.0f;
  Vec4 g[kBlocks];
  StepOf<Target> step(target);
  const auto sum_scaled = [&](int64_t column, const auto& read) {
    sum(column, g);
    if (inverse != 1.0f)
      for (int k = 0; k < kBlocks; ++k)
        for (int j = 0; j < 4; ++j) g[k].v[j] = g[k].v[j] * inverse;
    step.take(column, D, group, g, read);
  };
  const auto read = [&](int64_t c) { return target.read(f, row, c); };
  const float square_sum = sum_row(target, D, group, &step, g, sum_scaled, read);
  Vec4 w[kBlocks] = {};
  if constexpr (kReadsAhead<G, kBlocks, Target>) {
    const float* weights = target.place(f, row, run);
    load_row(weights, 0, D, rows_aligned(weights, D), group, w);
  }
  const auto put = [&](float factor, const auto& gradient) {
    if constexpr (Target::kEncodes) target.put_row(f, row, factor, group, g, gradient);
    else put_row(target, f, row, run, factor, group, g, w, gradient);
  };
  if constexpr (Target::kUpdates) __syncwarp(group.mask);  // all lanes have read the state that one updates
  const float scalar = target.open(f, row, run, before, square_sum / static_cast<float>(D), group.lane == 0 && D > 0);
  if constexpr (Target::kElementwise) {
    const auto state = target.state_of(part, f, row, scalar);
    // Replaces gradients by directions. Called for each block of a wider row; updates the state only if `last`.
    const auto direction = [&](int64_t column, bool last, const auto& read) {
      if (is_wider<G, kBlocks>(D)) sum_scaled(column, read);
      state.direct(column, D, group, g, last);
      step.decay_direction(column, D, group, g, read);
    };
    if (!is_wider<G, kBlocks>(D)) direction(0, true, read);
    put(target.factor(state.optimizer, f, row, group, g, direction), direction);
  } else {
    put(scalar, [&](int64_t column, bool, const auto& read) { sum_scaled(column, read); });
  }
}

// A target consumes the gradients of the rows of one format: expect() prefetches before the sum is known, open() is
// called once per row, then updated() for its columns or, if kEncodes, put_row() for the whole row. A target with
// per-element state (kElementwise) first turns gradients into directions.

// Minimum resident blocks per multiprocessor for __launch_bounds__; without it, nvcc spills to fit more. kNarrow: for
// rows of up to 128 columns, keeps the four blocks that other targets with per-element state lose.
template <class Target>
constexpr bool kNarrow = false;
template <int kBlocks, int G, class Target>
constexpr int kResident =
    (kBlocks == 1   ? (Target::kEncodes   ? 12
                       : Target::kUpdates ? 14
                                          : 16)
     : kBlocks == 2 ? (Target::kElementwise ? 8 : 10)
                    : 8) -
    (Target::kElementwise && !(kBlocks == 1 && kNarrow<Target>) && !(kBlocks > 1 && G < kWarpSize) ? 4 : 0);
// Gradients in flight after the first one: fewer if the row is encoded.
template <int kBlocks, int G, class Target>
constexpr int kGradientsOf = Target::kElementwise && kTakesWider<kBlocks, G> ? kInFlight
                             : Target::kEncodes                              ? kInFlight / 2
                                                                             : kGradientsInFlight<kBlocks>;

// Prefetch rows with their state and first gradients. Measured on an H200: for float rows, prefetching helps with 64
// columns and hurts with more.
template <int G, int kBlocks, class Target>
constexpr bool kAsksAhead = Target::kEncodes || Target::kElementwise || kBlocks * G <= 16;

// Runs that a group looks up together, since a run takes three dependent reads. With more, prefetched rows would be
// evicted from the L2 cache before they are read.
template <int kBlocks, int G>
constexpr int kRunsAhead = kBlocks == 1 || G < kWarpSize ? 4 : 2;

// Data of a run that a group looks up before it sums the gradient.
struct alignas(16) RunAhead {
  int64_t row;
  Terms terms;  // empty: this launch does not finish the row
  uint32_t part;
};

// Maximum occurrences of a run that has at most kChunk chunk sums, which one group adds up.
constexpr int64_t kMostOfGroup = int64_t{kChunk} * kChunk;

// Number of sums that hierarchical chunking leaves of a run's occurrences, at most kChunk.
__device__ __forceinline__ uint32_t sums_left(uint32_t occurrences) {
  constexpr uint32_t kTerms = kChunk;
  uint32_t last = (occurrences - 1) / kTerms;  // index of the last sum
  while (last >= kTerms) last /= kTerms;
  return last + 1;
}

// Looks up runs first, first + stride, ..., with G / kRuns lanes each, writes them to `ahead` and prefetches their
// memory.
template <int G, int kBlocks, int kRuns, class Target>
__device__ __forceinline__ void look_ahead(const SumArgs& a, const Target& target, const Group<G>& group,
                                           uint32_t first, uint32_t num_runs, RunAhead* ahead) {
  const PrefetchLanes lanes{group.lane % (G / kRuns), G / kRuns};
  const uint32_t run = first + group.lane / lanes.count * static_cast<uint32_t>(Group<G>::stride());
  RunAhead known{};
  if (run >= first && run < num_runs) {  // first + ... may wrap around
    const uint32_t start = a.runs.starts[run], count = a.runs.starts[run + 1] - start, payload = a.runs.payloads[start];
    const int64_t row = a.runs.keys[start], part = part_of_entry(a.runs, a.bags, payload);
    if (a.finishes(run, part)) {
      const Part f = a.table_of(run, part, row);
      if constexpr (kAsksAhead<G, kBlocks, Target>) target.expect(part, f, row, lanes);
      known = {row, {}, static_cast<uint32_t>(part)};
      if (count > kChunk || (a.weights && a.parts.records[part].multiplied)) {
        const float* sums = a.partials + int64_t{a.runs.first_chunks[run]} * a.max_dim;
        known.terms = Terms::of_sums(sums, sums_left(count));
      } else {
        known.terms = Terms::of_entries(a, payload, start, count);
      }
      if constexpr (kAsksAhead<G, kBlocks, Target>) lanes.bytes(known.terms.row, 4 * f.embedding_dim);
    }
  }
  if (lanes.lane == 0) ahead[group.lane / lanes.count] = known;
}

// Sums each run, from its occurrences or from the sums of sum_chunks_kernel and sum_chunk_sums_kernel, and passes it to
// the target.
template <int G, int kBlocks, class Target>
__global__ void __launch_bounds__(kFinishThreads, (kResident<kBlocks, G, Target>))
    finish_kernel(SumArgs a, Target target) {
  if (a.skip.now()) return;
  constexpr int kRuns = kRunsAhead<kBlocks, G>;
  const Group<G> group(Pace::kInStep);
  RunAhead* ahead = shared_memory<RunAhead>() + threadIdx.x / G * kRuns;
  const uint32_t num_runs = *a.runs.num_runs, stride = static_cast<uint32_t>(Group<G>::stride());
  for (int64_t of_group = Group<G>::first(); of_group - group.in_warp() < num_runs;
       of_group += int64_t{kRuns} * stride) {
    const uint32_t first = of_group < num_runs ? static_cast<uint32_t>(of_group) : num_runs;
    __syncwarp(group.mask);  // the previous runs have been read
    look_ahead<G, kBlocks, kRuns>(a, target, group, first, num_runs, ahead);
    __syncwarp(group.mask);
#pragma unroll 1
    for (int r = 0; r < kRuns; ++r) {
      const RunAhead known = ahead[r];
      const bool there = known.terms.count > 0;
      if (!group.any_group(there)) continue;
      const uint32_t run = there ? first + r * stride : 0;
      Part f = a.table_of(run, known.part, known.row);
      if (!there) f.embedding_dim = 0;
      const TermSum<G, kBlocks, kGradientsOf<kBlocks, G, Target>> sum{a, group, known.terms, f.embedding_dim};
      finish_row<G, kBlocks>(a, target, group, known.part, f, known.row, run, sum);
    }
  }
}

// The entries of a chunk of a run.
struct ChunkOfRun {
  int64_t first;
  int count;

  __device__ __forceinline__ ChunkOfRun(const Runs& runs, int64_t run, int64_t chunk) {
    const int64_t done = (chunk - runs.first_chunks[run]) * kChunk, left = runs.count(run) - done;
    first = runs.starts[run] + done;
    count = static_cast<int>(left < kChunk ? left : kChunk);
  }
};

// Writes the sum of a chunk, computed block by block by sum(column, g).
template <int G, int kBlocks, class Sum>
__device__ __forceinline__ void write_chunk_sum(const SumArgs& a, const Group<G>& group, int64_t chunk, int64_t D,
                                                const Sum& sum) {
  float* out = a.partials + chunk * a.max_dim;
  for (int64_t column = 0; column < columns_behind<kBlocks, G>(D); column += kBlocks * 4 * G) {
    Vec4 g[kBlocks];
    sum(column, g);
    store_row(out, column, D, rows_aligned(out, D) && a.max_dim % 4 == 0, group, g);
  }
}

// Sums the chunks of runs, one group per chunk, except those of multiplied tables.
template <int G, int kBlocks>
__global__ void __launch_bounds__(kThreads) sum_chunks_kernel(SumArgs a) {
  if (a.skip.now()) return;
  const Group<G> group(Pace::kInStep);
  const int64_t chunks = *a.runs.num_chunks;
  for (int64_t chunk = Group<G>::first(); chunk - group.in_warp() < chunks; chunk += Group<G>::stride()) {
    int64_t D = 0;
    Terms terms{};
    if (chunk < chunks) {
      const int64_t run = a.runs.owners[chunk], part = part_of_run(a.runs, a.bags, run);
      if (!(a.weights && a.parts.records[part].multiplied)) {
        const ChunkOfRun here(a.runs, run, chunk);
        D = a.parts[part].embedding_dim;
        terms = Terms::of_entries(a, a.runs.payloads[here.first], static_cast<uint32_t>(here.first),
                                  static_cast<uint32_t>(here.count));
      }
    }
    if (!group.any_group(D > 0)) continue;
    // Rows of up to 16 columns have few bytes in flight, so eight are loaded at a time.
    constexpr int kRows = G == 4 ? 2 * kInFlight : kGradientsInFlight<kBlocks>;
    write_chunk_sum<G, kBlocks>(a, group, chunk, D, TermSum<G, kBlocks, kRows>{a, group, terms, D});
  }
}

// Sums the chunk sums of runs of more than kMostOfGroup occurrences hierarchically, until one group can add the rest. A
// block takes a run; sums overwrite the run's first terms.
template <int G, int kBlocks>
__global__ void __launch_bounds__(kThreads) sum_chunk_sums_kernel(SumArgs a) {
  if (a.skip.now()) return;
  const Group<G> group(Pace::kInStep);
  const int mine = threadIdx.x / G, groups = blockDim.x / G;
  const uint32_t chunks = *a.runs.num_chunks;
  for (uint32_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int64_t run = a.runs.owners[chunk];
    if (a.runs.first_chunks[run] != chunk || a.runs.count(run) <= kMostOfGroup) continue;  // uniform over the block
    const int64_t D = a.parts[part_of_run(a.runs, a.bags, run)].embedding_dim;
    float* rows = a.partials + int64_t{chunk} * a.max_dim;
    const bool aligned = rows_aligned(rows, D) && a.max_dim % 4 == 0;
    for (int64_t count = ceil_div(a.runs.count(run), kChunk); count > kChunk; count = ceil_div(count, kChunk)) {
      for (int64_t done = 0; done * kChunk < count; done += groups) {
        const int64_t sum = done + mine, first = sum * kChunk, left = count - first;
        for (int64_t column = 0; column < columns_behind<kBlocks, G>(D); column += kBlocks * 4 * G) {
          Vec4 g[kBlocks];
          if (group.any_group(left > 0)) {
            const auto count = static_cast<uint32_t>(left < kChunk ? left : kChunk);
            const Terms terms = left > 0 ? Terms::of_sums(rows + first * a.max_dim, count) : Terms{};
            TermSum<G, kBlocks>{a, group, terms, left > 0 ? D : 0}(column, g);
          }
          __syncthreads();  // all terms have been read before sums overwrite them
          if (left > 0) store_row(rows + sum * a.max_dim, column, D, aligned, group, g);
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace RK_ISA

// Launches no more blocks than are resident: groups process the runs in the order of rows, so that gradients shared by
// rows of a table are still in the L2 cache.
template <int G, int kBlocks, class Target>
void launch_finish(const SumArgs& a, const Target& target, cudaStream_t stream) {
  constexpr size_t kAhead = kFinishThreads / G * kRunsAhead<kBlocks, G> * sizeof(RunAhead);
  constexpr auto kKernel = finish_kernel<G, kBlocks, Target>;
  const dim3 grid = capped_grid(resident_blocks<kKernel>(kFinishThreads, kAhead), a.runs.most_runs, G, kFinishThreads);
  launch(kKernel, grid, dim3(kFinishThreads), kAhead, stream, a, target);
}

template <class Target>
void finish_few_widths(const SumArgs& a, const Target& target, cudaStream_t stream) {
  with_few_widths(a.max_dim, [&](auto group, auto blocks) { launch_finish<group, blocks>(a, target, stream); });
}

// An update of rows in `weights`.
struct RowUpdate : Update {
  uint8_t* weights;

  // Optimizers without per-element state: row-wise Adagrad or SGD.
  __device__ __forceinline__ bool is_adagrad() const { return optimizer == Optimizer::kRowwiseAdagrad; }
  __device__ __forceinline__ float state_before(int64_t row) const { return is_adagrad() ? state.sum[row] : 0.0f; }
  // Factor of a row's gradient. The lane with `stores` also updates the row's state.
  __device__ __forceinline__ float factor(const Part& f, int64_t row, float before, float mean_square,
                                          bool stores) const {
    const float rate = lr_of(f.shard.table);
    if (!is_adagrad()) return sgd_factor(rate);
    const float sum = before + mean_square;
    if (stores) state.sum[row] = sum;
    return rowwise_adagrad_factor(rate, eps, sum);
  }
  // Applies decoupled weight decay.
  __device__ __forceinline__ Vec4 shrunk(Vec4 w, const Part& f) const {
    const float rate = shrinkage(f.shard.table);
    for (int j = 0; j < 4; ++j) w.v[j] = fused_multiply_add(rate, w.v[j], w.v[j]);
    return w;
  }
};

// Updates the rows of a.format, which is Format, not fp32. targets_encoded.cu and targets_encoded_microexponents.cu
// instantiate it.
template <class Format>
void finish_encoded(const SumArgs& a, const RowUpdate& update, cudaStream_t stream);

}  // namespace rec_kernels
