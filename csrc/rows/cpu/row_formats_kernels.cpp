// Encoding and decoding of rows. Compiled once per instruction set: no torch header and no std template here.
#include "rows/cpu/writer.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// A store past the caches, which would read the memory first. `to` is a multiple of the register's bytes.
RK_HOST_DEVICE void stream_to(float* to, FloatLanes x) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX2__)
  _mm256_stream_ps(to, (__m256)x);
#elif defined(__SSE2__)
  _mm_stream_ps(to, (__m128)x);
#else
  store_as(to, x);
#endif
}

// Before other threads read what stream_to() has written.
RK_HOST_DEVICE void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <class Format, bool kStreams>
RK_HOST_DEVICE void decode_row(const uint8_t* row, int64_t D, float* out) {
  const RowReader<Format> reader(row, D);
  int64_t c = 0;
  for (; c + kStep <= D; c += kStep) {
    const Columns x = reader.template read<false>(c, kStep);
    for (int v = 0; v < kStepVecs; ++v) {
      if constexpr (kStreams) stream_to(out + c + v * kLanes, x.v[v]);
      else store_as(out + c + v * kLanes, x.v[v]);
    }
  }
  if (c == D) return;
  const Columns x = reader.template read<true>(c, D - c);
  memcpy(out + c, &x, static_cast<size_t>(D - c) * sizeof(float));
}

template <class Format, bool kStreams>
void decode_all(const uint8_t* rows, int64_t N, int64_t D, float* out) {
  if constexpr (kIsFloats<Format>) {
    decode_row<Format, kStreams>(rows, N * D, out);  // nothing lies between the rows
  } else {
    const int64_t bytes = Format::row_bytes(D);
    for (int64_t n = 0; n < N; ++n) decode_row<Format, kStreams>(rows + n * bytes, D, out + n * D);
  }
}

template <class Format>
void decode_rows(const uint8_t* rows, int64_t N, int64_t D, float* out) {
  decode_all<Format, false>(rows, N, D, out);
}

template <class Format>
void stream_rows(const uint8_t* rows, int64_t N, int64_t D, float* out) {
  if (D % kStep != 0 || reinterpret_cast<uintptr_t>(out) % sizeof(Columns) != 0)
    return decode_all<Format, false>(rows, N, D, out);
  decode_all<Format, true>(rows, N, D, out);
  end_streams();
}

// Constant, so that nothing of this instruction set runs when the library loads.
template <class... Formats>
struct Table {
  static constexpr RowFormatKernels kernels = {{RowsWriter<Formats, false>::write...},
                                               {RowsWriter<Formats, true>::write...},
                                               {decode_rows<Formats>...},
                                               {stream_rows<Formats>...}};
};

}  // namespace
}  // namespace RK_ISA

template <>
const RowFormatKernels RowFormatKernels::table<CpuIsa::RK_ISA> = RK_ISA::WithAllFormats<RK_ISA::Table>::kernels;

}  // namespace rec_kernels
