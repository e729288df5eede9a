// Boxed calls between an operator's registered forms.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "operator.h"

namespace girih {

using torch::jit::Stack;

inline c10::OperatorHandle find(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("girih::" + name).c_str(), "");
}

// An operator's registered forms. Looking one up takes a lock, so it is done once for all.
struct Forms {
  c10::OperatorHandle forward, backward;
};
const Forms& forms_of(const Operator& op);

// Registers `function(op, handle, stack)` under `name`: a kernel that serves every operator and knows which.
using BoxedForm = void (*)(const Operator& op, const c10::OperatorHandle& handle, Stack* stack);
template <BoxedForm function>
void register_boxed(torch::Library& m, const std::string& name, const Operator& op) {
  struct Kernel : c10::OperatorKernel {
    explicit Kernel(const Operator& op) : op(op) {}
    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) {
      function(op, handle, stack);
    }
    const Operator& op;
  };
  m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op)));
}

// The call of `name`, which `kernel` serves, as every device without a kernel runs it.
template <auto kernel, class... Arguments>
auto run_without_kernel(const char* name, Arguments&&... arguments) {
  static const auto op = find(name).typed<std::remove_pointer_t<decltype(kernel)>>();
  return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), std::forward<Arguments>(arguments)...);
}

// An absent tensor is an undefined one in C++ and None on the stack.
inline at::Tensor tensor_of(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}
inline c10::IValue value_of(const at::Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

inline std::vector<c10::IValue> pop_arguments(const c10::OperatorHandle& op, Stack* stack) {
  return torch::jit::pop(*stack, op.schema().arguments().size());
}

// ATen in float32 means float32: no tf32 products, whatever the program's setting.
template <auto function>
struct InFullPrecision;
template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct InFullPrecision<function> {
  static Result call(Arguments... arguments) {
    at::NoTF32Guard exact;
    return function(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace girih

// Registers one typed ATen function for CPU and for CUDA tensors.
#define GIRIH_IMPL_ATEN(name, function)                                                                    \
  TORCH_LIBRARY_IMPL(girih, CPU, m) { m.impl(name, TORCH_FN(::girih::InFullPrecision<&function>::call)); } \
  TORCH_LIBRARY_IMPL(girih, CUDA, m) { m.impl(name, TORCH_FN(::girih::InFullPrecision<&function>::call)); }
