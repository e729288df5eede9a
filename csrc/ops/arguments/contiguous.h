// Arguments of kernels that read contiguous tensors in vectors of 8 elements.
#pragma once

#include "kernel_arguments.h"

namespace girih {

constexpr uintptr_t kVectorAlignment = 32;  // bytes: 8 elements of fp32

// Checks the sizes, the dtype and the device (that of x) of an argument of `op`, and returns it contiguous
// and aligned to kVectorAlignment.
inline Tensor contiguous_argument(const char* op, const Tensor& tensor, const char* name,
                                  at::IntArrayRef sizes, at::ScalarType type, const Tensor& x) {
  TORCH_CHECK(tensor.sizes() == sizes, "girih: ", op, ": ", name, " has shape ", tensor.sizes(),
              "; expected ", sizes);
  TORCH_CHECK(tensor.scalar_type() == type && tensor.device() == x.device(), "girih: ", op, ": ", name,
              " is ", tensor.scalar_type(), " on ", tensor.device(), "; expected ", type, " on ", x.device());
  const bool is_aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kVectorAlignment == 0;
  return is_aligned ? tensor.contiguous() : tensor.clone(at::MemoryFormat::Contiguous);
}

inline OptionalTensor contiguous_argument(const char* op, const OptionalTensor& tensor, const char* name,
                                          at::IntArrayRef sizes, at::ScalarType type, const Tensor& x) {
  return if_defined(tensor, [&] { return contiguous_argument(op, *tensor, name, sizes, type, x); });
}

inline const void* data_or_null(const OptionalTensor& tensor) {
  return is_defined(tensor) ? tensor->const_data_ptr() : nullptr;
}

// Whether the kernels support this dtype.
inline bool has_kernel_dtype(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

}  // namespace girih
