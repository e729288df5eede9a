// The instance that serves a shape.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "delta_product/pass.h"
#include "delta_product/vector.h"

namespace girih::kernels {
namespace delta_product {
namespace {

template <typename T>
cudaError_t by_width(const DeltaVectorGradients& p, cudaStream_t stream) {
  if (p.shape.D <= 64) return launch_vector_gradients<T, 64>(p, stream);
  if (p.shape.D <= kDeltaVectorMaxWidth) return launch_vector_gradients<T, 128>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace delta_product

cudaError_t delta_vector_gradients(const DeltaVectorGradients& p, cudaStream_t stream) {
  if (p.shape.D != p.shape.V || p.shape.unit) return cudaErrorInvalidValue;
  if (p.shape.dtype == DType::bf16) return delta_product::by_width<__nv_bfloat16>(p, stream);
  if (p.shape.dtype == DType::f16) return delta_product::by_width<__half>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace girih::kernels
