// TMA (sm_90): copies of a box, a block of a tensor, to shared memory. One thread starts the copy, and an
// mbarrier completes a phase when all bytes of the box have arrived.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"
#include "tile/cluster.h"
#include "tile/shared.h"

namespace girih::kernels {

// The TMA descriptor of a tensor [B, T, H, D] of 16-bit elements. A box has 64 columns and `rows` rows of one
// head, in the layout of a block of a BlockTile. Elements of a box beyond the tensor are zero.
using TensorMap = CUtensorMap;

// Whether the architecture that a kernel is compiled for has TMA. The host calls has_tma().
#if __CUDA_ARCH__ >= 900
constexpr bool kHasTma = true;
#else
constexpr bool kHasTma = false;
#endif

namespace tma {
// cuTensorMapEncodeTiled of libcuda, looked up at run time, so that the library does not link libcuda.
inline cudaError_t find_encoder(decltype(&cuTensorMapEncodeTiled)& function) {
  static void* found = nullptr;
  static const cudaError_t error = [] {
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) return error;
    return result == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorSymbolNotFound;
  }();
  function = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  return error;
}
}  // namespace tma

// Encodes the descriptor. Rows start at multiples of 16 bytes; every size is at least 1.
inline cudaError_t encode_tensor_map(TensorMap& tensor_map, const InputTensor<4>& tensor,
                                     const int64_t (&sizes)[4], int rows) {
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  if (const cudaError_t error = tma::find_encoder(encode); error != cudaSuccess) return error;
  // TMA lists the innermost dimension first.
  const cuuint64_t size[4] = {static_cast<cuuint64_t>(sizes[3]), static_cast<cuuint64_t>(sizes[1]),
                              static_cast<cuuint64_t>(sizes[2]), static_cast<cuuint64_t>(sizes[0])};
  const cuuint64_t bytes[3] = {static_cast<cuuint64_t>(2 * tensor.stride[1]),
                               static_cast<cuuint64_t>(2 * tensor.stride[2]),
                               static_cast<cuuint64_t>(2 * tensor.stride[0])};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(rows), 1, 1}, element_strides[4] = {1, 1, 1, 1};
  const CUresult result = encode(
      &tensor_map,
      tensor.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
      const_cast<void*>(tensor.data), size, bytes, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The position of a box in its tensor: first column and row, head, batch row.
struct TmaCoords {
  int col, row, head, batch;
};

#if __CUDA_ARCH__ >= 900

// Arrives once, and makes the current phase wait for `bytes` more bytes.
__device__ inline void arrive_expect_tx(uint64_t* barrier, int bytes) {
  ptx::mbarrier_arrive_expect_tx(shared_address(barrier), bytes);
}
__device__ inline void tma_load(uint32_t to, const TensorMap& tensor_map, TmaCoords coords,
                                uint64_t* barrier) {
  ptx::cp_async_bulk_tensor_4d(to, &tensor_map, coords.col, coords.row, coords.head, coords.batch,
                               shared_address(barrier));
}
// Prefetches the box to the L2 cache.
__device__ inline void tma_prefetch(const TensorMap& tensor_map, TmaCoords coords) {
  ptx::cp_async_bulk_prefetch_tensor_4d(&tensor_map, coords.col, coords.row, coords.head, coords.batch);
}
// Copies `bytes` contiguous bytes, a multiple of 16.
__device__ inline void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
  ptx::cp_async_bulk_load(shared_address(to), from, bytes, shared_address(barrier));
}

#else  // never called

__device__ inline void arrive_expect_tx(uint64_t*, int) {}
__device__ inline void tma_load(uint32_t, const TensorMap&, TmaCoords, uint64_t*) {}
__device__ inline void tma_prefetch(const TensorMap&, TmaCoords) {}
__device__ inline void bulk_load(void*, const void*, int, uint64_t*) {}

#endif

}  // namespace girih::kernels
