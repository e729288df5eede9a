// torch.vmap of every operator: the mapped dimension becomes part of the batch, since the sequences of a
// batch are independent.
#include <algorithm>

#include "../../torch_internals.h"
#include "../arguments/check.h"
#include "dispatch.h"

namespace girih {
namespace {

using c10::IValue;

// Whether the first dimension of the tensor is the batch.
bool has_batch(const Operator& op, const TensorArgument& tensor) {
  const auto& pattern = tensor.patterns.front();
  if (pattern.has_ellipsis) return true;
  const auto letter = pattern.dimensions.front().letter;
  return letter >= 0 && (op.letters[letter].name == "B" || op.letters[letter].name == "N");
}

void map(const Operator& op, const c10::OperatorHandle& handle, Stack* stack) {
  const auto level = torch_internals::vmap_level();
  const c10::impl::ExcludeDispatchKeyGuard no_vmap(c10::DispatchKey::FuncTorchBatched);

  auto arguments = pop_arguments(handle, stack);
  std::vector<std::optional<int64_t>> mapped(op.input_count());
  c10::SymInt count = -1, batch = -1;  // size of the mapped dimension, B of one mapped call
  for (size_t i = 0; i < op.input_count(); ++i) {
    const auto tensor = to_tensor(arguments[i]);
    if (!tensor.defined()) continue;
    auto [unwrapped, dimension] = torch_internals::remove_mapped_dimension(tensor, level);
    if (dimension) count = unwrapped.sym_size(*dimension);
    arguments[i] = unwrapped;
    mapped[i] = dimension;
  }
  // Only an outer torch.vmap maps tensors of this call: its level follows.
  if (std::ranges::none_of(mapped, [](const auto& dimension) { return dimension.has_value(); })) {
    stack->insert(stack->end(), arguments.begin(), arguments.end());
    handle.callBoxed(stack);
    return;
  }
  for (size_t i = 0; i < op.input_count(); ++i) {
    auto tensor = to_tensor(arguments[i]);
    if (!tensor.defined()) continue;
    const bool is_packing = i == op.tensors.size();
    GIRIH_CHECK(!is_packing || tensor.dim() - int(mapped[i].has_value()) == 2, op.name, ": ", op.packing,
                " packs sequences into one row, which torch.vmap cannot batch; call it without vmap");
    if (!is_packing && !has_batch(op, op.tensors[i])) {
      GIRIH_CHECK(!mapped[i], op.name, ": ", op.tensors[i].name,
                  " is mapped by torch.vmap but the whole batch shares it; call it without vmap");
      continue;
    }
    // [count, B, ...] -> [count * B, ...]
    if (mapped[i]) {
      tensor = tensor.movedim(*mapped[i], 0);
    } else {
      auto sizes = tensor.sym_sizes().vec();
      sizes.insert(sizes.begin(), count);
      tensor = tensor.expand_symint(sizes);
    }
    if (is_packing || !op.tensors[i].patterns.front().has_ellipsis) {
      if (i == 0) batch = tensor.sym_size(1);
      tensor = tensor.flatten(0, 1);
    }
    arguments[i] = tensor;
  }
  const auto first_result = stack->size();
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  handle.callBoxed(stack);
  for (size_t i = first_result; i < stack->size(); ++i) {
    auto result = to_tensor((*stack)[i]);
    if (!result.defined()) continue;
    // B = N: packed sequences are refused above. `count` may be 0.
    if (!op.tensors[0].patterns.front().has_ellipsis) result = result.unflatten_symint(0, {count, batch});
    (*stack)[i] = torch_internals::add_mapped_dimension(result, level);
  }
}

void refuse_step(const Operator& op, const c10::OperatorHandle&, Stack*) {
  GIRIH_CHECK(false, op.name, "_step: torch.vmap cannot map a state that is written in place; call girih.",
              op.name);
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, FuncTorchBatched, m) {
  for (const auto& op : operators()) {
    register_boxed<&map>(m, op.name, op);
    if (op.state_count() > 0) register_boxed<&refuse_step>(m, op.name + "_step", op);
  }
}

}  // namespace girih
