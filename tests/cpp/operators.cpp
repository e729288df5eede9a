// The operators in C++: against plain loops; gradients, steps and refusals.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <girih/ops.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <vector>

#include "catch.h"

using at::Tensor;
using namespace girih;

namespace {

constexpr int64_t B = 2, T = 11, H = 2, D = 4, M = 3, C = 4;
const auto kDouble = at::TensorOptions(at::kDouble);

Tensor random(at::IntArrayRef sizes) { return at::randn(sizes, kDouble); }
Tensor gate(at::IntArrayRef sizes) { return at::log_sigmoid(random(sizes)); }
Tensor step_size(at::IntArrayRef sizes) { return random(sizes).sigmoid(); }
Tensor unit_columns(const Tensor& s) { return s / s.norm(2, -2, true); }

// One operator as a function of its data on T tokens; each case handles its state and position.
struct Case {
  const char* name;
  std::vector<Tensor> inputs;                                         // [B, T, ...], all differentiable
  std::function<Tensor(const std::vector<Tensor>&)> all;              // output for all tokens
  std::function<Tensor(const std::vector<Tensor>&)> stepwise_output;  // the same with X_step, token by token
};

std::vector<Tensor> token(const std::vector<Tensor>& inputs, int64_t t) {
  std::vector<Tensor> one;
  for (const auto& x : inputs) one.push_back(x.slice(1, t, t + 1));
  return one;
}

// X_step on every token in turn, with a state that each call writes.
std::function<Tensor(const std::vector<Tensor>&)> make_stepwise(
    const std::function<Tensor(const std::vector<Tensor>&)>& step) {
  return [step](const std::vector<Tensor>& inputs) {
    std::vector<Tensor> outputs;
    for (int64_t t = 0; t < T; ++t) outputs.push_back(step(token(inputs, t)));
    return at::cat(outputs, 1);
  };
}

std::vector<Case> cases() {
  at::manual_seed(0);
  const auto q = random({B, T, H, D}), k = random({B, T, H, D}), v = random({B, T, H, D});
  const auto g = gate({B, T, H}), gamma = step_size({B, T, H});
  std::vector<Case> all;

  const ops::GSAOptions gsa{.state = ops::GSAState::start(B, H, D, D, M, false, kDouble)};
  all.push_back(
      {"gsa",
       {q, k, v, gate({B, T, H, M})},
       [](const auto& x) { return ops::gsa(x[0], x[1], x[2], {}, x[3]).first; },
       make_stepwise([=](const auto& x) { return ops::gsa_step(x[0], x[1], x[2], {}, x[3], gsa); })});

  const ops::GSAOptions abc{.state = ops::GSAState::start(B, H, D, D, M, true, kDouble)};
  all.push_back(
      {"abc",
       {q, k, v, random({B, T, H, M})},
       [](const auto& x) { return ops::gsa(x[0], x[1], x[2], x[3], {}).first; },
       make_stepwise([=](const auto& x) { return ops::gsa_step(x[0], x[1], x[2], x[3], {}, abc); })});

  const ops::GLAOptions gla{.state = ops::GLAState::start(B, H, D, D, kDouble)};
  all.push_back({"gla",
                 {q, k, v, gate({B, T, H, D})},
                 [](const auto& x) { return ops::gla(x[0], x[1], x[2], x[3]).first; },
                 make_stepwise([=](const auto& x) { return ops::gla_step(x[0], x[1], x[2], x[3], gla); })});

  constexpr int64_t n = 2;
  const ops::DeltaProductOptions rule{.n = n, .l2norm_qk = true};
  auto rule_step = rule;
  rule_step.state = ops::DeltaProductState::start(B, H, D, D, false, kDouble);
  const auto rows = [](const Tensor& x) { return x.flatten(1, 2); };  // [B, T, n, ...] -> [B, T * n, ...]
  all.push_back({"delta_product",
                 {q, random({B, T, n, H, D}), random({B, T, n, H, D}), step_size({B, T, n, H}), g},
                 [=](const auto& x) {
                   return ops::delta_product(x[0], rows(x[1]), rows(x[2]), rows(x[3]), x[4], rule).first;
                 },
                 make_stepwise([=](const auto& x) {
                   return ops::delta_product_step(x[0], rows(x[1]), rows(x[2]), rows(x[3]), x[4], rule_step);
                 })});

  const ops::DeltaProductOptions nonlinear{.chunk = C, .between_chunks = "tanh"};
  auto nonlinear_step = nonlinear;
  nonlinear_step.state = ops::DeltaProductState::start(B, H, D, D, true, kDouble);
  all.push_back(
      {"delta_product between chunks",
       {q, k, v, gamma},
       [=](const auto& x) { return ops::delta_product(x[0], x[1], x[2], x[3], {}, nonlinear).first; },
       make_stepwise([=](const auto& x) {
         return ops::delta_product_step(x[0], x[1], x[2], x[3], {}, nonlinear_step);
       })});

  const auto A1 = random({H, M, D}), A2 = random({H, M, D}), a = random({B, T, H, M});
  const ops::TrellisOptions trellis{.chunk = C, .state = {.k = A1, .v = A2}};
  auto trellis_step = trellis;
  trellis_step.state = ops::TrellisState::start(B, A1, A2);
  all.push_back(
      {"trellis",
       {q, k, v, a, gamma, g},
       [=](const auto& x) { return ops::trellis(x[0], x[1], x[2], x[3], x[4], x[5], trellis).first; },
       make_stepwise([=](const auto& x) {
         return ops::trellis_step(x[0], x[1], x[2], x[3], x[4], x[5], trellis_step);
       })});

  const ops::TTTOptions ttt{.phi_weight = random({H, M}), .chunk = C, .state = {.k = A1}};
  auto ttt_step = ttt;
  ttt_step.state = ops::TTTState::start(B, A1);
  all.push_back(
      {"ttt",
       {q, k, a, gamma, g},
       [=](const auto& x) { return ops::ttt(x[0], x[1], x[2], x[3], x[4], ttt).first; },
       make_stepwise([=](const auto& x) { return ops::ttt_step(x[0], x[1], x[2], x[3], x[4], ttt_step); })});

  const auto S = unit_columns(random({H, D, M}));
  const ops::LatticeOptions lattice{.chunk = C, .state = {.first = S}};
  auto lattice_step = lattice;
  lattice_step.state = ops::LatticeState::start(B, S, /*gated=*/true);
  all.push_back({"lattice",
                 {random({B, T, H, M}), random({B, T, H, M}), v, gamma, g},
                 [=](const auto& x) { return ops::lattice(x[0], x[1], x[2], x[3], x[4], lattice).first; },
                 make_stepwise([=](const auto& x) {
                   return ops::lattice_step(x[0], x[1], x[2], x[3], x[4], lattice_step);
                 })});

  const auto weight = random({D, 3}), scale = random({D});
  const ops::ShortConvOptions conv{.activation = "silu"};
  auto conv_step = conv;
  conv_step.state = ops::ShortConvState::start(B, D, 3, kDouble);
  all.push_back(
      {"short_conv",
       {random({B, T, D})},
       [=](const auto& x) { return ops::short_conv(x[0], weight, {}, conv).first; },
       make_stepwise([=](const auto& x) { return ops::short_conv_step(x[0], weight, {}, conv_step); })});

  all.push_back({"gated_rms_norm",
                 {q, v},
                 [=](const auto& x) {
                   return ops::gated_rms_norm(x[0], scale, x[1], {.activation = "gelu", .eps = 1e-3});
                 },
                 nullptr});

  all.push_back({"cat_attention",
                 {q, k, v},
                 [](const auto& x) { return ops::cat_attention(x[0], x[1], x[2], {.chunk = C}); },
                 nullptr});
  return all;
}

}  // namespace

TEST_CASE("gla is the plain recurrence", "[ops]") {
  at::manual_seed(0);
  const auto q = random({B, T, H, D}), k = random({B, T, H, D}), v = random({B, T, H, D});
  const auto g = gate({B, T, H});
  auto S = at::zeros({B, H, D, D}, kDouble);
  std::vector<Tensor> rows;
  for (int64_t t = 0; t < T; ++t) {
    S = S * g.select(1, t).exp().unsqueeze(-1).unsqueeze(-1) +
        k.select(1, t).unsqueeze(-1) * v.select(1, t).unsqueeze(-2);
    rows.push_back((q.select(1, t).unsqueeze(-2).matmul(S)).squeeze(-2) * 0.5);
  }
  const auto [o, state] = ops::gla(q, k, v, g, {.scale = 0.5});
  CHECK(at::allclose(o, at::stack(rows, 1), 1e-9, 1e-9));
  CHECK(at::allclose(state.s, S, 1e-9, 1e-9));
}

TEST_CASE("gated_rms_norm is a norm times a gate", "[ops]") {
  at::manual_seed(0);
  const auto x = random({B, T, H, D}), weight = random({D}), gate = random({B, T, H, D});
  const auto norm = at::rms_norm(x, {D}, weight, 1e-6);
  CHECK(at::allclose(ops::gated_rms_norm(x, weight), norm, 1e-9, 1e-9));
  CHECK(at::allclose(ops::gated_rms_norm(x, weight, gate), norm * at::silu(gate), 1e-9, 1e-9));
  CHECK(at::allclose(ops::gated_rms_norm(x, weight, gate, {.activation = "sigmoid"}), norm * gate.sigmoid(),
                     1e-9, 1e-9));
}

TEST_CASE("Gradients equal finite differences", "[ops]") {
  for (const auto& op : cases()) {
    INFO(op.name);
    const auto weight = random(op.all(op.inputs).sizes());
    auto leaves = op.inputs;
    for (auto& x : leaves) x = x.detach().requires_grad_(true);
    const auto grads = torch::autograd::grad({(op.all(leaves) * weight).sum()}, leaves);
    for (size_t i = 0; i < leaves.size(); ++i) {
      const auto direction = random(leaves[i].sizes());
      const auto loss_at = [&](double epsilon) {
        auto moved = op.inputs;
        moved[i] = moved[i] + epsilon * direction;
        return (op.all(moved) * weight).sum().item<double>();
      };
      const double difference = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6;
      const double derivative = (grads[i] * direction).sum().item<double>();
      INFO("input " << i << ": " << derivative << ", by differences " << difference);
      CHECK(std::abs(derivative - difference) < 1e-6 * (1 + std::abs(difference)));
    }
  }
}

TEST_CASE("Steps equal the whole sequence", "[ops]") {
  const at::NoGradGuard no_grad;
  for (const auto& op : cases()) {
    if (!op.stepwise_output) continue;  // gated_rms_norm and cat_attention have no state
    INFO(op.name);
    CHECK(at::allclose(op.stepwise_output(op.inputs), op.all(op.inputs), 1e-9, 1e-9));
  }
}

TEST_CASE("No graph is recorded without gradients", "[ops]") {
  for (const auto& op : cases()) {
    INFO(op.name);
    auto inputs = op.inputs;
    CHECK(!op.all(inputs).requires_grad());
    inputs.back() = inputs.back().detach().requires_grad_(true);
    CHECK(op.all(inputs).requires_grad());
    const at::NoGradGuard no_grad;
    CHECK(!op.all(inputs).requires_grad());
  }
}

TEST_CASE("A state continues a sequence", "[ops]") {
  at::manual_seed(0);
  const auto q = random({B, T, H, D}), k = random({B, T, H, D}), v = random({B, T, H, D}),
             g = gate({B, T, H, M});
  const auto part = [](const Tensor& x, int64_t from, int64_t to) { return x.slice(1, from, to); };
  const auto [whole, last] = ops::gsa(q, k, v, {}, g);
  const auto [a, state] = ops::gsa(part(q, 0, 5), part(k, 0, 5), part(v, 0, 5), {}, part(g, 0, 5));
  const auto [b, end] =
      ops::gsa(part(q, 5, T), part(k, 5, T), part(v, 5, T), {}, part(g, 5, T), {.state = state});
  CHECK(at::allclose(at::cat({a, b}, 1), whole, 1e-9, 1e-9));
  CHECK(at::allclose(end.k, last.k, 1e-9, 1e-9));
  CHECK(at::allclose(end.v, last.v, 1e-9, 1e-9));
  CHECK(!end.z.defined());
}

TEST_CASE("Packed sequences equal separate sequences", "[ops]") {
  at::manual_seed(0);
  const auto q = random({1, T, H, D}), k = random({1, T, H, D}), v = random({1, T, H, D}),
             g = gate({1, T, H});
  const auto cu = at::tensor({0, 4, int(T)}, at::kInt);
  const auto [packed, states] = ops::gla(q, k, v, g, {.cu_seqlens = cu});
  const auto [second, state] = ops::gla(q.slice(1, 4), k.slice(1, 4), v.slice(1, 4), g.slice(1, 4));
  CHECK(at::allclose(packed.slice(1, 4), second, 1e-9, 1e-9));
  CHECK(at::allclose(states.s.slice(0, 1), state.s, 1e-9, 1e-9));
}

TEST_CASE("Wrong arguments are refused by name", "[ops]") {
  const auto q = random({B, T, H, D}), k = random({B, T, H, D}), v = random({B, T, H, D}),
             g = random({B, T, H});
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const c10::ValueError& error) {
      return error.what_without_backtrace();
    }
    return "nothing was thrown";
  };
  const auto check_refused = [&](const auto& call, const std::string& words) {
    const auto text = message(call);
    INFO(text);
    CHECK(text.find(words) != std::string::npos);
  };
  check_refused([&] { ops::gsa(q, k, v, {}, {}); }, "gsa: s and g are both None");
  check_refused([&] { ops::gla(q, k.slice(1, 1), v); }, "gla: k");
  check_refused([&] { ops::gla(at::cat({q, q}, 2).slice(2, 0, 3), k, v); }, "gla: q");
  check_refused([&] { ops::gsa(q, k, v, {}, gate({B, T, H, M}), {.feature = "sine"}); }, "feature");
  check_refused(
      [&] {
        ops::trellis(q, k, v, gate({B, T, H, M}), g, {}, {.chunk = C});
      },
      "trellis: state is None");
  check_refused([&] { ops::ttt(q, k, gate({B, T, H, M}), g, {}, {.chunk = C}); }, "ttt: state is None");
  check_refused(
      [&] {
        ops::lattice(q, k, v, g, {}, {.state = {.first = unit_columns(random({H, D, D}))}});
      },
      "chunk is 0");
  check_refused([&] { ops::delta_product(q, k.slice(1, 1), v, g); }, "delta_product: k has 10 rows");
  check_refused([&] { ops::gated_rms_norm(q, random({D + 1})); }, "gated_rms_norm: weight has shape [5]");
  check_refused([&] { ops::gla_step(q.slice(1, 0, 1), k.slice(1, 0, 1), v.slice(1, 0, 1), {}, {}); },
                "state is absent");
}
