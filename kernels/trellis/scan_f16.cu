#include "trellis/launch.h"
#include "trellis/scan.cuh"

namespace girih::kernels {

template cudaError_t launch_trellis_scan<__half, 64>(const TrellisScan&, cudaStream_t);
template cudaError_t launch_trellis_scan<__half, 128>(const TrellisScan&, cudaStream_t);
template cudaError_t scan_reads<__half, 64>(bool&);
template cudaError_t scan_reads<__half, 128>(bool&);

}  // namespace girih::kernels
