// Mamba2: the mixer of Mamba-2, computed by gla with q = C, k = B, v = dt x.
#include "fused.h"
#include "mixers.h"
#include "step.h"

namespace girih::nn {
namespace {

// Number of heads, expand_v * num_heads.
int64_t count_heads(int64_t num_heads, double expand_v) {
  const auto heads = expand_v * double(num_heads), whole = std::round(heads);
  TORCH_CHECK_VALUE(whole >= 1 && std::abs(heads - whole) < 1e-6 * heads, "expand_v is ", expand_v,
                    " and num_heads is ", num_heads, ", which makes ", heads,
                    " heads of mamba2; expected a whole number");
  return int64_t(whole);
}

}  // namespace

Mamba2Impl::Mamba2Impl(int64_t hidden_size, int64_t num_heads, Mamba2Options settings)
    : options(completed("mamba2", hidden_size, num_heads, settings)),
      heads_(count_heads(num_heads, options.expand_v)) {
  const auto width = heads_ * *options.head_dim, channels = width + 2 * options.state_size;
  in_proj = register_module("in_proj", linear(hidden_size, channels));
  conv = register_module(
      "conv", ShortConv(channels, ShortConvOptions{.kernel_size = options.conv_size, .bias = true}));
  dt_proj = register_module("dt_proj", linear(hidden_size, heads_));
  z_proj = register_module("z_proj", linear(hidden_size, width));
  A_log = register_parameter("A_log", at::empty({heads_}));
  dt_bias = register_parameter("dt_bias", at::empty({heads_}));
  skip = register_parameter("skip", at::empty({heads_}));
  no_weight_decay({A_log, dt_bias, skip});
  keep_fp32({A_log, dt_bias});
  norm = register_module("norm", RMSNorm(width, options.norm_eps));
  o_proj = register_module("o_proj", linear(width, hidden_size));
  reset_parameters();
}

void Mamba2Impl::reset_parameters() {
  const at::NoGradGuard no_grad;
  reset_decay(A_log, dt_bias, /*smallest_rate=*/1);
  skip.fill_(1);
}

std::vector<Product> Mamba2Impl::products() const {
  return {make_product(in_proj), make_product(dt_proj, "linear"), make_product(z_proj)};
}

Product Mamba2Impl::output() const { return make_product(o_proj); }

void Mamba2Impl::expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens) const {
  check_recurrent_state(state, x, cu_seqlens, {{"conv", conv}},
                        {{"s", {heads_, options.state_size, *options.head_dim}}});
}

Output Mamba2Impl::core(const std::vector<Tensor>& projected, const Call& call) {
  auto [xbc, conv_state] = run_part(*conv, projected[0], call, 0);
  const auto N = options.state_size;
  const auto p = xbc.split_with_sizes({heads_ * *options.head_dim, N, N}, -1);
  const auto x = to_heads(p[0], heads_), B = p[1].unsqueeze(2), C = p[2].unsqueeze(2);
  const auto dt = at::softplus(projected[1] + dt_bias);
  const auto g = -promote_to_fp32(A_log).exp() * dt;
  const auto v = x * dt.unsqueeze(-1).to(x.scalar_type());
  const ops::GLAOptions gla{
      .scale = 1.0, .state = call.part(1).as<ops::GLAState>(), .cu_seqlens = call.cu_seqlens};
  auto [o, memory] =
      call.is_step(xbc) ? std::pair(ops::gla_step(C, B, v, g, gla), gla.state) : ops::gla(C, B, v, g, gla);
  o = o + x * skip.unsqueeze(-1).to(x.scalar_type());
  return {silu_product(projected[2], o.flatten(-2)), {{}, {conv_state, State::of(memory)}}};
}

namespace {

const MixerRegistration mamba2({
    "mamba2",
    [](const Config& c) -> AnyLayer {
      return std::make_shared<Mamba2Impl>(c.hidden_size, c.num_heads, options_from_config<Mamba2Options>(c));
    },
    {"head_dim", "expand_v", "state_size", "conv_size", "norm_eps"},
    [](const Config& c) {
      TORCH_CHECK_VALUE(c.reads("num_kv_heads") || c.num_kv_heads == c.num_heads, "num_kv_heads is ",
                        *c.num_kv_heads, "; mamba2 has no groups of queries: expected num_heads, ",
                        c.num_heads);
      count_heads(c.num_heads, c.expand_v.value_or(Mamba2Options{}.expand_v));
    },
    "had no state_size and cannot be loaded",
    /*has_mlp=*/false,
});

}  // namespace

}  // namespace girih::nn
