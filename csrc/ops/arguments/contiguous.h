// Tensors for kernels that read whole packs of a row.
#pragma once

#include "kernel_arguments.h"

namespace girih {

constexpr uintptr_t kPackAlignment = 32;  // bytes: a pack of 8 elements of fp32

// As such kernels of `op` read a tensor of these sizes and this type, on x's device: dense, and where packs
// begin.
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

// What such kernels take.
inline bool is_of_kernels(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

}  // namespace girih
