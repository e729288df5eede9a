// Tensors as kernel arguments: a pointer, the element type and the strides.
#pragma once

#include <cstdint>

namespace girih::kernels {

enum class DType : int { f32, f16, bf16, f64 };

// Strides count elements, in the order of the shape in the comment of each field. Null data: an absent
// tensor.
template <int Rank>
struct In {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride[Rank] = {};
};

template <int Rank>
struct Out {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride[Rank] = {};
};

}  // namespace girih::kernels
