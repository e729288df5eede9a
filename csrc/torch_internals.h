// PyTorch functions outside of its public C++ API that change between versions, with one `#if` per
// difference. Tests: tests/cpp/torch_internals.cpp, tests/ops/test_transforms.py.
//
// girih builds with PyTorch 2.11 to 2.15 (cmake/torch_versions.cmake).
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/functorch/PlumbingHelper.h>
#include <c10/core/AutogradState.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/version.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#define GIRIH_TORCH_AT_LEAST(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

namespace girih::torch_internals {

using torch::autograd::variable_list;

// ---- named autograd nodes -----------------------------------------------------------------------

// torch::autograd::Function<T> names its nodes after the C++ type T. A NamedNode is the same node with the
// name of its operator, for profilers and error messages.

template <class T>
class NamedNode : public torch::autograd::CppNode<T> {
 public:
  explicit NamedNode(std::string name) : name_(std::move(name)) {}
  std::string name() const override { return name_; }

 private:
  std::string name_;
};

// PyTorch 2.13 and newer hold nodes by an intrusive pointer.
#if GIRIH_TORCH_AT_LEAST(13)
template <class T>
using NodePointer = c10::intrusive_ptr<T>;
template <class T>
NodePointer<NamedNode<T>> make_node(std::string name) {
  return c10::make_intrusive<NamedNode<T>>(std::move(name));
}
#else
template <class T>
using NodePointer = std::shared_ptr<T>;
template <class T>
NodePointer<NamedNode<T>> make_node(std::string name) {
  return {new NamedNode<T>(std::move(name)), torch::autograd::deleteNode};
}
#endif

// Connects a new node to `inputs`, which are defined: they receive its gradients.
template <class T>
void connect_inputs(const NodePointer<NamedNode<T>>& node, const variable_list& inputs) {
  node->set_ctx_grad_fn(node);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  node->clear_input_metadata();
  node->is_variable_input_.assign(inputs.size(), true);
  for (const auto& input : inputs) node->input_info_.emplace_back(input);
}

// Sets `node` as the history of `outputs`, and saves the tensors of the context: add nothing to the context
// afterwards.
template <class T>
variable_list attach_outputs(const NodePointer<NamedNode<T>>& node, const variable_list& inputs,
                             const variable_list& outputs) {
  const std::vector<std::optional<at::Tensor>> raw(outputs.begin(), outputs.end());
  const auto view_as_self = [](const at::Tensor& x) { return x.view_as(x); };
#if GIRIH_TORCH_AT_LEAST(14)
  c10::intrusive_ptr<torch::autograd::Node> attached;
  const auto wrapped = torch::autograd::_wrap_outputs(
      inputs, node->ctx_.get_non_differentiable(), node->ctx_.get_and_bump_dirty(), raw, node,
      /*jvp_user_function=*/{}, /*to_save_if_setup_context=*/{}, view_as_self, /*pure_view=*/false, attached);
#else
  const auto wrapped = torch::autograd::_wrap_outputs(
      inputs, node->ctx_.get_non_differentiable(), node->ctx_.get_and_bump_dirty(), raw, node,
      /*jvp_user_function=*/{}, /*to_save_if_setup_context=*/{}, view_as_self, /*pure_view=*/false);
#endif
  variable_list attached_outputs;
  for (const auto& output : wrapped) {
    node->output_info_.emplace_back(*output);
    attached_outputs.push_back(*output);
  }
  node->save_variables_to_ctx();
#if GIRIH_TORCH_AT_LEAST(14)
  if (attached) torch::autograd::fire_node_creation_hooks(attached);
#endif
  return attached_outputs;
}

// ---- the autograd engine ------------------------------------------------------------------------

// While an object exists, the autograd engine runs on the calling thread, where the guards of the caller
// apply. Otherwise the engine runs CUDA work on its own thread.
class SingleThreadedEngine {
 public:
  SingleThreadedEngine() { set(false); }
  ~SingleThreadedEngine() { set(before_); }
  SingleThreadedEngine(const SingleThreadedEngine&) = delete;
  SingleThreadedEngine& operator=(const SingleThreadedEngine&) = delete;

 private:
  static c10::AutogradState& state() { return c10::AutogradState::get_tls_state(); }
  static void set(bool threads) { state().set_multithreading_enabled(threads); }

  const bool before_ = state().get_multithreading_enabled();
};

// Releases the GIL of Python while an object exists; the autograd engine refuses to run with it. libgirih.so
// is not linked with Python: the functions are looked up in the process.
class GilRelease {
 public:
  GilRelease() {
    if (python().save != nullptr && python().is_held() != 0) thread_ = python().save();
  }
  ~GilRelease() {
    if (thread_ != nullptr) python().restore(thread_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  struct Python {
    int (*is_held)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    void* (*save)() = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    void (*restore)(void*) = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
  };
  static const Python& python() {
    static const Python functions;
    return functions;
  }

  void* thread_ = nullptr;
};

// Dispatch keys of this thread with autograd enabled, as within torch.enable_grad, and autocast disabled.
inline c10::impl::ForceDispatchKeyGuard autograd_without_autocast() {
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  return {tls.included_, (tls.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView) |
                             c10::autocast_dispatch_keyset};
}

// ---- torch.func ---------------------------------------------------------------------------------

// Raises an error within a transform of torch.func that does not support autograd nodes written in C++.
inline void check_no_transform_of_nodes() {
  if (const auto& functorch = at::functorch::functorchTLSAccessor())
    functorch->checkSupportsCppAutogradFunction();
}

// The level of the innermost torch.vmap.
inline int64_t vmap_level() {
  const auto layer = at::functorch::maybeCurrentDynamicLayer();
  TORCH_INTERNAL_ASSERT(layer.has_value());
  return layer->layerId();
}

// The tensor without the mapped dimension of this level, and the index of this dimension; nullopt if the
// tensor is not mapped.
inline std::pair<at::Tensor, std::optional<int64_t>> remove_mapped_dimension(const at::Tensor& tensor,
                                                                             int64_t level) {
  auto [inside, dimension] = at::functorch::unwrapTensorAtLevel(tensor, level);
  return {std::move(inside), dimension};
}

// Marks the first dimension of the tensor as mapped at this level.
inline at::Tensor add_mapped_dimension(const at::Tensor& tensor, int64_t level) {
  return at::functorch::makeBatched(tensor, 0, level);
}

}  // namespace girih::torch_internals
