// GatedLinearAttention: linear attention, RetNet and GLA, by the operator gla.
#include "layer.h"
#include "mixers.h"

namespace girih::nn {

GatedLinearAttentionImpl::GatedLinearAttentionImpl(int64_t hidden_size, int64_t num_heads,
                                                   GatedLinearAttentionOptions settings)
    : options(completed(settings.rotary ? "retnet" : "gla", hidden_size, num_heads, settings)),
      key_dim_(head_widths(options).key),
      value_dim_(head_widths(options).value) {
  const auto& gate = options.gate;
  TORCH_CHECK_VALUE(gate == "none" || gate == "fixed" || gate == "scalar" || gate == "vector", "gate is '",
                    gate, "'; expected one of none, fixed, scalar, vector");
  TORCH_CHECK_VALUE(options.rotary || options.rope_theta == GatedLinearAttentionOptions{}.rope_theta,
                    "rope_theta is ", options.rope_theta, "; expected none: it is for rotary");
  const auto kv_heads = *options.num_kv_heads;
  const auto width = num_heads * value_dim_,
             channels = num_heads * key_dim_ + kv_heads * (key_dim_ + value_dim_);
  heads_ = {num_heads, kv_heads, kv_heads};
  qkv_proj = register_module("qkv_proj", linear(hidden_size, channels));
  ShortConvOptions conv_options{.kernel_size = options.conv_size};
  if (options.conv_size == 0) conv_options.activation = {};
  conv = register_module("conv", ShortConv(channels, conv_options));
  if (gate == "scalar") {
    decay_scalar = register_module("decay", DecayGate(hidden_size, kv_heads));
    skip = register_parameter("skip", at::empty({num_heads}));
    no_weight_decay({skip});
  } else if (gate == "vector") {
    decay_vector = register_module("decay", torch::nn::ModuleList());
    decay_vector->push_back(linear(hidden_size, options.gate_low_rank));
    gate_proj = linear(options.gate_low_rank, kv_heads * key_dim_, true);
    decay_vector->push_back(gate_proj);
    no_weight_decay({gate_proj->bias});
    keep_fp32({gate_proj->bias});
  }
  g_proj = register_module("g_proj", linear(hidden_size, width));
  norm = register_module("norm", GatedRMSNorm(value_dim_, options.norm_eps));
  o_proj = register_module("o_proj", linear(width, hidden_size));
  reset_parameters();
}

void GatedLinearAttentionImpl::reset_parameters() {
  if (skip.defined()) torch::nn::init::ones_(skip);
  if (gate_proj) torch::nn::init::zeros_(gate_proj->bias);
}

// The log decay g and, for gate = scalar, the time step dt.
std::pair<Tensor, Tensor> GatedLinearAttentionImpl::log_decay(const Tensor& x) {
  if (options.gate == "none") return {};
  if (options.gate == "fixed") {
    const auto wide = at::promote_types(x.scalar_type(), at::kFloat);
    const auto head = at::arange(heads_[1], x.options().dtype(wide));
    return {at::log1p(-at::exp2(at::rsub(head, -5.0))).expand({x.size(0), x.size(1), -1}), {}};
  }
  if (options.gate == "scalar") return decay_scalar(x);
  const auto logits = linear_with_fp32_bias(gate_proj, decay_vector->at<torch::nn::LinearImpl>(0).forward(x));
  return {(at::log_sigmoid(logits) / options.gate_logit_normalizer).unflatten(-1, {-1, key_dim_}), {}};
}

void GatedLinearAttentionImpl::expect_state(const State& state, const Tensor& x,
                                            const Tensor& cu_seqlens) const {
  check_recurrent_state(state, x, cu_seqlens, {{"conv", conv}}, {{"s", {heads_[1], key_dim_, value_dim_}}},
                        options.rotary ? 1 : 0);
  if (options.rotary && !state.empty())
    check_state_tensor("length", state.tensors[0], {count_sequences(x, cu_seqlens)}, at::kLong);
}

Output GatedLinearAttentionImpl::mix(const Tensor& x, const Call& call) {
  expect_state(call.state, x, call.cu_seqlens);
  auto [qkv, conv_state] = run_part(*conv, qkv_proj(x), call, 0);
  auto [q, k, v] = split_heads(qkv, heads_, key_dim_, value_dim_);
  Tensor position, length;
  if (options.rotary) {
    const auto before = call.state.empty() ? Tensor() : call.state.tensors[0];
    std::tie(position, length) = token_positions(x, before, call.cu_seqlens);
    q = nn::rotary(q, position, options.rope_theta);
    k = nn::rotary(k, position, options.rope_theta);
  }
  auto [g, dt] = log_decay(x);
  Tensor skipped;
  if (options.gate == "none") {
    q = at::elu(q) + 1;
    k = at::elu(k) + 1;
  } else if (options.gate == "scalar") {
    skipped = v.repeat_interleave(heads_[0] / heads_[1], 2) * skip.unsqueeze(-1).to(v.scalar_type());
    v = v * dt.unsqueeze(-1).to(v.scalar_type());
  }
  const ops::GLAOptions gla{.state = call.part(1).as<ops::GLAState>(), .cu_seqlens = call.cu_seqlens};
  auto [o, memory] =
      call.is_step(x) ? std::pair(ops::gla_step(q, k, v, g, gla), gla.state) : ops::gla(q, k, v, g, gla);
  if (skipped.defined()) o = o + skipped;
  const auto gate = to_heads(g_proj(x), heads_[0]);
  State after{{}, {conv_state, State::of(memory)}};
  if (options.rotary) after.tensors = {call.is_step(x) ? call.state.tensors[0].add_(1) : length};
  return {o_proj(norm(o, gate).flatten(-2)), after};
}

namespace {

AnyLayer make_linear_attention(const Config& c, GatedLinearAttentionOptions defaults) {
  const auto has_rotary = defaults.rotary && c.rotary;  // only retnet reads the field `rotary`
  auto options = options_from_config(c, std::move(defaults));
  options.rotary = has_rotary;
  if (!has_rotary)
    // Not read; other layers of the model may set the field.
    options.rope_theta = GatedLinearAttentionOptions{}.rope_theta;
  return std::make_shared<GatedLinearAttentionImpl>(c.hidden_size, c.num_heads, options);
}

void check_retnet(const Config& c) {
  const auto keys = head_widths(c, 1, 2).key;
  TORCH_CHECK_VALUE(!c.rotary || keys % 2 == 0, "head_dim is ", *c.head_dim, " and keys have ", keys,
                    " channels; rotary positions turn pairs and need an even number");
}

std::vector<MixerField> linear_fields(std::initializer_list<MixerField> defaults) {
  std::vector<MixerField> all = {"num_kv_heads", "head_dim", "expand_k", "expand_v", "conv_size", "norm_eps"};
  all.insert(all.begin(), defaults);
  return all;
}

const MixerRegistration plain({"linear_attention",
                               [](const Config& c) { return make_linear_attention(c, {.gate = "none"}); },
                               linear_fields({}), [](const Config& c) { head_widths(c, 1, 1); }});
// expand_v = 2 and rotary positions (Sun et al. 2023).
const MixerRegistration retnet({"retnet",
                                [](const Config& c) {
                                  return make_linear_attention(
                                      c, {.expand_v = 2, .gate = "fixed", .rotary = true});
                                },
                                linear_fields({"rotary", "rope_theta"}), check_retnet,
                                "had expand_v = 1, rotary = false"});
// expand_k = 0.5 (Yang et al. 2024).
const MixerRegistration gla(
    {"gla", [](const Config& c) { return make_linear_attention(c, {.expand_k = 0.5, .gate = "vector"}); },
     linear_fields({}), [](const Config& c) { head_widths(c, 0.5, 1); }, "had expand_k = 1"});

}  // namespace

}  // namespace girih::nn
