// GatedDeltaProduct: delta_product with queries and keys that groups of heads share, as in Megatron-LM.
#include <numeric>

#include "fused.h"
#include "mixers.h"
#include "step.h"

namespace girih::nn {

GatedDeltaProductImpl::GatedDeltaProductImpl(int64_t hidden_size, int64_t num_heads,
                                             GatedDeltaProductOptions settings)
    : options(completed("gated_delta_product", hidden_size, num_heads, settings)), num_heads_(num_heads) {
  const auto n = options.n, width = num_heads * *options.head_dim,
             keys = options.num_groups * options.state_size;
  channels_ = {n * width, n * keys, keys};
  const auto channels = std::accumulate(channels_.begin(), channels_.end(), int64_t(0));
  parts_ = {width, channels, n * num_heads, num_heads};
  in_proj = register_module("in_proj", linear(hidden_size, width + channels + (n + 1) * num_heads));
  conv = register_module("conv", ShortConv(channels, ShortConvOptions{.kernel_size = options.conv_size}));
  A_log = register_parameter("A_log", at::empty({num_heads}));
  dt_bias = register_parameter("dt_bias", at::empty({num_heads}));
  no_weight_decay({A_log, dt_bias});
  keep_fp32({A_log, dt_bias});
  norm = register_module("norm", GatedInputRMSNorm(width, options.num_groups, options.norm_eps));
  o_proj = register_module("o_proj", linear(width, hidden_size));
  reset_parameters();
}

void GatedDeltaProductImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  reset_decay(A_log, dt_bias, /*smallest_rate=*/1e-4);
}

std::vector<Product> GatedDeltaProductImpl::products() const { return {make_product(in_proj)}; }

Product GatedDeltaProductImpl::output() const { return make_product(o_proj); }

void GatedDeltaProductImpl::expect_state(const State& state, const Tensor& x,
                                         const Tensor& cu_seqlens) const {
  check_recurrent_state(state, x, cu_seqlens, {{"conv", conv}},
                        {{"s", {num_heads_, options.state_size, *options.head_dim}},
                         {.name = "position", .is_present = false}});
}

Output GatedDeltaProductImpl::core(const std::vector<Tensor>& projected, const Call& call) {
  const auto parts = projected[0].split_with_sizes(parts_, -1);
  auto [vkq, conv_state] = run_part(*conv, parts[1], call, 0);
  const auto p = vkq.split_with_sizes(channels_, -1);
  const auto n = options.n;
  const auto v = split_steps(to_heads(p[0], n * num_heads_), n),
             k = split_steps(to_heads(p[1], n * options.num_groups), n),
             q = to_heads(p[2], options.num_groups),
             beta = split_steps(apply_gate(parts[2], {.weight = {}, .gate = "sigmoid"}), n),
             g = apply_gate(parts[3], {{}, "decay", dt_bias, A_log});
  const ops::DeltaProductOptions op_options{.n = n,
                                            .l2norm_qk = true,
                                            .state = call.part(1).as<ops::DeltaProductState>(),
                                            .cu_seqlens = call.cu_seqlens};
  auto [o, memory] = call.is_step(q)
                         ? std::pair(ops::delta_product_step(q, k, v, beta, g, op_options), op_options.state)
                         : ops::delta_product(q, k, v, beta, g, op_options);
  return {norm(o.flatten(-2), parts[0]), {{}, {conv_state, State::of(memory)}}};
}

namespace {

const MixerRegistration gated_delta_product({
    "gated_delta_product",
    [](const Config& c) -> AnyLayer {
      return std::make_shared<GatedDeltaProductImpl>(c.hidden_size, c.num_heads,
                                                     options_from_config<GatedDeltaProductOptions>(c));
    },
    {"n", "num_groups", "head_dim", "state_size", "conv_size", "norm_eps"},
    [](const Config& c) {
      TORCH_CHECK_VALUE(c.reads("num_kv_heads") || c.num_kv_heads == c.num_heads, "num_kv_heads is ",
                        *c.num_kv_heads, "; gated_delta_product has no groups of queries: expected ",
                        "num_heads, ", c.num_heads, "; the heads share keys by num_groups");
      TORCH_CHECK_VALUE(c.num_heads % c.num_groups == 0, "num_groups is ", c.num_groups,
                        "; expected a divisor of num_heads, ", c.num_heads);
    },
});

}  // namespace

}  // namespace girih::nn
