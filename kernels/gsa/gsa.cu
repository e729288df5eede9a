#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "gsa/launch.h"

namespace girih::kernels {
namespace {

template <int Value>
using Constant = std::integral_constant<int, Value>;

// launch(an element, slots of a tile): the smallest tile that holds M.
template <class Launch>
cudaError_t by_instance(const GsaShape& shape, const Launch& launch) {
  const auto with_slots = [&](auto element) {
    if (shape.M <= 64) return launch(element, Constant<64>());
    if (shape.M <= kGsaMaxSlots) return launch(element, Constant<128>());
    return cudaErrorInvalidValue;
  };
  if (shape.dtype == DType::bf16) return with_slots(__nv_bfloat16());
  if (shape.dtype == DType::f16) return with_slots(__half());
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t gsa_output(const GsaOutput& p, cudaStream_t stream) {
  return by_instance(p.shape, [&](auto element, auto slots) {
    return launch_gsa_output<decltype(element), slots()>(p, stream);
  });
}
cudaError_t gsa_rows(const GsaRows& p, cudaStream_t stream) {
  return by_instance(p.shape, [&](auto element, auto slots) {
    return launch_gsa_rows<decltype(element), slots()>(p, stream);
  });
}
cudaError_t gsa_columns(const GsaColumns& p, cudaStream_t stream) {
  return by_instance(p.shape, [&](auto element, auto slots) {
    return launch_gsa_columns<decltype(element), slots()>(p, stream);
  });
}

}  // namespace girih::kernels
