// What a kernel asks of a device before it is launched.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace girih::kernels {

// Lets `Kernel` use `bytes` of dynamic shared memory on the current device (beyond 48 KB a kernel has to ask;
// each kernel always asks for the same). Asked once a device; asking twice does no harm.
template <auto Kernel>
inline cudaError_t allow_shared(int bytes) {
  static std::atomic<uint64_t> allowed{0};  // one bit a device
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

// Bytes of shared memory that a block may have on the current device.
inline cudaError_t shared_limit(int& bytes) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

}  // namespace girih::kernels
