// Checkpointing by a custom autograd function.
#include "recompute.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

namespace girih {
namespace {

using torch::autograd::AutogradContext;

struct Body : torch::CustomClassHolder {
  std::function<Tensors(const Tensors&)> f;
  std::vector<bool> present;

  // Calls f with the undefined inputs restored at their places.
  Tensors run(const Tensors& defined) const {
    Tensors inputs;
    auto next = defined.begin();
    for (const bool here : present) inputs.push_back(here ? *next++ : at::Tensor());
    return f(inputs);
  }
};

struct Recomputed : torch::autograd::Function<Recomputed> {
  static Tensors forward(AutogradContext* ctx, const c10::intrusive_ptr<Body>& body, at::TensorList inputs) {
    ctx->saved_data["body"] = c10::IValue::make_capsule(body);
    ctx->save_for_backward(inputs.vec());
    ctx->set_materialize_grads(false);
    return body->run(inputs.vec());
  }

  static Tensors backward(AutogradContext* ctx, const Tensors& grads) {
    const auto body = c10::static_intrusive_pointer_cast<Body>(ctx->saved_data["body"].toCapsule());
    at::AutoGradMode on(true);
    Tensors inputs, leaves;
    for (const auto& saved : ctx->get_saved_variables()) {
      inputs.push_back(saved.detach().requires_grad_(saved.requires_grad()));
      if (saved.requires_grad()) leaves.push_back(inputs.back());
    }
    Tensors outputs, cotangents;
    const auto all = body->run(inputs);
    for (size_t i = 0; i < all.size(); ++i) {
      if (!grads[i].defined() || !all[i].requires_grad()) continue;
      outputs.push_back(all[i]);
      cotangents.push_back(grads[i]);
    }
    Tensors found(leaves.size());
    if (!outputs.empty()) {
      found = torch::autograd::grad(outputs, leaves, cotangents, false, false, /*allow_unused=*/true);
    }
    Tensors results(1);  // the body has no gradient
    auto next = found.begin();
    for (const auto& input : inputs) results.push_back(input.requires_grad() ? *next++ : at::Tensor());
    return results;
  }
};

}  // namespace

Tensors recompute(const std::function<Tensors(const Tensors&)>& f, const Tensors& inputs) {
  Tensors defined;
  std::vector<bool> present;
  bool differentiate = false;
  for (const auto& input : inputs) {
    present.push_back(input.defined());
    if (!input.defined()) continue;
    defined.push_back(input);
    differentiate |= input.requires_grad();
  }
  if (!differentiate || !at::GradMode::is_enabled()) return f(inputs);
  const auto body = c10::make_intrusive<Body>();
  body->f = f;
  body->present = present;
  return Recomputed::apply(body, at::TensorList(defined));
}

}  // namespace girih
