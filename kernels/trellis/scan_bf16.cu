#include "trellis/launch.h"
#include "trellis/scan.cuh"

namespace girih::kernels {

template cudaError_t launch_trellis_scan<__nv_bfloat16, 64>(const TrellisScan&, cudaStream_t);
template cudaError_t launch_trellis_scan<__nv_bfloat16, 128>(const TrellisScan&, cudaStream_t);
template cudaError_t scan_reads<__nv_bfloat16, 64>(bool&);
template cudaError_t scan_reads<__nv_bfloat16, 128>(bool&);

}  // namespace girih::kernels
