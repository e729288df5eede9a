// Raven: gsa with gates that are 0 except in the slots that a router chooses.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>

#include "fused.h"
#include "mixers.h"
#include "step.h"

namespace girih::nn {

RavenImpl::RavenImpl(int64_t hidden_size, int64_t num_heads, RavenOptions settings)
    : options(completed("raven", hidden_size, num_heads, std::move(settings))),
      num_heads_(num_heads),
      key_dim_(head_widths(options).key),
      value_dim_(head_widths(options).value) {
  if (!options.topk) options.topk = std::min<int64_t>(32, options.num_slots);
  const auto kv_heads = *options.num_kv_heads, slots = kv_heads * options.num_slots,
             width = num_heads * value_dim_;
  q_proj = register_module("q_proj", linear(hidden_size, num_heads * key_dim_));
  k_proj = register_module("k_proj", linear(hidden_size, kv_heads * key_dim_));
  v_proj = register_module("v_proj", linear(hidden_size, kv_heads * value_dim_));
  if (options.router_mlp) {
    router_in = linear(hidden_size, hidden_size, /*bias=*/true);
    router_out = linear(hidden_size, slots);
    register_module("r_proj", torch::nn::Sequential(router_in, torch::nn::GELU(), router_out));
  } else {
    r_proj = register_module("r_proj", linear(hidden_size, slots));
  }
  if (options.router_bias) r_bias = register_buffer("r_bias", at::empty({kv_heads, options.num_slots}));
  if (options.slot_decay) {
    f_proj = register_module("f_proj", linear(hidden_size, slots));
  } else {
    a_proj = register_module("a_proj", linear(hidden_size, kv_heads));
    A_log = register_parameter("A_log", at::empty({kv_heads}));
    dt_bias = register_parameter("dt_bias", at::empty({kv_heads}));
    no_weight_decay({A_log, dt_bias});
  }
  std::vector<Tensor> fp32;
  for (const auto& tensor : {A_log, dt_bias, r_bias})
    if (tensor.defined()) fp32.push_back(tensor);
  keep_fp32(std::move(fp32));
  q_norm = register_module("q_norm", RMSNorm(key_dim_, options.norm_eps));
  k_norm = register_module("k_norm", RMSNorm(key_dim_, options.norm_eps));
  if (options.output_gate) {
    o_gate_proj = register_module("o_gate_proj", linear(hidden_size, width));
    o_norm = register_module("o_norm", GatedRMSNorm(value_dim_, options.norm_eps));
  } else {
    g_norm = register_module("g_norm", RMSNorm(width, options.norm_eps));
  }
  o_proj = register_module("o_proj", linear(width, hidden_size));
  reset_parameters();
}

void RavenImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  if (r_bias.defined()) r_bias.zero_();
  if (router_in) router_in->bias.zero_();
  if (!A_log.defined()) return;
  reset_decay(A_log, dt_bias, /*smallest_rate=*/1e-4);
}

std::vector<Product> RavenImpl::products() const {
  std::vector<Product> all = {make_product(q_proj), make_product(k_proj), make_product(v_proj),
                              make_product(options.router_mlp ? router_in : r_proj, "linear"),
                              options.slot_decay
                                  ? make_product(f_proj, "logsigmoid", 1 / options.gate_logit_normalizer)
                                  : make_product(a_proj)};
  if (options.output_gate) all.push_back(make_product(o_gate_proj));
  return all;
}

RowInput RavenImpl::output_prologue() const {
  if (options.output_gate) return {};
  return {"silu_rms_norm", g_norm->weight, g_norm->eps};
}

Product RavenImpl::output() const { return make_product(o_proj); }

void RavenImpl::expect_state(const State& state, const Tensor& x, const Tensor& cu_seqlens) const {
  const auto H = *options.num_kv_heads, M = options.num_slots;
  check_recurrent_state(
      state, x, cu_seqlens, {},
      {{"k", {H, key_dim_, M}}, {"v", {H, M, value_dim_}}, {.name = "z", .is_present = false}});
}

// w [B, T, memories, slots] from the router's logits of the same shape: 0 except in topk slots.
Tensor RavenImpl::write_weights(Tensor logits) const {
  if (options.router_noise && is_training()) logits = logits - at::empty_like(logits).exponential_().log();
  const bool is_softmax = options.router_score == "softmax";
  const auto r = is_softmax ? logits.softmax(-1) : logits.sigmoid();
  const auto chosen = std::get<1>((r_bias.defined() ? r + r_bias : r).topk(*options.topk, -1));
  const auto w = r * at::zeros_like(r).scatter(-1, chosen, 1.0);
  return is_softmax ? w : w / (w.sum(-1, /*keepdim=*/true) + 1e-9);
}

// g [B, T, memories, slots], in fp32 or fp64, from the outputs of the products.
Tensor RavenImpl::log_decay(Tensor router, const Tensor& decay) {
  if (options.router_mlp)
    router = promote_to_fp32(router_out(at::gelu(router).to(router_out->weight.scalar_type())));
  const auto w = write_weights(router.unflatten(-1, {-1, options.num_slots}));
  if (options.slot_decay) return decay.unflatten(-1, {-1, options.num_slots}) * w;
  return apply_gate(decay, {{}, "decay", dt_bias, A_log}).unsqueeze(-1) * w;
}

Output RavenImpl::core(const std::vector<Tensor>& projected, const Call& call) {
  const auto kv_heads = *options.num_kv_heads;
  const auto normalize = [](const Tensor& x, int64_t heads, const RMSNorm& norm) {
    return silu_rms_norm(to_heads(x, heads), norm->weight, norm->eps);
  };
  const auto q = normalize(projected[0], num_heads_, q_norm), k = normalize(projected[1], kv_heads, k_norm),
             v = to_heads(at::silu(projected[2]), kv_heads), g = log_decay(projected[3], projected[4]);
  const ops::GSAOptions gsa{
      .scale = 1.0, .state = call.part(0).as<ops::GSAState>(), .cu_seqlens = call.cu_seqlens};
  auto [o, memory] = call.is_step(q) ? std::pair(ops::gsa_step(q, k, v, {}, g, gsa), gsa.state)
                                     : ops::gsa(q, k, v, {}, g, gsa);
  if (options.output_gate) o = o_norm(at::silu(o), to_heads(projected[5], num_heads_));
  return {o.flatten(-2), {{}, {State::of(memory)}}};
}

namespace {

const MixerRegistration raven({
    "raven",
    [](const Config& c) -> AnyLayer {
      return std::make_shared<RavenImpl>(c.hidden_size, c.num_heads, options_from_config<RavenOptions>(c));
    },
    {"num_kv_heads", "head_dim", "expand_k", "expand_v", "num_slots", "topk", "slot_decay", "router_score",
     "router_mlp", "router_bias", "router_noise", "output_gate", "norm_eps"},
    [](const Config& c) {
      head_widths(c, 1, 1);
      TORCH_CHECK_VALUE(!c.topk || *c.topk <= c.num_slots, "topk is ", *c.topk, "; expected 1 to num_slots, ",
                        c.num_slots);
    },
});

}  // namespace

}  // namespace girih::nn
