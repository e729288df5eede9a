// Launches of the kernels of gla with a gate for each channel: choice of the instance.
#include "gla/launch.h"
#include "gsa/instance.h"
#include "gsa/launch.h"

namespace girih::kernels {

cudaError_t gla_output(const GlaOutput& p, cudaStream_t stream) {
  return by_instance(p.shape, [&](auto element, auto slots) {
    return launch_gla_output<decltype(element), slots()>(p, stream);
  });
}
cudaError_t gla_rows(const GlaRows& p, cudaStream_t stream) {
  return by_instance(p.shape, [&](auto element, auto slots) {
    return launch_gla_rows<decltype(element), slots()>(p, stream);
  });
}
cudaError_t gla_columns(const GatedColumns& p, cudaStream_t stream) {
  return by_instance(p.shape, [&](auto element, auto slots) {
    return launch_gated_columns<decltype(element), slots(), 1>(p, stream);
  });
}

}  // namespace girih::kernels
