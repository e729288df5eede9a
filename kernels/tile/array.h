// Tensors as kernel arguments: a pointer, the element type and the strides.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace girih::kernels {

enum class DType : int { f32, f16, bf16, f64 };

__host__ __device__ constexpr int dtype_size(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
}

// Strides count elements, in the order of the shape in the comment of each field. Null data: an absent
// tensor.
template <int Rank>
struct InputTensor {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride[Rank] = {};
};

template <int Rank>
struct OutputTensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride[Rank] = {};
};

// The output of a kernel as the input of a later kernel.
template <int Rank>
InputTensor<Rank> as_input(const OutputTensor<Rank>& output) {
  InputTensor<Rank> result{output.data, output.dtype, {}};
  for (int d = 0; d < Rank; ++d) result.stride[d] = output.stride[d];
  return result;
}

}  // namespace girih::kernels
