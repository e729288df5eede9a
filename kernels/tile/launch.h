// Launches, and what a kernel asks of a device before.
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

// Whether `Kernel`, on the current device, is there as compiled for an architecture from `Least` to `Most`,
// not made of what was compiled for others. Asked once a device.
template <auto Kernel, int Least, int Most>
inline cudaError_t is_compiled_for(bool& is) {
  static std::atomic<uint64_t> asked{0}, found{0};  // one bit a device
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (asked.load(std::memory_order_acquire) & bit) {
    is = found.load(std::memory_order_relaxed) & bit;
    return cudaSuccess;
  }
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, Kernel);
  if (error != cudaSuccess) return error;
  is = Least <= attributes.ptxVersion && attributes.ptxVersion <= Most;
  if (is) found.fetch_or(bit, std::memory_order_relaxed);
  asked.fetch_or(bit, std::memory_order_release);
  return cudaSuccess;
}
// Whether it may be launched in clusters.
template <auto Kernel>
inline cudaError_t has_clusters(bool& has) {
  return is_compiled_for<Kernel, 90, 1000>(has);
}
// Whether it takes boxes (boxes.h).
template <auto Kernel>
inline cudaError_t has_boxes(bool& has) {
  return is_compiled_for<Kernel, 90, 1000>(has);
}
// Whether it has warpgroup products, if it was compiled for 90a and not for 90, where it is right, and slow.
template <auto Kernel>
inline cudaError_t has_warpgroups(bool& has) {
  return is_compiled_for<Kernel, 90, 90>(has);
}

// Bytes of shared memory that a block may have on the current device.
inline cudaError_t shared_limit(int& bytes) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

// Kernel(arguments...) on so many blocks; on none there is nothing to do.
template <auto Kernel, class... Arguments>
inline cudaError_t launch_grid(int64_t blocks, int threads, int bytes, cudaStream_t stream,
                               const Arguments&... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  Kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

// The same with so many bytes of shared memory, however many they are. most: what the kernel asks for where
// launches differ.
template <auto Kernel, class Problem>
cudaError_t launch_kernel(const Problem& p, int64_t blocks, int threads, int bytes, cudaStream_t stream,
                          int most = 0) {
  if (blocks != 0) {
    const cudaError_t error = allow_shared<Kernel>(most > 0 ? most : bytes);
    if (error != cudaSuccess) return error;
  }
  return launch_grid<Kernel>(blocks, threads, bytes, stream, p);
}

}  // namespace girih::kernels
