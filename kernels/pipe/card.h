// Queries of the device before a launch, beside tile/launch.h.
#pragma once

#include <cuda_runtime_api.h>

namespace girih::kernels {

// The number of multiprocessors of the current device.
inline cudaError_t processor_count(int& count) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace girih::kernels
