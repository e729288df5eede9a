// Launches of kernels with thread block clusters.
#pragma once

#include <cuda_runtime.h>

namespace girih::kernels {

// Launches Kernel(p) with `size` blocks in a cluster.
template <auto Kernel, class Problem>
inline cudaError_t launch_clusters(const Problem& p, unsigned blocks, int size, int threads, int bytes,
                                   cudaStream_t stream) {
  cudaLaunchConfig_t launch{};
  launch.gridDim = blocks, launch.blockDim = static_cast<unsigned>(threads);
  launch.dynamicSmemBytes = static_cast<size_t>(bytes), launch.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(size), cluster.val.clusterDim.y = 1,
  cluster.val.clusterDim.z = 1;
  launch.attrs = &cluster, launch.numAttrs = size == 1 ? 0 : 1;
  cudaLaunchKernelEx(&launch, Kernel, p);
  return cudaGetLastError();
}

}  // namespace girih::kernels
