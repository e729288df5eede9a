#include "delta_product/values.cuh"

namespace girih::kernels::delta_product {

template cudaError_t launch_values<__nv_bfloat16>(const DeltaValues&, cudaStream_t);

}  // namespace girih::kernels::delta_product
