// What a kernel asks of the card before it is launched, beside tile/launch.h.
#pragma once

#include <cuda_runtime_api.h>

namespace girih::kernels {

// Multiprocessors of the current device.
inline cudaError_t processor_count(int& count) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace girih::kernels
