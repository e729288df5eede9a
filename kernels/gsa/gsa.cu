#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gsa/launch.h"

namespace girih::kernels {
namespace {

// launch(an element, slots of a tile): the smallest tile that holds M.
template <class Launch>
cudaError_t by_instance(const GsaShape& shape, const Launch& launch) {
  const auto with_slots = [&](auto element) {
    using T = decltype(element);
    if (shape.M <= 64) return launch.template operator()<T, 64>();
    if (shape.M <= kGsaMaxSlots) return launch.template operator()<T, 128>();
    return cudaErrorInvalidValue;
  };
  if (shape.dtype == DType::bf16) return with_slots(__nv_bfloat16());
  if (shape.dtype == DType::f16) return with_slots(__half());
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t gsa_output(const GsaOutput& p, cudaStream_t stream) {
  return by_instance(p.shape, [&]<typename T, int M>() { return launch_gsa_output<T, M>(p, stream); });
}
cudaError_t gsa_rows(const GsaRows& p, cudaStream_t stream) {
  return by_instance(p.shape, [&]<typename T, int M>() { return launch_gsa_rows<T, M>(p, stream); });
}
cudaError_t gsa_columns(const GsaColumns& p, cudaStream_t stream) {
  return by_instance(p.shape, [&]<typename T, int M>() { return launch_gsa_columns<T, M>(p, stream); });
}

}  // namespace girih::kernels
