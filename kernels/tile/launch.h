// Kernel launches, and queries of the device before a launch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace girih::kernels {

// Allows `Kernel` to use `bytes` of dynamic shared memory on the current device, which is required above 48
// KB. A kernel always passes the same `bytes`: the attribute is set once for each device (twice is harmless).
template <auto Kernel>
inline cudaError_t allow_shared(int bytes) {
  static std::atomic<uint64_t> allowed{0};  // one bit for each device
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

// Whether the code of `Kernel` for the current device was compiled for an architecture (ptxVersion) from
// `MinArch` to `MaxArch`. The answer is cached for each device.
template <auto Kernel, int MinArch, int MaxArch>
inline cudaError_t is_compiled_for(bool& result) {
  static std::atomic<uint64_t> asked{0}, found{0};  // one bit for each device
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (asked.load(std::memory_order_acquire) & bit) {
    result = found.load(std::memory_order_relaxed) & bit;
    return cudaSuccess;
  }
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, Kernel);
  if (error != cudaSuccess) return error;
  result = MinArch <= attributes.ptxVersion && attributes.ptxVersion <= MaxArch;
  if (result) found.fetch_or(bit, std::memory_order_relaxed);
  asked.fetch_or(bit, std::memory_order_release);
  return cudaSuccess;
}
// Whether the kernel may be launched with clusters.
template <auto Kernel>
inline cudaError_t has_clusters(bool& has) {
  return is_compiled_for<Kernel, 90, 1000>(has);
}
// Whether the kernel uses TMA (tma.h).
template <auto Kernel>
inline cudaError_t has_tma(bool& has) {
  return is_compiled_for<Kernel, 90, 1000>(has);
}
// Whether the kernel uses wgmma, if the library was compiled for sm_90a. Compiled for sm_90, the kernel is
// correct but slow.
template <auto Kernel>
inline cudaError_t has_warpgroups(bool& has) {
  return is_compiled_for<Kernel, 90, 90>(has);
}

// The limit of shared memory bytes of a block on the current device.
inline cudaError_t shared_limit(int& bytes) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

// Launches kernel(arguments...); no launch for zero blocks.
template <class... Parameters, class... Arguments>
inline cudaError_t launch_grid(void (*kernel)(Parameters...), int64_t blocks, dim3 threads, int bytes,
                               cudaStream_t stream, const Arguments&... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const cudaLaunchConfig_t launch{
      static_cast<unsigned>(blocks), threads, static_cast<size_t>(bytes), stream, nullptr, 0};
  cudaLaunchKernelEx(&launch, kernel, arguments...);
  return cudaGetLastError();
}
template <auto Kernel, class... Arguments>
inline cudaError_t launch_grid(int64_t blocks, dim3 threads, int bytes, cudaStream_t stream,
                               const Arguments&... arguments) {
  return launch_grid(Kernel, blocks, threads, bytes, stream, arguments...);
}

// The same after allow_shared(). `max_bytes`: the bytes to allow, if the kernel is launched with different
// `bytes`.
template <auto Kernel, class Problem>
cudaError_t launch_kernel(const Problem& p, int64_t blocks, int threads, int bytes, cudaStream_t stream,
                          int max_bytes = 0) {
  if (blocks != 0) {
    const cudaError_t error = allow_shared<Kernel>(max_bytes > 0 ? max_bytes : bytes);
    if (error != cudaSuccess) return error;
  }
  return launch_grid<Kernel>(blocks, threads, bytes, stream, p);
}

}  // namespace girih::kernels
