// This file compiles the updates of float16, bfloat16, int8 and int4 rows.
#include "embedding_bag/cuda/targets_encoded.cuh"

namespace rec_kernels {

template void finish_encoded<Fp16>(const SumArgs&, const RowUpdate&, cudaStream_t);
template void finish_encoded<Bf16>(const SumArgs&, const RowUpdate&, cudaStream_t);
template void finish_encoded<Int8>(const SumArgs&, const RowUpdate&, cudaStream_t);
template void finish_encoded<Int4>(const SumArgs&, const RowUpdate&, cudaStream_t);

}  // namespace rec_kernels
