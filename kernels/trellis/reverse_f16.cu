#include "trellis/launch.h"
#include "trellis/reverse.cuh"

namespace girih::kernels {

template cudaError_t launch_trellis_reverse<__half, 64>(const TrellisReverse&, cudaStream_t);
template cudaError_t launch_trellis_reverse<__half, 128>(const TrellisReverse&, cudaStream_t);

}  // namespace girih::kernels
