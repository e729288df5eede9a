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

inline c10::OperatorHandle find_operator(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("girih::" + name).c_str(), "");
}

// Handles of X_forward and X_backward, looked up once: a lookup takes a lock.
struct OperatorHandles {
  c10::OperatorHandle forward, backward;
};
const OperatorHandles& get_handles(const Operator& op);

// Registers `function(op, handle, stack)` under `name`. One function serves all operators and gets the
// operator as an argument.
using BoxedFunction = void (*)(const Operator& op, const c10::OperatorHandle& handle, Stack* stack);
template <BoxedFunction function>
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

// The key by which a CUDA kernel calls the implementation without kernels. The key CPU selects the ATen form
// of the operator, or the generic kernel (generic_kernels.cpp) of X_backward or X_step without an ATen form;
// both accept tensors of any device.
constexpr c10::DispatchKeySet kAtenKey(c10::DispatchKey::CPU);

// An absent tensor is undefined in C++ and None on the stack.
inline at::Tensor to_tensor(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}
inline c10::IValue to_ivalue(const at::Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

inline std::vector<c10::IValue> pop_arguments(const c10::OperatorHandle& op, Stack* stack) {
  return torch::jit::pop(*stack, op.schema().arguments().size());
}

// Calls `function` with tf32 products disabled, whatever the setting of the program is.
template <auto function>
struct WithoutTF32;
template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct WithoutTF32<function> {
  static Result call(Arguments... arguments) {
    at::NoTF32Guard no_tf32;
    return function(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace girih

// GIRIH_IMPL_ATEN(m) { m.impl(...); } registers ATen forms for CPU tensors, and for CUDA tensors in a build
// without kernels: with kernels, cuda.cpp serves CUDA tensors.
#ifdef GIRIH_WITH_CUDA
#define GIRIH_IMPL_ATEN(m)                                            \
  static void register_aten(torch::Library& m);                       \
  TORCH_LIBRARY_IMPL(girih, CPU, library) { register_aten(library); } \
  static void register_aten(torch::Library& m)
#else
#define GIRIH_IMPL_ATEN(m)                                             \
  static void register_aten(torch::Library& m);                        \
  TORCH_LIBRARY_IMPL(girih, CPU, library) { register_aten(library); }  \
  TORCH_LIBRARY_IMPL(girih, CUDA, library) { register_aten(library); } \
  static void register_aten(torch::Library& m)
#endif
