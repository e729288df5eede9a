// Autocast of every operator: data arguments are cast to the dtype of the autocast region; gates, step sizes
// and states are cast to fp32. Inside the operator autocast is off.
#include <ATen/autocast_mode.h>

#include "dispatch.h"

namespace girih {
namespace {

template <c10::DispatchKey key, c10::DeviceType device>
void cast(const Operator& op, const c10::OperatorHandle& handle, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  const auto& schema = handle.schema().arguments();
  const auto arguments = stack->end() - ptrdiff_t(schema.size());
  for (size_t i = 0; i < op.tensors.size(); ++i) {
    auto& argument = arguments[i];
    const bool in_place = schema[i].alias_info() != nullptr;
    const auto tensor = to_tensor(argument);
    if (in_place || !tensor.defined() || !tensor.is_floating_point()) continue;
    const auto dtype =
        op.tensors[i].kind == TensorKind::data ? at::autocast::get_autocast_dtype(device) : at::kFloat;
    argument = at::autocast::cached_cast(dtype, tensor, device);
  }
  handle.callBoxed(stack);
}

template <c10::DispatchKey key>
void without_autocast(const Operator&, const c10::OperatorHandle& handle, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  handle.callBoxed(stack);
}

template <c10::DispatchKey key, c10::DeviceType device>
void register_autocast(torch::Library& m) {
  for (const auto& op : operators()) {
    register_boxed<&cast<key, device>>(m, op.name, op);
    register_boxed<&cast<key, device>>(m, op.name + "_explain", op);
    if (op.state_count() > 0) register_boxed<&cast<key, device>>(m, op.name + "_step", op);
    register_boxed<&without_autocast<key>>(m, op.name + "_forward", op);
    register_boxed<&without_autocast<key>>(m, op.name + "_backward", op);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, AutocastCPU, m) { register_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>(m); }
TORCH_LIBRARY_IMPL(girih, AutocastCUDA, m) {
  register_autocast<c10::DispatchKey::AutocastCUDA, at::kCUDA>(m);
}

}  // namespace girih
