// X_list(data, state, packing, *, options) -> Tensor[]: the outputs of X that are not None, in the order of
// X. torch.jit.trace cannot record a call with an output of type "Tensor?", so girih.ops calls X_list while
// it traces. Registered for every operator with an optional output. X itself implements autograd, autocast
// and the checks.
#include <algorithm>

#include "dispatch.h"

namespace girih {
namespace {

bool has_optional_output(const Operator& op) {
  return std::any_of(op.tensors.begin() + ptrdiff_t(op.data_count), op.tensors.end(),
                     [](const TensorArgument& state) { return state.optional; });
}

// "gsa(Tensor q, ...) -> (Tensor o, ...)" -> "gsa_list(Tensor q, ...) -> Tensor[]"
std::string list_schema(const Operator& op) {
  const auto schema = op.schema();
  const auto arguments = schema.substr(op.name.size(), schema.rfind(" -> ") - op.name.size());
  return op.name + "_list" + arguments + " -> Tensor[]";
}

void list(const Operator& op, const c10::OperatorHandle&, Stack* stack) {
  find_operator(op.name).callBoxed(stack);
  c10::List<at::Tensor> outputs;
  for (const auto& output : torch::jit::pop(*stack, op.output_count())) {
    if (output.isTensor()) outputs.push_back(output.toTensor());
  }
  stack->emplace_back(std::move(outputs));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(girih, m) {
  for (const auto& op : operators()) {
    if (has_optional_output(op)) m.def(list_schema(op).c_str());
  }
}

TORCH_LIBRARY_IMPL(girih, CompositeImplicitAutograd, m) {
  for (const auto& op : operators()) {
    if (has_optional_output(op)) register_boxed<&list>(m, op.name + "_list", op);
  }
}

}  // namespace girih
