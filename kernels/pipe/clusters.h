// Launches of kernels with thread block clusters.
#pragma once

#include <cuda_runtime.h>

namespace girih::kernels {

// Launches Kernel(p) with `size` blocks in a cluster.
template <auto Kernel, class Problem>
inline cudaError_t launch_clusters(const Problem& p, unsigned blocks, int size, int threads, int bytes,
                                   cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(size), cluster.val.clusterDim.y = 1,
  cluster.val.clusterDim.z = 1;
  const cudaLaunchConfig_t launch{blocks,
                                  static_cast<unsigned>(threads),
                                  static_cast<size_t>(bytes),
                                  stream,
                                  &cluster,
                                  size == 1 ? 0u : 1u};
  cudaLaunchKernelEx(&launch, Kernel, p);
  return cudaGetLastError();
}

}  // namespace girih::kernels
