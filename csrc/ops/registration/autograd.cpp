// Autograd of every operator X: X calls X_forward and records a node that calls X_backward. Both are
// registered operators, so a traced graph contains them as single calls.
#include "../../torch_internals.h"
#include "../arguments/check.h"
#include "dispatch.h"

namespace girih {

const OperatorHandles& get_handles(const Operator& op) {
  static const auto all = [] {
    std::vector<OperatorHandles> handles;
    for (const auto& each : operators())
      handles.push_back({find_operator(each.name + "_forward"), find_operator(each.name + "_backward")});
    return handles;
  }();
  return all[&op - operators().data()];
}

namespace {

using c10::IValue;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Key of what a node saves beside tensors: (index of the operator, bit mask of the differentiable outputs,
// options).
constexpr const char* kCall = "call";

// The backward function of a node: calls X_backward.
struct Backward {
  static constexpr bool is_traceable = false;

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto call = ctx->saved_data[kCall].toTuple();
    const auto& op = operators()[call->elements()[0].toInt()];
    Stack stack;
    const auto differentiable_mask = call->elements()[1].toInt();
    size_t next = 0;
    for (size_t i = 0; i < op.output_count(); ++i) {
      stack.push_back(differentiable_mask >> i & 1 ? to_ivalue(grads[next++]) : IValue());
    }
    const auto saved_tensors = ctx->get_saved_variables();
    for (const auto& tensor : saved_tensors) stack.push_back(to_ivalue(tensor));
    stack.insert(stack.end(), call->elements().begin() + 2, call->elements().end());
    get_handles(op).backward.callBoxed(&stack);

    variable_list results;
    for (size_t i = 0; i < op.input_count(); ++i) {
      if (saved_tensors[i].defined()) results.push_back(to_tensor(stack[i]));
    }
    return results;
  }
};

// Runs X_forward and records a node. `inputs` are the tensor arguments; absent inputs and outputs have no
// edge.
Stack record_node(const Operator& op, const variable_list& inputs, at::ArrayRef<IValue> arguments) {
  variable_list defined;
  for (const auto& input : inputs) {
    if (input.defined()) defined.push_back(input);
  }
  const auto node = torch_internals::make_node<Backward>("girih::" + op.name + "_backward");
  torch_internals::connect_inputs(node, defined);

  Stack stack(arguments.begin(), arguments.end());
  variable_list outputs, saved_tensors = inputs;
  int64_t differentiable_mask = 0;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::AutoGradMode no_grad(false);
    stack.emplace_back(true);
    get_handles(op).forward.callBoxed(&stack);
  }
  size_t next_saved = op.output_count();
  for (const auto& saved : op.saved) {
    saved_tensors.push_back(to_tensor(stack[saved.name == op.output.name ? 0 : next_saved++]));
  }
  for (size_t i = 0; i < op.output_count(); ++i) {
    const auto output = to_tensor(stack[i]);
    if (!output.defined() || !output.is_floating_point()) continue;
    differentiable_mask |= int64_t(1) << i;
    outputs.push_back(output);
  }
  std::vector<IValue> call{int64_t(&op - operators().data()), differentiable_mask};
  call.insert(call.end(), arguments.begin() + op.input_count(), arguments.end());
  node->ctx_.saved_data[kCall] = c10::ivalue::Tuple::create(std::move(call));
  node->ctx_.save_for_backward(std::move(saved_tensors));
  node->ctx_.set_materialize_grads(false);

  const auto attached = torch_internals::attach_outputs(node, defined, outputs);
  stack.resize(op.output_count());
  auto output = attached.begin();
  for (size_t i = 0; i < op.output_count(); ++i) {
    if (differentiable_mask >> i & 1) stack[i] = *output++;
  }
  return stack;
}

void check_no_tangent(const Operator& op, const char* form, const std::string& name,
                      const at::Tensor& input) {
  TORCH_CHECK_NOT_IMPLEMENTED(!input._fw_grad(/*level=*/0).defined(), "girih.", op.name, form, ": ", name,
                              " has a tangent, but girih has no forward-mode derivatives (torch.func.jvp, "
                              "jacfwd, linearize): use reverse mode");
}

const std::string& input_name(const Operator& op, size_t input) {
  return input < op.tensors.size() ? op.tensors[input].name : op.packing;
}

// If all tensors are absent, the dispatcher has no kernel or for another layout.
void check_layout(const Operator& op, const char* form, size_t i, const at::Tensor& input) {
  GIRIH_CHECK(i > 0 || input.defined(), op.name, form, ": ", input_name(op, i),
              " is None but should be a tensor ", op.tensors[0].shapes);
  if (!input.defined()) return;
  GIRIH_CHECK(input.layout() == at::kStrided && !input.is_nested(), op.name, form, ": ", input_name(op, i),
              " is a sparse or nested tensor but should be a dense one");
}

// Runs X_forward with save=False and leaves the outputs of X on the stack. `stack` holds the arguments of X.
void run_forward_without_save(const Operator& op, Stack* stack) {
  const auto& forward = get_handles(op).forward;
  stack->emplace_back(false);
  const auto first_output = stack->size() - forward.schema().arguments().size();
  forward.callBoxed(stack);
  stack->resize(first_output + op.output_count());
}

void run_with_autograd(const Operator& op, const c10::OperatorHandle& handle, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, handle.schema().arguments().size());
  variable_list inputs;
  bool save = false;
  for (size_t i = 0; i < op.input_count(); ++i) {
    inputs.push_back(to_tensor(arguments[i]));
    check_layout(op, "", i, inputs.back());
    if (!inputs.back().defined()) continue;
    check_no_tangent(op, "", input_name(op, i), inputs.back());
    save |= inputs.back().requires_grad();
  }
  if (save && at::GradMode::is_enabled()) {
    torch_internals::check_no_transform_of_nodes();
    auto results = record_node(op, inputs, arguments);
    torch::jit::drop(*stack, arguments.size());
    stack->insert(stack->end(), results.begin(), results.end());
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  run_forward_without_save(op, stack);
}

// X without autograd (inference mode).
void run_without_autograd(const Operator& op, const c10::OperatorHandle& handle, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, handle.schema().arguments().size());
  for (size_t i = 0; i < op.input_count(); ++i) {
    check_layout(op, "", i, to_tensor(arguments[i]));
  }
  run_forward_without_save(op, stack);
}

// X_step under autograd: the state is written in place, so a step has no derivative.
void step(const Operator& op, const c10::OperatorHandle& handle, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, handle.schema().arguments().size());
  for (size_t i = 0; i < op.tensors.size(); ++i) {
    const auto input = to_tensor(arguments[i]);
    check_layout(op, "_step", i, input);
    if (!input.defined()) continue;
    check_no_tangent(op, "_step", input_name(op, i), input);
    GIRIH_CHECK(!at::GradMode::is_enabled() || !input.requires_grad(), op.name, "_step: ", op.tensors[i].name,
                " requires a gradient but a step has none: call it under torch.no_grad(), or call ", "girih.",
                op.name);
  }
  const at::AutoDispatchBelowAutograd below_autograd;
  handle.callBoxed(stack);
}

// Increments the version of the state tensors after a step, as in-place operators of PyTorch do. A backward
// pass that saved such a tensor then raises an error and does not return a wrong gradient. Inference tensors
// have no version.
void step_and_bump_versions(const Operator& op, const c10::OperatorHandle& handle, Stack* stack) {
  variable_list written;
  const auto arguments = torch::jit::last(*stack, handle.schema().arguments().size());
  for (size_t i = op.data_count; i < op.tensors.size(); ++i) {
    const auto state = to_tensor(arguments[i]);
    if (state.defined() && !state.is_inference()) written.push_back(state);
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    handle.callBoxed(stack);
  }
  for (const auto& state : written) state.unsafeGetTensorImpl()->bump_version();
}

// X_step for tensors with the negative bit: data are resolved; a state with this bit cannot be written in
// place.
void resolve_negated_step(const Operator& op, const c10::OperatorHandle& handle, Stack* stack) {
  const auto arguments = stack->end() - ptrdiff_t(handle.schema().arguments().size());
  for (size_t i = 0; i < op.tensors.size(); ++i) {
    const auto input = to_tensor(arguments[i]);
    if (!input.defined() || !input.is_neg()) continue;
    GIRIH_CHECK(i < op.data_count, op.name, "_step: ", op.tensors[i].name,
                " is an expanded or negated view but is written in place: pass a copy");
    arguments[i] = input.resolve_neg();
  }
  handle.callBoxed(stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Negative, m) {
  for (const auto& op : operators()) {
    if (op.state_count() > 0) register_boxed<&resolve_negated_step>(m, op.name + "_step", op);
  }
}

TORCH_LIBRARY_IMPL(girih, Autograd, m) {
  for (const auto& op : operators()) {
    register_boxed<&run_with_autograd>(m, op.name, op);
    // A second derivative raises an error with the name of the operator.
    for (const char* suffix : {"_forward", "_backward"}) {
      m.impl((op.name + suffix).c_str(), torch::autograd::autogradNotImplementedFallback());
    }
    if (op.state_count() > 0) register_boxed<&step>(m, op.name + "_step", op);
  }
}

TORCH_LIBRARY_IMPL(girih, ADInplaceOrView, m) {
  for (const auto& op : operators()) {
    if (op.state_count() > 0) register_boxed<&step_and_bump_versions>(m, op.name + "_step", op);
  }
}

TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) {
  for (const auto& op : operators()) register_boxed<&run_without_autograd>(m, op.name, op);
}

}  // namespace girih
