// Autocast, the same for every operator: the inputs named in Operator::low go down to the region's dtype,
// gates, step sizes and states go to fp32, and nothing inside an operator is cast again.
#include <ATen/autocast_mode.h>

#include <algorithm>

#include "dispatch.h"

namespace girih {
namespace {

template <c10::DispatchKey key, c10::DeviceType device>
void cast(const c10::OperatorHandle& handle, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  const Operator& op = describe(handle.operator_name().name);
  const auto& names = handle.schema().arguments();
  auto arguments = pop_arguments(handle, stack);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool in_place = names[i].alias_info() != nullptr;
    if (in_place || !arguments[i].isTensor() || !arguments[i].toTensor().is_floating_point()) continue;
    const bool low = std::find(op.low.begin(), op.low.end(), names[i].name()) != op.low.end();
    const auto dtype = low ? at::autocast::get_autocast_dtype(device) : at::kFloat;
    arguments[i] = at::autocast::cached_cast(dtype, arguments[i].toTensor(), device);
  }
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  handle.callBoxed(stack);
}

template <c10::DispatchKey key>
void without_autocast(const c10::OperatorHandle& handle, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  handle.callBoxed(stack);
}

template <c10::DispatchKey key, c10::DeviceType device>
void register_autocast(torch::Library& m) {
  for (const auto& op : operators()) {
    m.impl(op.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&cast<key, device>>());
    if (!op.state.empty()) {
      m.impl((op.name + "_step").c_str(), torch::CppFunction::makeFromBoxedFunction<&cast<key, device>>());
    }
    for (const char* suffix : {"_forward", "_backward"}) {
      m.impl((op.name + suffix).c_str(), torch::CppFunction::makeFromBoxedFunction<&without_autocast<key>>());
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, AutocastCPU, m) { register_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>(m); }
TORCH_LIBRARY_IMPL(girih, AutocastCUDA, m) {
  register_autocast<c10::DispatchKey::AutocastCUDA, at::kCUDA>(m);
}

}  // namespace girih
