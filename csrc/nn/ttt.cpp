// TTTLinear: ttt with targets a = v - k - b and f = layer_norm.
#include "fused.h"
#include "mixers.h"
#include "step.h"

namespace girih::nn {

TTTLinearImpl::TTTLinearImpl(int64_t hidden_size, int64_t num_heads, TTTLinearOptions settings)
    : options(completed("ttt", hidden_size, num_heads, std::move(settings))), num_heads_(num_heads) {
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
  torch::nn::init::constant_(gamma_proj->bias, initial_step_size_bias(options.chunk));
}

std::vector<Product> TTTLinearImpl::products() const {
  return {make_product(v_proj), make_product(g_proj), make_product(gamma_proj, "sigmoid"),
          make_product(q_proj), make_product(k_proj)};
}

Product TTTLinearImpl::output() const { return make_product(o_proj); }

void TTTLinearImpl::expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens) const {
  const std::vector<int64_t> sizes = {num_heads_, *options.head_dim, *options.head_dim};
  check_recurrent_state(state, x, cu_seqlens, {{"q_conv", q_conv}, {"k_conv", k_conv}},
                        {{"first_k", sizes}, {"k", sizes}, {.name = "position", .is_position = true}});
}

Output TTTLinearImpl::core(const std::vector<Tensor>& projected, const Call& call) {
  const auto &gamma = projected[2], &k_projection = projected[4];
  auto [q, q_state] = run_part(*q_conv, projected[3], call, 0);
  auto [k, k_state] = run_part(*k_conv, k_projection, call, 1);
  q = unit_rows(to_heads(q, num_heads_));
  k = unit_rows(to_heads(k, num_heads_));
  const auto weight = inner_weight.to(q.scalar_type()), bias = inner_bias.to(q.scalar_type());
  const auto a = to_heads(projected[0], num_heads_) - k - bias;
  auto past = call.part(2).as<ops::TTTState>();
  if (call.state.empty()) past.k = promote_to_fp32(memory);
  const ops::TTTOptions op_options{.phi_weight = inner_weight,
                                   .chunk = options.chunk,
                                   .f = "layer_norm",
                                   .state = past,
                                   .cu_seqlens = call.cu_seqlens};
  auto [o, after] = call.is_step(k_projection)
                        ? std::pair(ops::ttt_step(q, k, a, gamma, {}, op_options), op_options.state)
                        : ops::ttt(q, k, a, gamma, {}, op_options);
  o = norm(q + weight * o.to(q.scalar_type()) + bias, to_heads(projected[1], num_heads_));
  return {o.flatten(-2), {{}, {q_state, k_state, State::of(after)}}};
}

namespace {

const MixerRegistration ttt({
    "ttt",
    [](const Config& c) -> AnyLayer {
      return std::make_shared<TTTLinearImpl>(c.hidden_size, c.num_heads,
                                             options_from_config<TTTLinearOptions>(c));
    },
    {"head_dim", chunk_field("ttt"), "conv_size", "norm_eps"},
    [](const Config& c) { check_ungrouped(c, "ttt"); },
});

}  // namespace

}  // namespace girih::nn
