// Reads rows, calls CPU kernels, and writes their results; test_aarch64.py runs it on an emulated processor.
// In: N, D and the bytes of a row of each format as int64, then x, float32 [N, D]. Out: for each format, rule and
// rounding the encoded and the decoded rows; then scale_rows, row_dot, dot_interaction and
// factorization_machine, each with its gradient, of parts of x.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "dense/cpu/dot_interaction.h"
#include "dense/cpu/factorization_machine.h"
#include "dense/cpu/scale_rows.h"
#include "rows/cpu/row_formats.h"

using namespace rec_kernels;

namespace {

using Floats = std::vector<float>;

template <class T>
std::vector<T> take(size_t count) {
  std::vector<T> found(count);
  if (std::fread(found.data(), sizeof(T), count, stdin) != count) std::exit(2);
  return found;
}

template <class T>
void give(const std::vector<T>& values) {
  if (std::fwrite(values.data(), sizeof(T), values.size(), stdout) != values.size()) std::exit(3);
}

void rows_of_format(int format, int64_t bytes, const Floats& x, int64_t N, int64_t D) {
  const RowFormatKernels& k = RowFormatKernels::table<CpuIsa::baseline>;
  for (const bool round_up : {false, true}) {
    const RowRounding rounding{make_noise(42, 9, {3, 0, 0}), round_up};
    for (const auto encode : {k.nearest[format], k.stochastic[format]}) {
      std::vector<uint8_t> rows(static_cast<size_t>(N * bytes));
      Floats back(x.size());
      if (encode(x.data(), N, D, rounding, {rows.data(), 7, nullptr}) != N) std::exit(4);
      k.decode[format](rows.data(), N, D, back.data());
      give(rows);
      give(back);
    }
  }
}

void scaled_rows(const Floats& x, int64_t N, int64_t D) {
  const ScaleRowsKernels& k = ScaleRowsKernels::table<CpuIsa::baseline>;
  Floats out(x.size()), dots(static_cast<size_t>(N));
  k.scale_rows(x.data(), x.data(), out.data(), D, 0, N);
  k.row_dot(x.data(), out.data(), dots.data(), D, 0, N);
  give(out);
  give(dots);
}

// Sample n has row n as its dense row, and the three rows from n on as its sparse ones.
void interactions(const Floats& x, int64_t N, int64_t D) {
  const DotInteractionKernels& k = DotInteractionKernels::table<CpuIsa::baseline>;
  const InteractionShape shape{3, D, false};
  const int64_t samples = N - 2, columns = D + 6;
  Floats out(static_cast<size_t>(samples * columns)), dense(static_cast<size_t>(samples * D)), sparse(3 * dense.size());
  Floats scratch(static_cast<size_t>(k.forward_scratch(shape) + k.backward_scratch(shape)));
  const InteractionRows<const float> in{x.data(), D, x.data(), D};
  k.forward(shape, in, out.data(), columns, samples, scratch.data());
  k.backward(shape, in, out.data(), columns, {dense.data(), D, sparse.data(), 3 * D}, samples, scratch.data());
  give(out);
  give(dense);
  give(sparse);
}

// Sample n has the three rows from n on; the first three rows of x are y.
void factorizations(const Floats& x, int64_t N, int64_t D) {
  const FactorizationMachineKernels& k = FactorizationMachineKernels::table<CpuIsa::baseline>;
  const FactorizationShape shape{3, D, 2};
  const int64_t samples = N - 2;
  Floats out(static_cast<size_t>(samples * 6)), grad_x(static_cast<size_t>(samples * 3 * D));
  Floats grad_y(static_cast<size_t>(samples * 6));
  Floats scratch(static_cast<size_t>(k.forward_scratch(shape) + k.backward_scratch(shape)));
  const SampleRows<const float> from{x.data(), D}, y{x.data(), 0};
  k.forward(shape, from, y, {out.data(), 6}, samples, scratch.data());
  k.backward(shape, {out.data(), 6}, from, y, {grad_x.data(), 3 * D}, {grad_y.data(), 6}, samples, scratch.data());
  give(out);
  give(grad_x);
  give(grad_y);
}

}  // namespace

int main() {
  const auto sizes = take<int64_t>(2 + kNumRowFormats);
  const int64_t N = sizes[0], D = sizes[1];
  const auto x = take<float>(static_cast<size_t>(N * D));
  for (int format = 0; format < kNumRowFormats; ++format) rows_of_format(format, sizes[2 + format], x, N, D);
  scaled_rows(x, N, D);
  interactions(x, N, D);
  factorizations(x, N, D);
}
