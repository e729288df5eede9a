// Replaces the CUDA runtime: a launch runs the kernel to its end. Macros replace the
// runtime functions that the launchers call by the functions of this file.
#pragma once

#include <cuda.h>

#include "emulator.h"

namespace emulated {

inline cudaError_t get_device(int* current) { return *current = device, cudaSuccess; }
inline cudaError_t get_last_error() { return cudaSuccess; }

inline cudaError_t get_device_attribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) return *value = shared_bytes, cudaSuccess;
  if (attribute == cudaDevAttrMultiProcessorCount) return *value = processors, cudaSuccess;
  fail("the device attribute is unknown");
}
template <class Kernel>
cudaError_t get_function_attributes(cudaFuncAttributes* attributes, Kernel) {
  return attributes->ptxVersion = device == kSm90 ? 90 : 80, cudaSuccess;
}
template <class Kernel>
cudaError_t set_function_attribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <class Kernel>
cudaError_t count_resident_blocks(int* blocks, Kernel, int, size_t) {
  return *blocks = 1, cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(const cudaLaunchConfig_t* launch_config, void (*function)(Parameters...),
                          const Arguments&... arguments) {
  const auto& [blocks, threads, bytes, stream, attributes, attribute_count] = *launch_config;
  if (threads.y != 1 || blocks.y != 1) fail("a launch has more than one dimension");
  int cluster_size = 1;
  for (unsigned i = 0; i < attribute_count; ++i) {
    const cudaLaunchAttribute& attribute = attributes[i];
    if (attribute.id != cudaLaunchAttributeClusterDimension) fail("the launch attribute is unknown");
    cluster_size = static_cast<int>(attribute.val.clusterDim.x);
  }
  launch([=] { function(arguments...); }, blocks.x, static_cast<int>(threads.x), static_cast<int>(bytes),
         cluster_size);
  return cudaSuccess;
}

// The TMA descriptor of a tensor with four dimensions, innermost first. A box has `rows` rows and 64 columns
// of 16-bit elements.
struct TensorMap {
  const unsigned char* data;
  int64_t size[4], stride[4];  // strides in bytes
  int rows;
};
inline CUresult encode_tiled(CUtensorMap* to, CUtensorMapDataType, cuuint32_t rank, void* data,
                             const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                             const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const bool has_strides = stride[0] % 16 == 0 && stride[1] % 16 == 0 && stride[2] % 16 == 0;
  if (rank != 4 || box[0] != 64 || box[1] > 256 || box[2] != 1 || box[3] != 1 || !has_strides ||
      swizzle != CU_TENSOR_MAP_SWIZZLE_128B || reinterpret_cast<uint64_t>(data) % 16 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TensorMap encoded{static_cast<unsigned char*>(data), {}, {2}, static_cast<int>(box[1])};
  std::copy(size, size + 4, encoded.size), std::copy(stride, stride + 3, encoded.stride + 1);
  static_assert(sizeof encoded <= sizeof *to);
  std::memcpy(to, &encoded, sizeof encoded);
  return CUDA_SUCCESS;
}
inline cudaError_t get_driver_function(const char* name, void** function, unsigned, unsigned long long,
                                       cudaDriverEntryPointQueryResult* result) {
  if (std::strcmp(name, "cuTensorMapEncodeTiled") != 0) fail("the driver function is unknown");
  *function = reinterpret_cast<void*>(&encode_tiled), *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // namespace emulated

#define cudaGetDevice ::emulated::get_device
#define cudaGetLastError ::emulated::get_last_error
#define cudaDeviceGetAttribute ::emulated::get_device_attribute
#define cudaFuncGetAttributes ::emulated::get_function_attributes
#define cudaFuncSetAttribute ::emulated::set_function_attribute
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor ::emulated::count_resident_blocks
#define cudaLaunchKernelEx ::emulated::launch_kernel
#undef cudaGetDriverEntryPointByVersion
#define cudaGetDriverEntryPointByVersion ::emulated::get_driver_function
