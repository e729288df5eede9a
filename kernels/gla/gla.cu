// Launches of the kernels of gla with a gate for each channel: choice of the instance.
#include "gla/launch.h"
#include "gsa/instance.h"
#include "gsa/launch.h"

namespace girih::kernels {

cudaError_t gla_output(const GlaOutput& p, cudaStream_t stream) {
  return dispatch_instance(p.shape, [&](auto element, auto slots) {
    return launch_gla_output<decltype(element), slots()>(p, stream);
  });
}
cudaError_t gla_dq(const GlaDq& p, cudaStream_t stream) {
  return dispatch_instance(p.shape, [&](auto element, auto slots) {
    return launch_gla_dq<decltype(element), slots()>(p, stream);
  });
}
cudaError_t gla_dkv(const GatedDkv& p, cudaStream_t stream) {
  return dispatch_instance(p.shape, [&](auto element, auto slots) {
    return launch_gated_dkv<decltype(element), slots(), 1>(p, stream);
  });
}

}  // namespace girih::kernels
