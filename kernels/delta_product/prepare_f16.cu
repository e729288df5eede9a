#include "delta_product/prepare.cuh"

namespace girih::kernels::delta_product {

template cudaError_t launch_prepare<__half>(const DeltaPrepare&, cudaStream_t);

}  // namespace girih::kernels::delta_product
