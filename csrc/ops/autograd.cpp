// X under autograd, the same for every operator: X calls X_forward and leaves X_backward in the graph. Both
// are registered operators, so a traced graph holds them as they are.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>

#include "dispatch.h"

namespace girih {
namespace {

using c10::IValue;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Expects X's arguments on the stack, leaves X_forward's results.
void call_forward(const Operator& op, bool save, Stack* stack) {
  stack->emplace_back(save);
  find(op.name + "_forward").callBoxed(stack);
}

// One call of X: its arguments, and which of its outputs exist.
struct Call {
  const Operator& op;
  std::vector<at::Tensor> inputs;  // undefined: absent
  std::vector<IValue> options;
  std::vector<bool> present;
};

// Function counts and returns defined tensors only: `inputs` are call->inputs without the absent ones, and
// absent outputs are left out.
struct Differentiable : torch::autograd::Function<Differentiable> {
  static variable_list forward(AutogradContext* ctx, Call* call, at::TensorList) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Operator& op = call->op;
    Stack stack;
    for (const auto& input : call->inputs) stack.push_back(value_of(input));
    stack.insert(stack.end(), call->options.begin(), call->options.end());
    call_forward(op, true, &stack);

    variable_list results, constant, kept = call->inputs;
    for (size_t i = op.outputs(); i < stack.size(); ++i) kept.push_back(tensor_of(stack[i]));
    c10::List<bool> present;
    for (size_t i = 0; i < op.outputs(); ++i) {
      const auto result = tensor_of(stack[i]);
      call->present.push_back(result.defined());
      present.push_back(result.defined());
      if (!result.defined()) continue;
      results.push_back(result);
      if (!result.is_floating_point()) constant.push_back(result);
    }
    ctx->save_for_backward(std::move(kept));
    ctx->mark_non_differentiable(constant);
    ctx->set_materialize_grads(false);
    ctx->saved_data["operator"] = op.name;
    ctx->saved_data["options"] = c10::ivalue::Tuple::create(call->options);
    ctx->saved_data["present"] = present;
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Operator& op = describe("girih::" + ctx->saved_data["operator"].toStringRef());
    Stack stack;
    size_t next = 0;
    for (const bool present : ctx->saved_data["present"].toBoolList()) {
      stack.push_back(present ? value_of(grads[next++]) : IValue());
    }
    const auto kept = ctx->get_saved_variables();
    for (const auto& tensor : kept) stack.push_back(value_of(tensor));
    const auto options = ctx->saved_data["options"].toTuple();
    stack.insert(stack.end(), options->elements().begin(), options->elements().end());
    find(op.name + "_backward").callBoxed(stack);

    variable_list results(1);  // call has no gradient
    for (size_t i = 0; i < op.inputs(); ++i) {
      if (kept[i].defined()) results.push_back(tensor_of(stack[i]));
    }
    return results;
  }
};

void differentiable(const c10::OperatorHandle& handle, Stack* stack) {
  const Operator& op = describe(handle.operator_name().name);
  const auto arguments = pop_arguments(handle, stack);
  Call call{op, {}, {arguments.begin() + op.inputs(), arguments.end()}, {}};
  variable_list defined;
  bool save = false;
  for (size_t i = 0; i < op.inputs(); ++i) {
    call.inputs.push_back(tensor_of(arguments[i]));
    if (!call.inputs.back().defined()) continue;
    defined.push_back(call.inputs.back());
    save |= defined.back().requires_grad();
  }
  if (!save || !at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    stack->insert(stack->end(), arguments.begin(), arguments.end());
    call_forward(op, false, stack);
    stack->resize(stack->size() - op.saved.size());
    return;
  }
  const auto results = Differentiable::apply(&call, at::TensorList(defined));
  auto result = results.begin();
  for (const bool present : call.present) stack->push_back(present ? IValue(*result++) : IValue());
}

// Without autograd (inference mode) X is X_forward.
void not_differentiable(const c10::OperatorHandle& handle, Stack* stack) {
  const Operator& op = describe(handle.operator_name().name);
  call_forward(op, false, stack);
  stack->resize(stack->size() - op.saved.size());
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, Autograd, m) {
  for (const auto& op : operators()) {
    m.impl(op.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&differentiable>());
    // A second derivative is an error that names the operator, never a silent zero.
    for (const char* suffix : {"_forward", "_backward"}) {
      m.impl((op.name + suffix).c_str(), torch::autograd::autogradNotImplementedFallback());
    }
    if (!op.state.empty())
      m.impl((op.name + "_step").c_str(), torch::autograd::autogradNotImplementedFallback());
  }
}

TORCH_LIBRARY_IMPL(girih, ADInplaceOrView, m) {
  for (const auto& op : operators()) {
    if (op.state.empty()) continue;
    m.impl((op.name + "_step").c_str(), torch::autograd::autogradNotImplementedInplaceOrViewFallback());
  }
}

TORCH_LIBRARY_IMPL(girih, CompositeExplicitAutograd, m) {
  for (const auto& op : operators()) {
    m.impl(op.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&not_differentiable>());
  }
}

}  // namespace girih
