// TTTLinear: ttt with targets a = v - k - b and f = layer_norm.
#include "fused.h"
#include "mixers.h"
#include "step.h"

namespace girih::nn {

TTTLinearImpl::TTTLinearImpl(int64_t hidden_size, int64_t num_heads, TTTLinearOptions given)
    : options(completed("ttt", hidden_size, num_heads, std::move(given))), num_heads_(num_heads) {
  const auto head_dim = *options.head_dim, channels = num_heads * head_dim;
  const ShortConvOptions conv{.kernel_size = options.conv_size};
  q_proj = register_module("q_proj", linear(hidden_size, channels));
  k_proj = register_module("k_proj", linear(hidden_size, channels));
  q_conv = register_module("q_conv", ShortConv(channels, conv));
  k_conv = register_module("k_conv", ShortConv(channels, conv));
  v_proj = register_module("v_proj", linear(hidden_size, channels));
  gamma_proj = register_module("gamma_proj", linear(hidden_size, num_heads, true));
  memory = register_parameter("memory", at::empty({num_heads, head_dim, head_dim}));
  inner_weight = register_parameter("inner_weight", at::empty({num_heads, head_dim}));
  inner_bias = register_parameter("inner_bias", at::empty({num_heads, head_dim}));
  g_proj = register_module("g_proj", linear(hidden_size, channels));
  norm = register_module("norm", GatedRMSNorm(head_dim, options.norm_eps, "gelu"));
  o_proj = register_module("o_proj", linear(channels, hidden_size));
  no_weight_decay({memory, inner_weight, inner_bias, gamma_proj->bias});
  keep_fp32({memory, gamma_proj->bias});
  reset_parameters();
}

void TTTLinearImpl::reset_parameters() {
  torch::nn::init::normal_(memory);  // entries of size 1: the layer norm divides by their size
  torch::nn::init::ones_(inner_weight);
  torch::nn::init::zeros_(inner_bias);
  torch::nn::init::constant_(gamma_proj->bias, first_step_bias(options.chunk));
}

std::vector<Product> TTTLinearImpl::products() const {
  return {product_of(v_proj), product_of(g_proj), product_of(gamma_proj, "sigmoid"), product_of(q_proj),
          product_of(k_proj)};
}

Product TTTLinearImpl::output() const { return product_of(o_proj); }

Output TTTLinearImpl::core(const std::vector<Tensor>& projected, const Call& call) {
  const auto &gamma = projected[2], &for_k = projected[4];
  auto [q, q_state] = run_part(*q_conv, projected[3], call, 0);
  auto [k, k_state] = run_part(*k_conv, for_k, call, 1);
  q = unit_rows(to_heads(q, num_heads_));
  k = unit_rows(to_heads(k, num_heads_));
  const auto weight = inner_weight.to(q.scalar_type()), bias = inner_bias.to(q.scalar_type());
  const auto a = to_heads(projected[0], num_heads_) - k - bias;
  auto past = call.part(2).as<ops::TTTState>();
  if (call.state.empty()) past.k = at_least_fp32(memory);
  const ops::TTTOptions rule{.phi_weight = inner_weight,
                             .chunk = options.chunk,
                             .f = "layer_norm",
                             .state = past,
                             .cu_seqlens = call.cu_seqlens};
  auto [o, after] = call.steps(for_k) ? std::pair(ops::ttt_step(q, k, a, gamma, {}, rule), rule.state)
                                      : ops::ttt(q, k, a, gamma, {}, rule);
  o = norm(q + weight * o.to(q.scalar_type()) + bias, to_heads(projected[1], num_heads_));
  return {o.flatten(-2), {{}, {q_state, k_state, State::of(after)}}};
}

namespace {

const Registered ttt({
    "ttt",
    [](const Config& c) -> AnyLayer {
      return std::make_shared<TTTLinearImpl>(c.hidden_size, c.num_heads, options_of<TTTLinearOptions>(c));
    },
    {"head_dim", chunk_of("ttt"), "conv_size", "norm_eps"},
    [](const Config& c) { expect_ungrouped(c, "ttt"); },
});

}  // namespace

}  // namespace girih::nn
