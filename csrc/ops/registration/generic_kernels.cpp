// Generic kernels from X_forward, used where an operator or a device has no kernel of its own: X_backward by
// autograd of X_forward, X_backward on Meta, and X_step as the forward of one token. On CUDA X_forward
// chooses its path again, which is the ATen path where X_backward calls its generic kernel.
#include <torch/csrc/autograd/autograd.h>

#include "../../torch_internals.h"
#include "../arguments/check.h"
#include "dispatch.h"

namespace girih {
namespace {

using c10::IValue;
using torch::autograd::variable_list;

// Calls the kernel of X_forward for the device of `first`, and skips autograd and autocast of X_forward.
void run_forward(const Operator& op, const at::Tensor& first, Stack* stack) {
  const auto key = !first.defined() || first.is_cpu() ? c10::DispatchKey::CPU
                   : first.is_cuda()                  ? c10::DispatchKey::CUDA
                                                      : c10::DispatchKey::Meta;
  get_handles(op).forward.callBoxedForDispatchKey(key, *stack);
}

bool has_gradient(const at::Tensor& input) { return input.defined() && input.is_floating_point(); }

// A tensor that autograd can record: an inference tensor is cloned.
at::Tensor clone_if_inference(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_inference() ? tensor.clone() : tensor;
}

// X_backward: runs X_forward again under autograd, by ATen. The memory is that of the chunk form, O(T) with
// one state per chunk, and is freed on return.
void backward(const Operator& op, const c10::OperatorHandle& handle, Stack* stack) {
  const auto arguments = pop_arguments(handle, stack);
  const size_t num_tensors = op.output_count() + op.input_count() + op.saved.size();

  const c10::InferenceMode no_inference_mode(false);
  at::AutoGradMode on(true);
  const auto autograd_keys = torch_internals::autograd_without_autocast();
  at::NoTF32Guard no_tf32;
  const torch_internals::SingleThreadedEngine single_threaded;
  const torch_internals::GilRelease gil_release;

  Stack forward;
  variable_list leaves;
  for (size_t i = op.output_count(); i < op.output_count() + op.input_count(); ++i) {
    auto input = clone_if_inference(to_tensor(arguments[i]));
    if (has_gradient(input)) {
      input = input.detach().requires_grad_(true);
      leaves.push_back(input);
    }
    forward.push_back(to_ivalue(input));
  }
  const auto first = to_tensor(forward[0]);
  forward.insert(forward.end(), arguments.begin() + num_tensors, arguments.end());
  forward.emplace_back(false);
  run_forward(op, first, &forward);

  variable_list outputs, grads;
  for (size_t i = 0; i < op.output_count(); ++i) {
    const auto grad = clone_if_inference(to_tensor(arguments[i]));
    const auto output = to_tensor(forward[i]);
    if (!grad.defined() || !output.requires_grad()) continue;
    outputs.push_back(output);
    grads.push_back(grad);
  }
  variable_list results(leaves.size());
  if (!outputs.empty())
    results = torch::autograd::grad(outputs, leaves, grads, false, false, /*allow_unused=*/true);

  auto leaf = leaves.begin();
  auto result = results.begin();
  for (size_t i = op.output_count(); i < op.output_count() + op.input_count(); ++i) {
    if (!has_gradient(to_tensor(arguments[i]))) {
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
  const auto inputs = arguments.begin() + op.output_count();
  Stack forward(inputs, inputs + op.input_count());
  forward.insert(forward.end(), inputs + op.input_count() + op.saved.size(), arguments.end());
  forward.emplace_back(false);
  get_handles(op).forward.callBoxedForDispatchKey(c10::DispatchKey::Meta, forward);
  for (size_t i = 0; i < op.input_count(); ++i) {
    const auto input = to_tensor(inputs[i]);
    stack->push_back(has_gradient(input) ? IValue(at::empty_symint(input.sym_sizes(), input.options()))
                                         : IValue());
  }
}

// X_step: X_forward of one token; the new state is copied into the state tensors.
void step(const Operator& op, const c10::OperatorHandle& handle, Stack* stack) {
  auto arguments = pop_arguments(handle, stack);
  const auto first = to_tensor(arguments[0]);
  const auto options = arguments.begin() + op.tensors.size();
  std::vector<at::Tensor> states;
  for (auto state = arguments.begin() + op.data_count; state != options; ++state)
    states.push_back(to_tensor(*state));
  check_step(op, first, std::vector<Argument>(states.begin(), states.end()));
  Stack forward(arguments.begin(), options);
  if (!op.packing.empty()) forward.emplace_back();
  forward.insert(forward.end(), options, arguments.end());
  forward.emplace_back(false);
  run_forward(op, first, &forward);
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i].defined()) states[i].copy_(forward[1 + i].toTensor());
  }
  stack->push_back(forward[0]);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) {
  for (const auto& op : operators()) {
    register_boxed<&backward>(m, op.name + "_backward", op);
    if (op.state_count() > 0) register_boxed<&step>(m, op.name + "_step", op);
  }
}

TORCH_LIBRARY_IMPL(girih, Meta, m) {
  for (const auto& op : operators()) register_boxed<&backward_meta>(m, op.name + "_backward", op);
}

}  // namespace girih
