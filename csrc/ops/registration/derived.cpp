// Default implementations from X_forward, used where an operator or a device has no implementation of its
// own: X_backward by autograd of the ATen forward, X_backward on Meta, and X_step as the forward of one
// token.
#include <torch/csrc/autograd/autograd.h>

#include "../../torch_internals.h"
#include "../arguments/check.h"
#include "dispatch.h"

namespace girih {
namespace {

using c10::IValue;
using torch::autograd::variable_list;

// Calls the forward kernel of the device of `like` and skips autograd and autocast of X_forward.
void run_forward(const Operator& op, const at::Tensor& like, Stack* stack) {
  const auto key = !like.defined() || like.is_cpu() ? c10::DispatchKey::CPU
                   : like.is_cuda()                 ? c10::DispatchKey::CUDA
                                                    : c10::DispatchKey::Meta;
  forms_of(op).forward.callBoxedForDispatchKey(key, *stack);
}

bool has_gradient(const at::Tensor& input) { return input.defined() && input.is_floating_point(); }

// A tensor that autograd can record: an inference tensor is cloned.
at::Tensor recordable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_inference() ? tensor.clone() : tensor;
}

// X_backward: runs the ATen forward again under autograd. The memory is that of the chunk form, O(T) with one
// state per chunk, and is freed on return.
void backward(const Operator& op, const c10::OperatorHandle& handle, Stack* stack) {
  const auto arguments = pop_arguments(handle, stack);
  const size_t given = op.outputs() + op.inputs() + op.saved.size();

  const c10::InferenceMode recorded(false);
  at::AutoGradMode on(true);
  const auto above = torch_internals::autograd_without_autocast();
  at::NoTF32Guard exact;
  const torch_internals::SingleThreadedEngine single_threaded;
  const torch_internals::GilRelease without_gil;

  Stack forward;
  variable_list leaves;
  for (size_t i = op.outputs(); i < op.outputs() + op.inputs(); ++i) {
    auto input = recordable(tensor_of(arguments[i]));
    if (has_gradient(input)) {
      input = input.detach().requires_grad_(true);
      leaves.push_back(input);
    }
    forward.push_back(value_of(input));
  }
  const auto like = tensor_of(forward[0]);
  forward.insert(forward.end(), arguments.begin() + given, arguments.end());
  forward.emplace_back(false);
  run_forward(op, like, &forward);

  variable_list outputs, grads;
  for (size_t i = 0; i < op.outputs(); ++i) {
    const auto grad = recordable(tensor_of(arguments[i]));
    const auto output = tensor_of(forward[i]);
    if (!grad.defined() || !output.requires_grad()) continue;
    outputs.push_back(output);
    grads.push_back(grad);
  }
  variable_list results(leaves.size());
  if (!outputs.empty())
    results = torch::autograd::grad(outputs, leaves, grads, false, false, /*allow_unused=*/true);

  auto leaf = leaves.begin();
  auto result = results.begin();
  for (size_t i = op.outputs(); i < op.outputs() + op.inputs(); ++i) {
    if (!has_gradient(tensor_of(arguments[i]))) {
      stack->emplace_back();
      continue;
    }
    auto gradient =
        result->defined() ? result->detach().contiguous() : at::zeros(leaf->sizes(), leaf->options());
    // A gradient that passes through unchanged would alias the gradient of the caller.
    for (const auto& grad : grads) {
      if (gradient.is_alias_of(grad)) gradient = gradient.clone();
    }
    stack->emplace_back(std::move(gradient));
    ++leaf, ++result;
  }
}

// X_backward on Meta: gradients have the sizes of the inputs. X_forward checks the arguments.
void backward_meta(const Operator& op, const c10::OperatorHandle& handle, Stack* stack) {
  const auto arguments = pop_arguments(handle, stack);
  const auto inputs = arguments.begin() + op.outputs();
  Stack forward(inputs, inputs + op.inputs());
  forward.insert(forward.end(), inputs + op.inputs() + op.saved.size(), arguments.end());
  forward.emplace_back(false);
  forms_of(op).forward.callBoxedForDispatchKey(c10::DispatchKey::Meta, forward);
  for (size_t i = 0; i < op.inputs(); ++i) {
    const auto input = tensor_of(inputs[i]);
    stack->push_back(has_gradient(input) ? IValue(at::empty_symint(input.sym_sizes(), input.options()))
                                         : IValue());
  }
}

// X_step: X_forward of one token; the new state is copied into the state tensors.
void step(const Operator& op, const c10::OperatorHandle& handle, Stack* stack) {
  auto arguments = pop_arguments(handle, stack);
  const auto like = tensor_of(arguments[0]);
  const auto options = arguments.begin() + op.tensors.size();
  std::vector<at::Tensor> states;
  for (auto state = arguments.begin() + op.data; state != options; ++state)
    states.push_back(tensor_of(*state));
  check_step(op, like, std::vector<Argument>(states.begin(), states.end()));
  Stack forward(arguments.begin(), options);
  if (!op.packing.empty()) forward.emplace_back();
  forward.insert(forward.end(), options, arguments.end());
  forward.emplace_back(false);
  run_forward(op, like, &forward);
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i].defined()) states[i].copy_(forward[1 + i].toTensor());
  }
  stack->push_back(forward[0]);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) {
  for (const auto& op : operators()) {
    register_boxed<&backward>(m, op.name + "_backward", op);
    if (op.states() > 0) register_boxed<&step>(m, op.name + "_step", op);
  }
}

TORCH_LIBRARY_IMPL(girih, Meta, m) {
  for (const auto& op : operators()) register_boxed<&backward_meta>(m, op.name + "_backward", op);
}

}  // namespace girih
