// Device memory for the intermediate tensors of a plan: tensors that one kernel of a call writes and a later
// kernel of the same call reads.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/array.h"

namespace girih::kernels {

// The caller of a plan function implements `allocate`. The memory is uninitialised, starts at a multiple of
// 16 bytes and stays valid until the last kernel of the call has run.
class Workspace {
 public:
  virtual ~Workspace() = default;

  // A tensor [sizes...] whose rows, the last dimension, are dense. The caller chooses a multiple of 16 bytes
  // for rows that a kernel accesses by vectors.
  template <class... Size>
  OutputTensor<sizeof...(Size)> tensor(DType dtype, Size... sizes) {
    constexpr int kRank = sizeof...(Size);
    const int64_t size[kRank] = {static_cast<int64_t>(sizes)...};
    int64_t rows = 1;
    for (int d = 0; d < kRank - 1; ++d) rows *= size[d];
    const int64_t row_bytes = size[kRank - 1] * dtype_size(dtype);
    int64_t pitch = row_bytes;
    OutputTensor<kRank> result{allocate(rows, row_bytes, pitch), dtype, {}};
    result.stride[kRank - 1] = 1;
    int64_t stride = pitch / dtype_size(dtype);
    for (int d = kRank - 2; d >= 0; --d) result.stride[d] = stride, stride *= size[d];
    return result;
  }

  // `count` elements without gaps.
  template <class T>
  T* array(int64_t count) {
    return static_cast<T*>(bytes(count * static_cast<int64_t>(sizeof(T))));
  }
  // Null for 0 bytes.
  void* bytes(int64_t count) {
    int64_t pitch = count;
    return count == 0 ? nullptr : allocate(1, count, pitch);
  }

 protected:
  // `rows` rows of `row_bytes` bytes. May increase `pitch`, the bytes from a row to the next row, by a
  // multiple of 16.
  virtual void* allocate(int64_t rows, int64_t row_bytes, int64_t& pitch) = 0;
};

// Returns from a plan function with the error of a call that fails.
#define GIRIH_TRY(...)                                                               \
  do {                                                                               \
    if (const cudaError_t error = (__VA_ARGS__); error != cudaSuccess) return error; \
  } while (false)

}  // namespace girih::kernels
