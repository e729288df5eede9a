// Arguments of kernels that read contiguous tensors in vectors of 8 elements.
#pragma once

#include "kernel_arguments.h"

namespace girih {

constexpr uintptr_t kPackAlignment = 32;  // bytes: 8 elements of fp32

// Checks the sizes, the dtype and the device (that of x) of an argument of `op`, and returns it contiguous
// and aligned to kPackAlignment.
inline Tensor dense(const char* op, const Tensor& tensor, const char* name, at::IntArrayRef sizes,
                    at::ScalarType type, const Tensor& x) {
  TORCH_CHECK(tensor.sizes() == sizes, "girih: ", op, ": ", name, " has shape ", tensor.sizes(),
              "; expected ", sizes);
  TORCH_CHECK(tensor.scalar_type() == type && tensor.device() == x.device(), "girih: ", op, ": ", name,
              " is ", tensor.scalar_type(), " on ", tensor.device(), "; expected ", type, " on ", x.device());
  const bool begins = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kPackAlignment == 0;
  return begins ? tensor.contiguous() : tensor.clone(at::MemoryFormat::Contiguous);
}

inline OptionalTensor dense(const char* op, const OptionalTensor& tensor, const char* name,
                            at::IntArrayRef sizes, at::ScalarType type, const Tensor& x) {
  return if_given(tensor, [&] { return dense(op, *tensor, name, sizes, type, x); });
}

inline const void* data_of(const OptionalTensor& tensor) {
  return given(tensor) ? tensor->const_data_ptr() : nullptr;
}

// Whether the kernels support this dtype.
inline bool is_of_kernels(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

}  // namespace girih
