// Gate activations by name, and their parameters per feature.
#pragma once

#include <string_view>

#include "kernel_arguments.h"
#include "tile/row_gate.h"

namespace girih {

inline kernels::RowGate row_gate(const char* op, std::string_view name) {
  using kernels::RowGate;
  if (name == "none") return RowGate::none;
  if (name == "linear") return RowGate::linear;
  if (name == "sigmoid") return RowGate::sigmoid;
  if (name == "logsigmoid") return RowGate::logsigmoid;
  TORCH_CHECK(name == "decay", "girih: ", op, ": a gate is '", name,
              "'; expected none, linear, sigmoid, logsigmoid or decay");
  return RowGate::decay;
}

// The data of a bias or a rate [features]; nullptr if it is absent.
inline const float* per_feature(const char* op, const OptionalTensor& tensor, const char* name,
                                int64_t features, const Tensor& x) {
  if (!given(tensor)) return nullptr;
  TORCH_CHECK(tensor->scalar_type() == at::kFloat && tensor->is_contiguous() && tensor->dim() == 1 &&
                  tensor->size(0) == features && tensor->device() == x.device(),
              "girih: ", op, ": ", name, " is ", tensor->scalar_type(), " ", tensor->sizes(), " on ",
              tensor->device(), "; expected a contiguous float32 [", features, "] on ", x.device());
  return tensor->const_data_ptr<float>();
}

}  // namespace girih
