// Launches of the kernels of gsa: choice of the instance.
#include "gsa/gsa.h"
#include "gsa/instance.h"
#include "gsa/launch.h"

namespace girih::kernels {

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
cudaError_t gsa_columns(const GatedColumns& p, cudaStream_t stream) {
  return by_instance(p.shape, [&](auto element, auto slots) {
    return launch_gated_columns<decltype(element), slots(), 2>(p, stream);
  });
}

}  // namespace girih::kernels
