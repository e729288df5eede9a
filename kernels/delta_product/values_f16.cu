#include "delta_product/values.cuh"

namespace girih::kernels::delta_product {

template cudaError_t launch_values<__half>(const DeltaValues&, cudaStream_t);

}  // namespace girih::kernels::delta_product
