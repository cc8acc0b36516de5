// Backward of embedding_bag through multiplied parts: the gradient of a part's row is the bag's gradient times the rows
// of the other parts. These kernels sum such terms chunk by chunk; the sums are finished like those of long runs.
//
// A group of lanes takes a chunk, a lane four neighbouring columns. Bytes moved: for every occurrence the gradient and
// the rows of the other parts read, for every chunk a row of floats written.
#include "embedding_bag/cuda/backward_kernels.cuh"
#include "rows/cuda/writer.cuh"

namespace rec_kernels {
namespace {

constexpr int kMostOthers = kMaxParts - 1;

// An entry's term: the gradient of its bag, times the rows of the other parts in order, times a coefficient.
struct Term {
  const float* gradient;
  int64_t others[kMostOthers];  // byte offsets of the other parts' rows, then -1
  float coefficient;
};

template <class Format>
__device__ __forceinline__ Term term_of(const SumArgs& a, int64_t entry, int64_t D) {
  const uint32_t payload = a.runs.payloads[entry], position = a.runs.position(payload), bag = a.runs.bag_of[position];
  const int64_t feature = a.bags.feature_of(bag), own = a.runs.part(a.bags, feature, payload);
  const int64_t first = a.bags.first_part(feature), count = a.bags.first_part(feature + 1) - first;
  Term term{a.runs.gradients[payload], {-1, -1, -1}, a.runs.coefficients ? a.runs.coefficients[position] : 1.0f};
  if (a.parts.mapped[own].combine != Combine::kMult) return term;  // of a feature that does not multiply
  const int64_t id = a.bags.id(position);
  static_assert(kMostOthers == 3, "others has three initializers");
#pragma unroll
  for (int o = 0; o < kMostOthers; ++o) {
    if (o + 1 >= count) continue;
    const int64_t part = first + o + (first + o >= own);
    term.others[o] = a.parts[part].weight_offset + a.parts.mapped[part].partition.row(id) * Format::row_bytes(D);
  }
  return term;
}

// Sums the terms of entries [first, first + count) of one row, count <= kChunk.
template <class Format, int G, int kBlocks>
struct ProductSum {
  const SumArgs& a;
  const Group<G>& group;
  int64_t first;
  int count;
  int64_t D;

  __device__ __forceinline__ void operator()(int64_t column, Vec4 (&sum)[kBlocks]) const {
    constexpr int kTerms = kInFlight / kBlocks;  // terms in flight, of two rows each
    for (int k = 0; k < kBlocks; ++k)
      for (int j = 0; j < 4; ++j) sum[k].v[j] = -0.0f;  // the identity of addition, also for -0
    for (int begin = 0; begin < count; begin += G) {
      Term mine{};
      if (begin + group.lane < count) mine = term_of<Format>(a, first + begin + group.lane, D);
      const int here = count - begin < G ? count - begin : G;
      for (int next = 0; next < here; next += kTerms) {
        Vec4 x[kTerms][kBlocks], y[kTerms][kBlocks];
        bool multiplied[kTerms];
#pragma unroll
        for (int u = 0; u < kTerms; ++u) {
          const float* gradient = group.broadcast(mine.gradient, next + u);
          const int64_t other = group.broadcast(mine.others[0], next + u);
          multiplied[u] = other >= 0;
          if (next + u >= here) continue;
          const bool aligned = rows_aligned(gradient, D);
#pragma unroll
          for (int k = 0; k < kBlocks; ++k)
            x[u][k] = load_columns(gradient, column + (k * G + group.lane) * 4, D, aligned);
          if (multiplied[u]) load(other, column, y[u]);
        }
#pragma unroll
        for (int u = 0; u < kTerms; ++u) {
          if (next + u >= here) continue;
          if (multiplied[u]) multiply(y[u], x[u]);
#pragma unroll
          for (int o = 1; o < kMostOthers; ++o) {
            const int64_t other = group.broadcast(mine.others[o], next + u);
            if (other < 0) continue;
            load(other, column, y[u]);
            multiply(y[u], x[u]);
          }
          add_term(sum, x[u], group.broadcast(mine.coefficient, next + u));
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void load(int64_t place, int64_t column, Vec4 (&y)[kBlocks]) const {
    const uint8_t* row = a.weights + place;
    const bool aligned = columns_aligned<Format>(row, D);
    const ColumnReader<Format> reader(row, D, aligned);
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      const int64_t c = column + (k * G + group.lane) * 4;
      y[k] = c < D ? reader.read(c) : Vec4{};
    }
  }
  __device__ __forceinline__ static void multiply(const Vec4 (&y)[kBlocks], Vec4 (&x)[kBlocks]) {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k)
      for (int j = 0; j < 4; ++j) x[k].v[j] = x[k].v[j] * y[k].v[j];
  }
};

template <class Format, int G, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks == 1 ? 2 : 1) sum_products_kernel(SumArgs a) {
  if (a.skip.now()) return;
  const Group<G> group;
  const int64_t chunks = *a.runs.num_chunks;
  for (int64_t chunk = Group<G>::first(); chunk < chunks; chunk += Group<G>::stride()) {
    const int64_t run = a.runs.owners[chunk], part = part_of_run(a.runs, a.bags, run);
    if (!a.parts.records[part].multiplied || !a.parts.has_format(part, a.format)) continue;
    const int64_t D = a.parts[part].embedding_dim;
    const ChunkOfRun here(a.runs, run, chunk);
    write_chunk_sum<G, kBlocks>(a, group, chunk, D,
                                ProductSum<Format, G, kBlocks>{a, group, here.first, here.count, D});
  }
}

}  // namespace

void launch_product_sums(const SumArgs& a, cudaStream_t stream) {
  with_bag_format(a.parts.formats[a.format], [&](auto format) {
    using Format = decltype(format);
    with_widths_of<Format>(a.max_dim, [&](auto group, auto blocks) {
      launch_for(a.runs.most_chunks, group, stream, sum_products_kernel<Format, group, blocks>, a);
    });
  });
}

}  // namespace rec_kernels
