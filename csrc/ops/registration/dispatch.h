// Boxed calls of the registered schemas of an operator.
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

// Handles of X_forward and X_backward. A lookup takes a lock, so each handle is looked up once.
struct Forms {
  c10::OperatorHandle forward, backward;
};
const Forms& forms_of(const Operator& op);

// Registers `function(op, handle, stack)` under `name`. One function serves all operators and gets the
// operator as an argument.
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

// Redispatches the schema `name`, whose CUDA kernel is `kernel`, to the implementation for devices without
// kernels.
template <auto kernel, class... Arguments>
auto run_without_kernel(const char* name, Arguments&&... arguments) {
  static const auto op = find(name).typed<std::remove_pointer_t<decltype(kernel)>>();
  return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), std::forward<Arguments>(arguments)...);
}

// An absent tensor is undefined in C++ and None on the stack.
inline at::Tensor tensor_of(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}
inline c10::IValue value_of(const at::Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

inline std::vector<c10::IValue> pop_arguments(const c10::OperatorHandle& op, Stack* stack) {
  return torch::jit::pop(*stack, op.schema().arguments().size());
}

// Calls `function` with tf32 products disabled, whatever the setting of the program is.
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

// Registers one typed ATen function for CPU and CUDA tensors.
#define GIRIH_IMPL_ATEN(name, function)                                                                    \
  TORCH_LIBRARY_IMPL(girih, CPU, m) { m.impl(name, TORCH_FN(::girih::InFullPrecision<&function>::call)); } \
  TORCH_LIBRARY_IMPL(girih, CUDA, m) { m.impl(name, TORCH_FN(::girih::InFullPrecision<&function>::call)); }
