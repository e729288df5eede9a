// Gate activations by name, and their parameters per feature.
#pragma once

#include <string_view>

#include "kernel_arguments.h"
#include "tile/gate_function.h"

namespace girih {

inline kernels::GateFunction parse_gate_function(const char* op, std::string_view name) {
  using kernels::GateFunction;
  if (name == "none") return GateFunction::none;
  if (name == "linear") return GateFunction::linear;
  if (name == "sigmoid") return GateFunction::sigmoid;
  if (name == "logsigmoid") return GateFunction::logsigmoid;
  TORCH_CHECK(name == "decay", "girih: ", op, ": a gate is '", name,
              "'; expected none, linear, sigmoid, logsigmoid or decay");
  return GateFunction::decay;
}

// The data of a bias or a rate [features]; nullptr if it is absent.
inline const float* feature_data(const char* op, const OptionalTensor& tensor, const char* name,
                                 int64_t features, const Tensor& x) {
  if (!is_defined(tensor)) return nullptr;
  TORCH_CHECK(tensor->scalar_type() == at::kFloat && tensor->is_contiguous() && tensor->dim() == 1 &&
                  tensor->size(0) == features && tensor->device() == x.device(),
              "girih: ", op, ": ", name, " is ", tensor->scalar_type(), " ", tensor->sizes(), " on ",
              tensor->device(), "; expected a contiguous float32 [", features, "] on ", x.device());
  return tensor->const_data_ptr<float>();
}

}  // namespace girih
