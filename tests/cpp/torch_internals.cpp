// Every function of csrc/torch_internals.h, with the PyTorch version that the tests are built with.
#include "torch_internals.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include "catch.h"

namespace internals = girih::torch_internals;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

// y = a x for a saved tensor `a`; `a` has no gradient.
struct Scale {
  static constexpr bool is_traceable = false;
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    return {grads[0] * saved[0], Tensor()};
  }
};

Tensor scale(const Tensor& x, const Tensor& a) {
  const auto node = internals::make_node<Scale>("girih::scale_backward");
  internals::connect_inputs(node, {x, a});
  Tensor y;
  {
    const at::AutoGradMode off(false);
    y = x * a;
  }
  node->ctx_.save_for_backward({a});
  return internals::attach_outputs(node, {x, a}, {y})[0];
}

}  // namespace

TEST_CASE("a node has its given name and computes its gradient") {
  const auto x = at::randn({3}, at::kDouble).requires_grad_(true), a = at::randn({3}, at::kDouble);
  const auto y = scale(x, a);
  CHECK(y.grad_fn()->name() == "girih::scale_backward");
  CHECK(y.requires_grad());
  CHECK(at::equal(y.detach(), x.detach() * a));
  y.sum().backward();
  CHECK(at::equal(x.grad(), a));
}

TEST_CASE("backward fails if a saved tensor was written in place") {
  const auto x = at::randn({3}).requires_grad_(true);
  auto a = at::randn({3});
  const auto y = scale(x, a);
  a.add_(1);
  CHECK_THROWS_AS(y.sum().backward(), c10::Error);
}

TEST_CASE("a node releases its saved tensors after one backward pass") {
  const auto x = at::randn({3}).requires_grad_(true);
  auto a = at::randn({3});
  const auto y = scale(x, a);
  y.sum().backward();
  CHECK(a.use_count() == 1);
  CHECK_THROWS_AS(y.sum().backward(), c10::Error);
}

TEST_CASE("SingleThreadedEngine disables multithreading and restores the setting") {
  auto& state = c10::AutogradState::get_tls_state();
  for (const bool before : {true, false}) {
    state.set_multithreading_enabled(before);
    {
      const internals::SingleThreadedEngine single;
      CHECK_FALSE(state.get_multithreading_enabled());
    }
    CHECK(state.get_multithreading_enabled() == before);
  }
  state.set_multithreading_enabled(true);
}

TEST_CASE("GilRelease has no effect in a process without Python") {
  const internals::GilRelease released;
  const auto x = at::ones({1}).requires_grad_(true);
  x.sum().backward();
  CHECK(x.grad().item<float>() == 1);
}

TEST_CASE("autograd records below its own keys, and autocast does not") {
  const auto x = at::ones({2, 2}).requires_grad_(true);
  const at::AutoDispatchBelowADInplaceOrView below;
  CHECK_FALSE(x.mul(2).requires_grad());
  at::autocast::set_autocast_enabled(at::kCPU, true);
  {
    const auto above = internals::autograd_without_autocast();
    CHECK(x.mul(2).requires_grad());
    CHECK(x.mm(x).scalar_type() == at::kFloat);
  }
  at::autocast::set_autocast_enabled(at::kCPU, false);
  CHECK_FALSE(x.mul(2).requires_grad());
}

TEST_CASE("C++ nodes are allowed outside torch.func transforms") {
  CHECK_NOTHROW(internals::check_no_transform_of_nodes());
}

TEST_CASE("a mapped dimension is removed and added again") {
  const auto x = at::randn({4, 3});
  const auto mapped = internals::add_mapped_dimension(x, 1);
  CHECK(mapped.sizes() == at::IntArrayRef({3}));
  const auto [inside, dimension] = internals::remove_mapped_dimension(mapped, 1);
  CHECK(dimension == std::optional<int64_t>(0));
  CHECK(at::equal(inside, x));
  CHECK_FALSE(internals::remove_mapped_dimension(x, 1).second);
}
