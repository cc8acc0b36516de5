// Encoding and decoding of rows. Compiled once per instruction set: no torch header and no std template here.
#include "rows/cpu/writer.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

template <class Format>
RK_HOST_DEVICE void decode_row(const uint8_t* row, int64_t D, float* out) {
  const RowReader<Format> reader(row, D);
  int64_t c = 0;
  for (; c + kStep <= D; c += kStep) {
    const Columns x = reader.template read<false>(c, kStep);
    for (int v = 0; v < kStepVecs; ++v) store_as(out + c + v * kLanes, x.v[v]);
  }
  if (c == D) return;
  const Columns x = reader.template read<true>(c, D - c);
  memcpy(out + c, &x, static_cast<size_t>(D - c) * sizeof(float));
}

template <class Format>
void decode_rows(const uint8_t* rows, int64_t N, int64_t D, float* out) {
  if constexpr (kIsFloats<Format>) {
    decode_row<Format>(rows, N * D, out);  // float rows are contiguous
  } else {
    const int64_t bytes = Format::row_bytes(D);
    for (int64_t n = 0; n < N; ++n) decode_row<Format>(rows + n * bytes, D, out + n * D);
  }
}

// True for formats that round and therefore use noise.
template <class Format>
inline constexpr bool kRounds = true;
template <>
inline constexpr bool kRounds<Fp32> = false;

// constexpr, so that no code of this instruction set runs when the library is loaded.
template <class... Formats>
struct Table {
  static constexpr RowFormatKernels kernels = {{RowsWriter<Formats, false>::write...},
                                               {RowsWriter<Formats, kRounds<Formats>>::write...},
                                               {decode_rows<Formats>...}};
};

}  // namespace
}  // namespace RK_ISA

template <>
const RowFormatKernels RowFormatKernels::table<CpuIsa::RK_ISA> = RK_ISA::WithAllFormats<RK_ISA::Table>::kernels;

}  // namespace rec_kernels
