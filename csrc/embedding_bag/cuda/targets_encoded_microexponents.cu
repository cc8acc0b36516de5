// This file compiles the updates of mx9, mx6 and mx4 rows.
#include "embedding_bag/cuda/targets_encoded.cuh"

namespace rec_kernels {

template void finish_encoded<Mx9>(const SumArgs&, const RowUpdate&, cudaStream_t);
template void finish_encoded<Mx6>(const SumArgs&, const RowUpdate&, cudaStream_t);
template void finish_encoded<Mx4>(const SumArgs&, const RowUpdate&, cudaStream_t);

}  // namespace rec_kernels
